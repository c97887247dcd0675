"""Finding the chain of blocks of a model: the modules that run one after the other.

A block is one module, or a few that belong together and stay on one stage. The chain is in registration order; a
rehearsal of the step finds out in which order they run (:mod:`~lightning_sdpipe.partition.plan` asks for it).
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

    Without ``names``, every child of an ``nn.Sequential`` or ``nn.ModuleList`` is a block. A module that is not such a
    container is a block itself when it has parameters or buffers, unless it holds more than half of the parameters that
    lie in containers: then it is opened too. An element of a container is opened only if it is a container, or a stage
    of a convolutional network: a module with a single child, a container of modules of one class with parts. Any other
    may add its input to the output of its body, and such a body cannot be cut. Without any container, the children are
    the blocks, or those of an only child.

    Then also yields the other chain, if there is one, in which a module is opened if it holds one of the longest
    ModuleLists, instead of most of the parameters. In a model without containers, whose modules are blocks, the largest
    one is opened in the other chain, and in the first if that would have a single block.

    With ``names``, each of those modules is a block, ``*`` standing for one part of a path
    (``"encoder.layer.*"``).

    Raises:
        ConfigurationError: no chain of blocks was found, or a name matches no module or lies within another.
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
    """Return the chain with the parts of each module in its place that is called once and is heavy, or that is not
    called itself while its parts are; the same holds for the parts."""
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
    """Raise ConfigurationError where several blocks lie in a module that is compiled as one."""
    for path, inner in module.named_modules():
        if hasattr(inner, "_orig_mod") or getattr(inner, "_compiled_call_impl", None) is not None:
            within = [block for block in chain if block.startswith(f"{path}." if path else "")]
            if len(within) > 1:
                raise ConfigurationError(compiled_as_one(path or type(module).__name__))


def compiled_as_one(what: str) -> str:
    """Return the reason why a compiled module cannot be cut, and the line to write instead."""
    return (
        f"{what} is compiled as one piece, and a pipeline has to stop and continue between blocks. Compile each block "
        "instead, and pass the module as it is, as in `for layer in model.layers: layer.compile()`; or use "
        "num_stages=1."
    )


def _open(
    module: nn.Module, path: str, opened: Callable[[nn.Module], bool], lists: Collection[nn.Module] | None = None
) -> Iterator[str]:
    """Yield the chain within ``module``; of containers only ``lists`` are taken apart, if they are given."""
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
    """Yield the chain of a model without containers, in which a module of several parts that has most of the parameters
    is opened."""
    half = sum(p.numel() for p in module.parameters()) / 2

    def opened(child: nn.Module) -> bool:
        return any(map(_has_state, child.children())) and sum(p.numel() for p in child.parameters()) > half

    return _open(module, "", opened)


def _in_containers(module: nn.Module) -> Iterator[int]:
    """Yield the numbers of parameters of the outermost containers in ``module``."""
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
    """Return the blocks of a chain: the modules before the first element of a container are one block with it, and
    those after the last element are one block of their own."""
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
