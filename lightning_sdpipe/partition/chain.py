"""Finds the chain of blocks of a model: the modules that run one after the other.

A block is one module, or several that stay together on one stage. The chain is in registration order; a rehearsal of
the step, which :mod:`~lightning_sdpipe.partition.plan` asks for, finds the order in which they run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence

from torch import nn

from lightning_sdpipe.errors import ConfigurationError

_CONTAINERS = (nn.Sequential, nn.ModuleList)


Block = tuple[str, ...]  # paths of modules that run one after the other and stay on one stage


def find_chains(module: nn.Module, names: Sequence[str] | None = None) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the blocks of ``module``, in order.

    Without ``names``, every child of an ``nn.Sequential`` or ``nn.ModuleList`` is a block. Any other module with
    parameters or buffers is a block itself, unless it holds more than half of the parameters in containers: then it is
    opened, too. An element of a container is opened only if it is a container, or a stage of a convolutional network: a
    module whose only child is a container of modules of one class that have parts. Any other element may add its input
    to the output of its body, and such a body cannot be cut. In a model without containers, the children are the
    blocks.

    A second chain follows if it differs: in it, modules are opened if they hold one of the longest ModuleLists, rather
    than most of the parameters. In a model without containers, the second chain has the largest module opened; so has
    the first, if it would have a single block.

    With ``names``, each of those modules is a block; ``*`` stands for one part of a path (``"encoder.layer.*"``).

    Raises:
        ConfigurationError: no chain was found, or a name matches no module, or one that is named twice or lies within
            another block.
    """
    if names is not None:
        yield _named_chain(module, names)
        return
    most = sum(_in_containers(module))
    first = tuple(_open(module, "", lambda child: 2 * sum(_in_containers(child)) > most))
    if not first:
        raise ConfigurationError(
            f"No blocks were found in {type(module).__name__}, since it has no submodule with parameters. Put its "
            "parameters, and the code that computes with them, into modules that are attributes of it; of an "
            "nn.Sequential or nn.ModuleList each element is a block."
        )
    finer = () if most else tuple(_open_largest(module))
    if len(first) == 1 and finer:
        first = finer
    yield first
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
    longest = {m for m in lists if len(m) == max(map(len, lists)) > 1}
    second = tuple(_open(module, "", lambda child: not longest.isdisjoint(child.modules()), longest))
    if longest and second != first:
        yield second
    if finer not in ((), first):
        yield finer


def open_heavy(
    module: nn.Module, chain: Sequence[str], is_heavy: Callable[[nn.Module], bool], calls: Sequence[nn.Module]
) -> tuple[str, ...]:
    """Return the chain with some modules replaced by their parts: those that are called once and are heavy, and those
    that are never called themselves while their parts are. Parts are opened by the same rule."""
    called = set(calls)
    opened: list[str] = []
    for path in chain:
        block = module.get_submodule(path)
        parts = [f"{path}.{name}" for name, part in block.named_children() if _has_state(part)]
        runs = any(not called.isdisjoint(module.get_submodule(part).modules()) for part in parts)
        if runs and (block not in called or (calls.count(block) == 1 and is_heavy(block))):
            opened += open_heavy(module, parts, is_heavy, calls)
        else:
            opened.append(path)
    return tuple(opened)


def described(blocks: Sequence[Block]) -> str:
    """Return the names of the first and the last of consecutive blocks, and their number."""
    if not blocks:
        return "the whole module"
    return ends(blocks) + (f" ({len(blocks)})" if len(blocks) > 1 else "")


def ends(blocks: Sequence[Block]) -> str:
    """Return the names of the first and the last of consecutive blocks."""
    return " … ".join(dict.fromkeys(" + ".join(block) for block in (blocks[0], blocks[-1])))


def refuse_compiled(module: nn.Module, chain: Sequence[str]) -> None:
    """Raise ConfigurationError if several blocks lie in one compiled module."""
    for path, inner in module.named_modules():
        if hasattr(inner, "_orig_mod") or getattr(inner, "_compiled_call_impl", None) is not None:
            within = [block for block in chain if block.startswith(f"{path}." if path else "")]
            if len(within) > 1:
                raise ConfigurationError(compiled_as_one(path or type(module).__name__))


def compiled_as_one(what: str) -> str:
    """Return why a compiled module cannot be cut, and what to write instead."""
    return (
        f"{what} is compiled as one piece, and a pipeline has to stop and continue between blocks. Compile each block "
        "instead, and pass the module as it is, as in `for layer in model.layers: layer.compile()`; or use "
        "num_stages=1."
    )


def _open(
    module: nn.Module, path: str, opened: Callable[[nn.Module], bool], lists: Collection[nn.Module] | None = None
) -> Iterator[str]:
    """Yield the chain within ``module``; if ``lists`` are given, only those containers are opened."""
    is_list = isinstance(module, _CONTAINERS) if lists is None else module in lists
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if lists is None and (isinstance(child, _CONTAINERS) or (is_list and _is_stage(child))):
            yield from _open(child, child_path, opened)
        elif lists is not None and child in lists:
            yield from _open(child, child_path, opened, lists)
        elif is_list:
            yield child_path
        elif _has_state(child):
            if opened(child):
                yield from _open(child, child_path, opened, lists)
            else:
                yield child_path


def _open_largest(module: nn.Module) -> Iterator[str]:
    """Yield the chain of a model without containers, with modules opened that have parts and hold most of the
    parameters."""
    half = sum(p.numel() for p in module.parameters()) / 2

    def opened(child: nn.Module) -> bool:
        return any(map(_has_state, child.children())) and sum(p.numel() for p in child.parameters()) > half

    return _open(module, "", opened)


def _in_containers(module: nn.Module) -> Iterator[int]:
    """Yield the number of parameters of each outermost container in ``module``."""
    if isinstance(module, _CONTAINERS):
        yield sum(p.numel() for p in module.parameters())
    else:
        for child in module.children():
            yield from _in_containers(child)


def _is_stage(module: nn.Module) -> bool:
    children = list(module.children())
    if len(children) != 1 or not isinstance(children[0], _CONTAINERS):
        return False
    elements = list(children[0])
    return len({type(e) for e in elements}) == 1 and all(
        not isinstance(e, _CONTAINERS) and any(map(_has_state, e.children())) for e in elements
    )


def _has_state(module: nn.Module) -> bool:
    return bool(module.state_dict(keep_vars=True))


def join_ends(module: nn.Module, chain: Sequence[str]) -> tuple[Block, ...]:
    """Return the blocks of a chain: if several modules precede the first element of a container, they form one block
    with it; those after the last element form another."""
    elements = [
        index
        for index, path in enumerate(chain)
        if isinstance(module.get_submodule(path.rpartition(".")[0]), _CONTAINERS)
    ]
    if not elements:
        return tuple((path,) for path in chain)
    first, last = elements[0], elements[-1]
    before = [tuple(chain[: first + 1])] if first > 1 else [(path,) for path in chain[: first + 1]]
    after = [tuple(chain[last + 1 :])] if chain[last + 1 :] else []
    return (*before, *((path,) for path in chain[first + 1 : last + 1]), *after)


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
