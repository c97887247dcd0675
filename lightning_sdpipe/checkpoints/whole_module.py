"""Reassembly of the user's module after a run in which each worker held its stage."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sdpipe.p2p import waiting_for
from lightning_sdpipe.partition.ownership import Ownership, become, replace_data
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
    slots: dict[int, list[tuple[dict[str, Any], str, str]]] = {}  # of each tensor: where it is, and its whole name
    for path, part in module.named_modules():
        for slot in (part._parameters, part._buffers):
            for name, value in slot.items():
                if value is not None:
                    slots.setdefault(id(value), []).append((slot, name, f"{path}.{name}".lstrip(".")))
    for places in slots.values():
        slot, name, whole_name = places[0]
        tensor: Tensor = slot[name]
        owners = ownership.stages[whole_name]
        value = tensor.detach().clone() if stage in owners else torch.empty(tensor.shape, dtype=tensor.dtype)
        if len(owners) < mesh.depth(pipeline) or not isinstance(tensor, nn.Parameter):
            # the last one's, since buffers outside of blocks are up to date where the step runs to its end
            with waiting_for(groups.pipeline, "bringing the module together"):
                dist.broadcast(value, mesh.rank(owners[-1], pipeline), group=groups.pipeline)
        if not keep:
            continue
        if stage in owners:
            tensor.data = value  # the same object: users may hold it in their own lists
            continue
        new = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
        vars(new).update(attributes_of(tensor))
        new = become(tensor, new)
        for slot, name, _ in places:
            slot[name] = new
