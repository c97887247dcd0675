"""Finding the chain of blocks that a model is: which modules run one after the other.

A block is a module whose output is all that the rest of the model needs from it and from the blocks before it. The
chain is in registration order; the cut step checks at run time that the blocks really run in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torch import nn

from lightning_sdpipe.errors import ConfigurationError

_CONTAINERS = (nn.Sequential, nn.ModuleList)


def find_chain(module: nn.Module, names: Sequence[str] | None = None) -> tuple[str, ...]:
    """The paths of the blocks of ``module``, in order.

    Without ``names``, every child of an ``nn.Sequential`` or ``nn.ModuleList`` is a block. A module that is no such
    container is a block itself when it has parameters or buffers, unless it holds more than half of the model's
    parameters and a container among its descendants: then it is opened too. An element of a container is opened only
    if it is a container: a residual block adds its input to the output of its body, so its body cannot be cut.

    With ``names``, those modules, ``*`` standing for one part of a path (``"encoder.layer.*"``).

    Raises:
        ConfigurationError: no chain of two blocks was found, or a name matches no module or lies within another.
    """
    if names is not None:
        return _named_chain(module, names)
    total = sum(p.numel() for p in module.parameters())
    chain = tuple(_open(module, "", total))
    if not chain:
        raise ConfigurationError(
            f"No chain of blocks was found in {type(module).__name__}: it holds no nn.Sequential or nn.ModuleList and "
            f"no submodule with parameters. {_HOW_TO_NAME}"
        )
    return chain


_HOW_TO_NAME = (
    "Name the blocks in the order in which they run, for example "
    'SDPipeStrategy(blocks=["model.embeddings", "model.layers.*", "model.head"]).'
)


def _open(module: nn.Module, path: str, total: int) -> Iterator[str]:
    inside_container = isinstance(module, _CONTAINERS)
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if isinstance(child, _CONTAINERS):
            yield from _open(child, child_path, total)
        elif inside_container:
            yield child_path
        elif _has_state(child):
            if _dominates(child, total) and _holds_container(child):
                yield from _open(child, child_path, total)
            else:
                yield child_path


def _has_state(module: nn.Module) -> bool:
    return bool(module.state_dict(keep_vars=True))


def _dominates(module: nn.Module, total: int) -> bool:
    return 2 * sum(p.numel() for p in module.parameters()) > total


def _holds_container(module: nn.Module) -> bool:
    return any(isinstance(child, _CONTAINERS) for child in module.modules())


def _named_chain(module: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    paths = [path for path, _ in module.named_modules() if path]
    chain: list[str] = []
    for name in names:
        pattern = re.compile(r"[^.]+".join(re.escape(part) for part in name.split("*")))
        matches = [path for path in paths if pattern.fullmatch(path)]
        if not matches:
            near = [path for path in paths if path.startswith(name.split("*")[0].rsplit(".", 1)[0])][:6]
            raise ConfigurationError(
                f"blocks names {name!r}, but {type(module).__name__} has no such module. "
                f"Modules nearby: {near or paths[:6]}."
            )
        chain.extend(matches)
    for path in chain:
        if chain.count(path) > 1 or any(path.startswith(other + ".") for other in chain):
            raise ConfigurationError(
                f"blocks names {path!r} twice, or within another block; every block must be named once and on its own."
            )
    return tuple(chain)
