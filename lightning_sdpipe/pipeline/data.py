"""What the stages of a pipeline have in common: seeds, numbers, and batches, which are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.groups import ProcessGroups
from lightning_sdpipe.p2p import waiting_for
from lightning_sdpipe.pipeline.samples import tensors_in


def shared_seed() -> int:
    """A seed that all ranks share, from rank 0's generator; every rank must call it."""
    return shared(torch.initial_seed() % 2**62)


def shared(number: int) -> int:
    """Rank 0's number, on all ranks; every rank must call it."""
    first = torch.tensor(number)
    dist.broadcast(first, 0)
    return int(first)


def stand_in(shape: Sequence[int]) -> Tensor:
    """What a loader may give, without reading the data, for inputs that this worker's stage does not compute with.

    Its float32 values are not numbers, so that a stage that does compute with them is noticed; it takes no memory.
    """
    return torch.full((), torch.nan).expand(*shape)


def check_equal(batch: Any, groups: ProcessGroups) -> None:
    """Compares a batch between the stages of this pipeline; all of them must call it.

    Of a tensor that is a :func:`stand_in` on some stages, shapes are compared there.

    Raises:
        WorkerFailedError: one of them is gone.
        ConfigurationError: they were given different batches.
    """
    tensors = list(tensors_in(batch))
    counts = _on_all_stages([len(tensors)], groups)
    same = len(set(counts)) == 1
    if same:
        shapes = _on_all_stages([_digest(repr(tuple(tensor.shape)).encode()) for tensor in tensors], groups)
        values = _on_all_stages([_value_digest(tensor) for tensor in tensors], groups)
        same = len(set(shapes)) == 1 and all(len({*column} - {_STAND_IN}) <= 1 for column in zip(*values, strict=True))
    if not same:
        raise ConfigurationError(
            "The stages of a pipeline were given different batches, so outputs would not belong to labels. Draw random "
            "numbers in the dataset and in collate_fn from the generators of torch, numpy and random (which are in "
            "step here), not from one that is seeded per process, and let a custom sampler depend on "
            "trainer.strategy.distributed_sampler_kwargs instead of the rank."
        )


def check_equal_split(signatures: Sequence[object], groups: ProcessGroups) -> None:
    """Compares how the module's own ``split_batch`` has split a batch between the stages; all of them must call it.

    Raises:
        WorkerFailedError: one of them is gone.
        ConfigurationError: shapes of the parts differ.
    """
    if len(set(_on_all_stages([_digest(repr(signatures).encode())], groups))) > 1:
        raise ConfigurationError(
            "split_batch returned batches of other shapes on some stages of a pipeline than on others. Let it depend "
            "on nothing but the batch and n: every stage splits the same batch for itself."
        )


_STAND_IN = 0


def _value_digest(tensor: Tensor) -> int:
    tensor = tensor.detach().cpu()
    if tensor.is_floating_point() and tensor.isnan().all():
        return _STAND_IN
    return _digest(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big", signed=True)


def _on_all_stages(numbers: Sequence[int], groups: ProcessGroups) -> list[tuple[int, ...]]:
    mine = torch.tensor(numbers, dtype=torch.int64)
    stages = [torch.zeros_like(mine) for _ in range(groups.mesh.num_stages)]
    with waiting_for(groups.pipeline, "comparing batches"):
        dist.all_gather(stages, mine, group=groups.pipeline)
    return [tuple(stage.tolist()) for stage in stages]
