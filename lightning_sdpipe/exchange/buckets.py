"""A stage's parameters in flat contiguous buffers, so that averaging is one pass over memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class FlatBucket:
    """One contiguous 1-D buffer and the parameters that are views of it, in order. Complex parameters lie in it as
    pairs of real numbers, since collectives, sums and payloads know those only."""

    buffer: Tensor
    parameters: Sequence[nn.Parameter]
    trains: bool
    """Did its parameters train when it was made? Equal on all replicas, whatever their users do meanwhile."""

    def check(self) -> None:
        """Raises RuntimeError if a parameter no longer is a view of the buffer, which averaging would then miss."""
        offset = self.buffer.data_ptr()
        for parameter in self.parameters:
            if parameter.data_ptr() != offset:
                raise RuntimeError(
                    f"A parameter of shape {tuple(parameter.shape)} was given other memory after set-up (an assignment "
                    "to .data, or .to()), so it cannot be averaged. Change parameters in place instead."
                )
            offset += parameter.numel() * parameter.element_size()


def tensors_of(buckets: Sequence[FlatBucket]) -> list[Tensor]:
    """The buffers, after :meth:`FlatBucket.check` of each: what an exchange moves."""
    for bucket in buckets:
        bucket.check()
    return [bucket.buffer for bucket in buckets]


def flatten(parameters: Iterable[nn.Parameter]) -> list[FlatBucket]:
    """Moves parameters into flat buffers and makes each parameter a view of its buffer: one per dtype for those that
    train, and one for those that are frozen.

    The parameter objects stay the same; peak memory is the parameters of one buffer, twice, while they are copied.
    """
    alike: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        alike.setdefault((parameter.dtype, parameter.requires_grad), []).append(parameter)
    return [_flatten_one(group) for group in alike.values()]


def _flatten_one(parameters: list[nn.Parameter]) -> FlatBucket:
    total = sum(p.numel() for p in parameters)
    flat = torch.empty(total, dtype=parameters[0].dtype, device=parameters[0].device)
    offset = 0
    for parameter in parameters:
        view = flat[offset : offset + parameter.numel()].view(parameter.shape)
        view.copy_(parameter.data)
        parameter.data = view
        offset += parameter.numel()
    return FlatBucket(as_real(flat), parameters, parameters[0].requires_grad)


def as_real(flat: Tensor) -> Tensor:
    """The same memory as real numbers, where it holds complex ones; ``flat`` is contiguous and 1-D."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
