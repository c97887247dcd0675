"""The user's module as one whole again, after a run in which each worker held its stage; and what keeps a part of it
from being saved as if it were the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.groups import ProcessGroups
from lightning_sdpipe.p2p import waiting_for
from lightning_sdpipe.partition.ownership import Ownership


def is_whole(module: nn.Module) -> bool:
    """Whether nothing of ``module`` lies on ``meta``."""
    return all(not tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def to_cpu(module: nn.Module) -> None:
    """Moves what is not on ``meta`` to the CPU; the tensors stay the same objects."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not (tensor.is_meta or tensor.is_cpu):
            tensor.data = tensor.data.cpu()


def make_whole(module: nn.Module, ownership: Ownership, groups: ProcessGroups, keep: bool) -> None:
    """Gives this worker what the other stages of its pipeline hold, on the CPU, where its own part must be already.
    Each tensor gets memory of its own; ties between names are kept. All workers of a pipeline must call it.

    Args:
        module: of which this worker holds a stage.
        ownership: which stage holds what.
        groups: this worker's place.
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
        value = tensor.detach().clone() if stage in owners else torch.empty_like(tensor, device="cpu")
        if len(owners) < mesh.num_stages or not isinstance(tensor, nn.Parameter):
            # the last one's, since buffers outside of blocks are up to date where the step runs to its end
            with waiting_for(groups.pipeline, "bringing the module together"):
                dist.broadcast(value, mesh.rank(owners[-1], pipeline), group=groups.pipeline)
        if not keep:
            continue
        if stage in owners and isinstance(tensor, nn.Parameter):
            tensor.data = value  # the same object: users may hold it in lists of their own
            continue
        new = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
        for slot, name, _ in places:
            slot[name] = new


def mark_parts(module: nn.Module) -> Callable[[], None]:
    """Lets no ``state_dict`` of ``module`` be saved that lacks what other stages hold. Returns what undoes it."""
    handles = [part.register_state_dict_post_hook(_mark) for part in module.modules()]  # type: ignore[no-untyped-call]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _mark(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    for name in _own_names(module):
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor) and value.is_meta:
            state_dict[prefix + name] = value.detach().as_subclass(_Elsewhere)


def _own_names(module: nn.Module) -> Iterator[str]:
    yield from module._parameters
    yield from module._buffers


class _Elsewhere(Tensor):
    """What another stage holds: it has a shape and no values, so it cannot be saved."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigurationError(
            "This worker holds only its own stage of the module, so what would be saved here is not the whole. During "
            "a run, trainer.save_checkpoint(path), called on all ranks, writes all of it into one file. After a run "
            "every worker has it whole, unless it was built on the meta device in configure_model: then set "
            "SDPipeStrategy(gather_module=True) if it fits into the memory of every worker."
        )
