"""Which stages own each parameter and buffer, and how a rank releases the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_sdpipe import p2p
from lightning_sdpipe.exchange.held_buffers import contiguous
from lightning_sdpipe.lightning_internals import note_device
from lightning_sdpipe.partition.placeholder import WeightElsewhere
from lightning_sdpipe.partition.same_memory import SameMemory, same_memory
from lightning_sdpipe.topology.groups import ProcessGroups


@dataclass(frozen=True)
class Ownership:
    """The stages that hold each parameter and buffer, by every name that it has in the module.

    A tensor in a block belongs to the block's stage. A tensor outside all blocks (a parameter that user code between
    blocks uses) is held by every stage, and a tensor with names in several stages (tied weights) by all of those; so
    are parameters that are different objects over the same ``memory``.
    """

    stages: Mapping[str, tuple[int, ...]]
    memory: SameMemory = field(default_factory=SameMemory)
    blocks: Mapping[str, int] = field(default_factory=dict)
    """The stage of each block, by its path."""

    @property
    def num_stages(self) -> int:
        """Number of stages, each of which runs a block."""
        return max(self.blocks.values(), default=0) + 1

    def stage_of(self, name: str) -> int:
        """Return the stage whose block holds the tensor ``name``; the last stage, where the step ends, if no block
        does."""
        stage = _in_a_block(name, self.blocks)
        return self.num_stages - 1 if stage is None else stage

    def owners(self, name: str) -> tuple[int, ...]:
        """Return the stages that hold the tensor ``name``; for a tensor added since, :meth:`stage_of` it."""
        return self.stages.get(name) or (self.stage_of(name),)

    def held_by(self, stage: int) -> list[str]:
        return [name for name, owners in self.stages.items() if stage in owners]

    def shared_parameters(self, module: nn.Module) -> list[tuple[tuple[int, ...], str]]:
        """Return the parameters that several stages hold, each once, as ``(owners, name)`` in the module's order."""
        return [(self.stages[name], name) for name, _ in module.named_parameters() if len(self.stages[name]) > 1]


def assign_owners(
    module: nn.Module,
    chain: Sequence[str],
    spans: Sequence[range],
    num_workers: int | None = None,
    readers: Mapping[str, Iterable[int]] | None = None,
    memory: SameMemory | None = None,
) -> Ownership:
    """Return the ownership of ``module``'s tensors when stage ``j`` runs the blocks ``chain[b] for b in spans[j]``.

    With more spans than ``num_workers``, worker ``j`` runs the spans ``j``, ``j + num_workers`` and so on, and owns all
    that they hold. ``readers`` are further stages that own a tensor, since they compute with it outside its block.
    ``memory`` is the result of :func:`~lightning_sdpipe.partition.same_memory.same_memory` before any tensor moved; if
    None, it is found here.
    """
    num_workers = num_workers or len(spans)
    stage_of_block = {chain[block]: number % num_workers for number, span in enumerate(spans) for block in span}
    everywhere = set(range(num_workers))
    named = _named_tensors(module)
    memory = memory or same_memory(module)
    owners: dict[int, set[int]] = {}
    for name, tensor in named:
        stage = _in_a_block(name, stage_of_block)
        stays = tensor.layout is not torch.strided  # a sparse buffer has no placeholder
        owners.setdefault(id(tensor), set()).update(everywhere if stage is None or stays else {stage})
        owners[id(tensor)].update(number % num_workers for number in (readers or {}).get(name, ()))
    for names in memory.parameters:
        together = [id(module.get_parameter(name)) for name in names]
        owners |= dict.fromkeys(together, set().union(*(owners[one] for one in together)))
    return Ownership({name: tuple(sorted(owners[id(tensor)])) for name, tensor in named}, memory, stage_of_block)


def _in_a_block(name: str, stages: Mapping[str, int]) -> int | None:
    """Return the stage of the block that holds the tensor ``name``, given each block's stage; None if no block does."""
    parts = name.split(".")
    paths = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    return next((stages[path] for path in paths if path in stages), None)


def buffers_now(module: nn.Module, ownership: Ownership, groups: ProcessGroups) -> dict[str, Tensor]:
    """Return, for each buffer of ``module``, a tensor on ``meta`` with its shape and type on the last stage that holds
    it, since a forward may assign another one. All stages of a pipeline must call this, and get the same."""
    found: dict[str, Tensor] = {}
    stage, pipeline = groups.mesh.locate(groups.rank)
    for number, rank in enumerate(groups.mesh.pipeline_ranks(pipeline)):
        mine = [
            (name, list(buffer.shape), str(buffer.dtype).removeprefix("torch."))
            for name, buffer in (module.named_buffers() if number == stage else ())
            if ownership.owners(name)[-1] == stage and buffer.layout is torch.strided
        ]
        for name, shape, dtype in p2p.broadcast_value(mine, rank, groups.pipeline):
            found[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    return found


def parameters_held(module: nn.Module, ownership: Ownership, stage: int) -> int:
    """Return the number of elements of all parameters that a stage holds, shared ones included, each counted once."""
    named = dict(module.named_parameters(remove_duplicate=False))
    held = {id(named[name]): named[name] for name in ownership.held_by(stage) if name in named}
    return sum(parameter.numel() for parameter in held.values())


_SAVES_NOTHING = 0.8


def saves_nothing(module: nn.Module, ownership: Ownership) -> str:
    """Return what to tell the user if every stage holds more than 80 % of the parameters; else an empty string."""
    total = sum(parameter.numel() for parameter in module.parameters())
    least = min(parameters_held(module, ownership, stage) for stage in range(ownership.num_stages))
    if ownership.num_stages == 1 or least <= _SAVES_NOTHING * total:
        return ""
    sizes: dict[str, int] = {}
    for owners, name in ownership.shared_parameters(module):
        if len(owners) == ownership.num_stages:
            parent = ".".join(name.split(".")[:-1][:_SHOWN_DEPTH])
            sizes[parent] = sizes.get(parent, 0) + module.get_parameter(name).numel()
    largest = sorted(sizes, key=lambda parent: -sizes[parent])[:3]
    return (
        f"The cut saves no memory: every stage holds at least {least / total:.0%} of the parameters. All stages hold "
        f"what lies in no block, since it runs more than once in a step, or is a tied weight: most of it in {largest}. "
        "Use num_stages=1 and more pipelines, or let a step run these modules once and name them with blocks=[...]."
    )


_SHOWN_DEPTH = 4  # parts of a module's path that are shown


def keep_only(module: nn.Module, ownership: Ownership, stage: int, device: torch.device) -> None:
    """Move the tensors that ``stage`` holds to ``device`` and all others to ``meta``; ties between names are kept.

    A tensor on ``meta`` becomes a :class:`~lightning_sdpipe.partition.placeholder.WeightElsewhere`, and stays the same
    object where :func:`become` can do that.
    """
    moved: dict[int, Tensor] = {}
    kept = {id(t) for name, t in _named_tensors(module) if stage in ownership.stages[name]}
    for path, owner in module.named_modules():
        slots: Any
        for slots in (owner._parameters, owner._buffers):
            for name, tensor in slots.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    moved[id(tensor)] = (
                        _move(tensor, device)
                        if id(tensor) in kept
                        else become(tensor, WeightElsewhere(tensor, device, f"{path}.{name}" if path else name))
                    )
                slots[name] = moved[id(tensor)]
    for first, *others in ownership.memory.parameters:
        for other in others if stage not in ownership.stages[first] else ():  # so that the next run finds them tied
            cast(Any, module.get_parameter(other)).meta = cast(Any, module.get_parameter(first)).meta


def move(module: nn.Module, device: torch.device) -> None:
    """Move a whole module like ``module.to(device)``; its parameters stay the same objects."""
    for parameter in module.parameters():
        _move(parameter, device)
    module.to(device)


def move_the_rest(module: nn.Module, device: torch.device) -> None:
    """Complete ``module.to(device)`` after :func:`keep_only` has moved parameters and buffers: move metric states and
    whatever else overrides ``_apply``, and set ``self.device``."""
    note_device(module, device=device)
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        contiguous(tensor)
    if tensor.device == device:
        return tensor
    if not isinstance(tensor, nn.Parameter):
        return tensor.to(device)
    replace_data(tensor, tensor.data.to(device))
    return tensor


def replace_data(parameter: Tensor, value: Tensor) -> None:
    """Give ``parameter`` other memory, perhaps on another device. It stays the same object, since users may hold it in
    lists of their own."""
    if torch._has_compatible_shallow_copy_type(parameter, value):
        parameter.data = value
    else:  # between the CPU and most accelerators other than CUDA
        torch.utils.swap_tensors(parameter, nn.Parameter(value, parameter.requires_grad))  # type: ignore[no-untyped-call]


def become(tensor: Tensor, other: Tensor) -> Tensor:
    """Turn ``tensor`` into ``other``, its class and attributes included, and return it, so that every reference to it,
    as in a list of parameters or a callback, sees the change. If torch cannot do this, because of weak references or an
    autograd graph, return ``other``."""
    try:
        torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
    except (RuntimeError, TypeError):
        return other
    return tensor


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
