"""Digests that show whether the stages of a pipeline were given equal batches.

Every stage loads the same mini-batches itself: the first needs the inputs, the last the labels that belong to them. A
digest travels with the first message of each mini-batch, and every stage compares it with its own. So a data set that
draws from its own random generator is found in the first mini-batch that differs.

A digest has the same length for any batch, and is read before anything that depends on the batch's shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.pipeline.micro_batches import tensors_in

LIMIT = 2**20
"""A tensor of up to this many bytes is read whole; of a larger one, at most an eighth of this many, spread over it."""

SLOTS = 12
"""Number of slots, one for each tensor; if there are more tensors, they share slots."""

LENGTH = 3 + 2 * SLOTS

_STAND_IN = 0


class BatchDigest:
    """Digest of a mini-batch, made before any step can change the batch.

    Args:
        batch: the batch as the user's step gets it.
        parts: the shapes of the micro-batches, if the module splits the batch itself.
        options: the options of the optimizer's groups, if it steps with this batch.
    """

    def __init__(self, batch: Any, parts: Sequence[object] = (), options: Sequence[Mapping[str, object]] = ()) -> None:
        found = [(name, _strided(tensor.detach())) for name, tensor in tensors_in(batch)]
        self.names = [name for name, _ in found]
        self._parts = parts
        self._options = options
        self._shapes = [[tuple(tensor.shape) for tensor in tensors] for _, tensors in found]
        self._samples = [[_sample(tensor) for tensor in tensors] for _, tensors in found]
        self._copied = None
        if away := [tensor.device for _, tensors in found for tensor in tensors if tensor.device.type != "cpu"]:
            self._copied = torch.Event(away[0])
            self._copied.record()
            self._numbers: list[int] = []
        else:
            self._numbers = self._made()

    @property
    def numbers(self) -> list[int]:
        """The digest's numbers. Waits for copies from a device, but not for what the device computes afterwards."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied, self._numbers = None, self._made()
        return self._numbers

    def _made(self) -> list[int]:
        shapes, values = [1] * SLOTS, [1] * SLOTS
        for number, (shape, samples) in enumerate(zip(self._shapes, self._samples, strict=True)):
            slot = number % SLOTS
            shapes[slot] = crc32(repr(shape).encode(), shapes[slot])
            for sample in samples:
                if values[slot] != _STAND_IN:
                    values[slot] = _STAND_IN if _is_stand_in(sample) else crc32(_bytes(sample), values[slot]) or 1
        self._samples = []
        described = (crc32(repr(what).encode()) for what in (self.names, self._parts, self._options))
        names, parts, options = described
        return [names, parts, *shapes, *values, options]

    def compare(self, theirs: Sequence[int], stage: int) -> None:
        """Check that the digest of an earlier ``stage`` is of the same batch. Values that are stand-ins here are taken
        from that stage, for comparison with the next.

        Raises:
            ConfigurationError: the batches differ.
        """
        mine = self.numbers
        if mine == theirs:
            return
        if mine[0] != theirs[0]:
            raise _different(f"they have other parts than here: {_listed(self.names)}", stage)
        for kind, start in (("of another shape", 2), ("with other values", 2 + SLOTS)):
            for slot in range(SLOTS):
                here, there = mine[start + slot], theirs[start + slot]
                stands_in = start > 2 and _STAND_IN in (here, there)
                if here != there and not stands_in:
                    raise _different(f"{_listed(self.names[slot::SLOTS])} came {kind}", stage)
        if mine[1] != theirs[1]:
            raise ConfigurationError(
                f"split_batch returned batches of other shapes on some stages (stage {stage}) than here. Let it depend "
                "on nothing but the batch and n: every stage splits the same batch for itself."
            )
        if mine[-1] != theirs[-1]:
            raise ConfigurationError(
                f"The optimizer's options are not on stage {stage} what they are here, in the same mini-batch: "
                f"{self._options}. A hook has changed them on some stages only, by what exists on last stages only "
                "(what steps return or collect), or the optimizer computes them from the weights of one stage. Change "
                "them by what all stages have: outputs['loss'] in on_train_batch_end, and trainer.callback_metrics in "
                "on_validation_end and on_train_epoch_end."
            )
        for place, there in enumerate(theirs):
            mine[place] = mine[place] or there


def options_of(optimizers: Sequence[Optimizer]) -> list[dict[str, object]]:
    """Return, for each parameter group, its options with plain values, among those that the optimizer defines."""
    return [
        {name: group[name] for name in optimizer.defaults if name in group and _is_plain(group[name])}
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def _is_plain(value: object) -> bool:
    return isinstance(value, (bool, int, float, str)) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _different(what: str, stage: int) -> ConfigurationError:
    return ConfigurationError(
        "The stages of a pipeline were given different batches, so outputs would not belong to labels: on stage "
        f"{stage} {what}. Seed what the script itself draws, as by L.seed_everything(1): every process runs it. Draw "
        "random numbers in the dataset and in collate_fn from the generators of torch, numpy and random (which are in "
        "step here), not from one that is seeded per process, and let a custom sampler depend on "
        "trainer.strategy.distributed_sampler_kwargs instead of the rank."
    )


def _listed(names: Sequence[str]) -> str:
    return " or ".join(names[:4]) + (" or another" if len(names) > 4 else "") if names else "no tensor"


def _strided(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that hold the contents of ``tensor``."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor.values()] if tensor.layout != torch.strided or tensor.is_nested else [tensor]


def _sample(tensor: Tensor) -> Tensor:
    """Return the sample of ``tensor`` that is read, on the CPU; a copy from a device may still be under way."""
    limit = LIMIT if tensor.nbytes <= LIMIT else LIMIT // 8
    while tensor.nbytes > limit and max(tensor.shape) > 1:
        inner = tensor.shape[1:]
        largest = 1 + inner.index(max(inner)) if max(inner, default=1) > 1 else 0
        tensor = tensor[(slice(None),) * largest + (slice(None, None, 3),)]
    return tensor.contiguous().to("cpu", non_blocking=tensor.device.type != "cpu")


def _is_stand_in(sample: Tensor) -> bool:
    if not sample.is_floating_point() or not sample.numel() or not math.isnan(sample.view(-1)[0].item()):
        return False
    return bool(sample.isnan().all())


def _bytes(sample: Tensor) -> Any:
    plain = torch.view_as_real(sample.resolve_conj()) if sample.is_complex() else sample
    return plain.reshape(-1).view(torch.uint8).numpy()
