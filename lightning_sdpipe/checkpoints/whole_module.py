"""Reassembly of the user's module after a run in which each worker held its stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sdpipe.p2p import waiting_for
from lightning_sdpipe.partition.ownership import Ownership, become, buffers_now, replace_data
from lightning_sdpipe.partition.placeholder import attributes_of
from lightning_sdpipe.partition.same_memory import held_together
from lightning_sdpipe.topology.groups import ProcessGroups


def is_whole(module: nn.Module) -> bool:
    """Return whether no tensor of ``module`` lies on ``meta``."""
    return all(not tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def to_cpu(module: nn.Module) -> None:
    """Move the tensors that are not on ``meta`` to the CPU; they stay the same objects."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not (tensor.is_meta or tensor.is_cpu):
            replace_data(tensor, tensor.data.cpu())


def make_room(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Give the buffers of ``module`` the shapes that they have in its own ``state``, since forwards may have assigned
    others."""
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            given = state.get(f"{path}.{name}".lstrip("."))
            if isinstance(given, Tensor) and (buffer is None or buffer.shape != given.shape):
                part._buffers[name] = torch.empty_like(given, device=None if buffer is None else buffer.device)


def tie_again(module: nn.Module, ownership: Ownership) -> None:
    """Restore shared memory: tensors that were one memory before the run get the memory of the first of them that is
    here."""
    for first, *others in held_together(module, ownership.memory):
        for other in others:
            replace_data(other, first.data)


def make_whole(module: nn.Module, ownership: Ownership, groups: ProcessGroups, keep: bool) -> None:
    """Give this worker the tensors of the other stages of its pipeline, on the CPU, where its own part must be
    already. Each tensor gets separate memory; ties between names are kept. All workers of a pipeline must call it.

    Args:
        module: the module of which this worker holds a stage.
        ownership: the owners of its tensors.
        groups: the process groups of this worker.
        keep: False for a worker that only takes part for the sake of the others. It needs memory for one tensor.
    """
    mesh = groups.mesh
    stage, pipeline = mesh.locate(groups.rank)
    slots: dict[int, list[tuple[dict[str, Any], str]]] = {}  # of each tensor: where it is
    for part in module.modules():
        for slot in (part._parameters, part._buffers):
            for name, value in slot.items():
                slots.setdefault(id(value), []).append((slot, name))
    now = buffers_now(module, ownership, groups)
    for whole_name in (*(name for name, _ in module.named_parameters()), *now):
        inside, _, name = whole_name.rpartition(".")
        part = module.get_submodule(inside)
        own_slot: dict[str, Any] = part._buffers if whole_name in now else part._parameters
        tensor: Tensor | None = own_slot.get(name)
        like = now.get(whole_name, tensor)
        assert like is not None
        owners = ownership.owners(whole_name)
        is_here = tensor is not None and stage in owners and (tensor.shape, tensor.dtype) == (like.shape, like.dtype)
        held = tensor if is_here else None
        value = torch.empty(like.shape, dtype=like.dtype) if held is None else held.detach().clone()
        if len(owners) < mesh.depth(pipeline) or whole_name in now:
            # the last one's, since buffers outside of blocks are up to date where the step runs to its end
            with waiting_for(groups.pipeline, "bringing the module together"):
                dist.broadcast(value, mesh.rank(owners[-1], pipeline), group=groups.pipeline)
        if not keep:
            continue
        if held is not None and not held.is_inference():
            held.data = value  # the same object: users may hold it in their own lists
            continue
        new = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
        if tensor is None:
            own_slot[name] = new
            continue
        vars(new).update(attributes_of(tensor))
        new = become(tensor, new)
        for each, name in slots[id(tensor)]:
            each[name] = new
