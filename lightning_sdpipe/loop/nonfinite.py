"""Ending a run whose numbers are not finite any more, before one pipeline's model reaches the others.

A loss of one pipeline that is nan makes its parameters nan within a step, and averaging those of all others soon after.
So each worker looks at its losses and at its parameters after each update, and reads what it found before it shares
its model. Looking does not wait for a GPU; reading does, which is why it is put off until then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sdpipe.errors import NonFiniteError
from lightning_sdpipe.exchange.buckets import FlatBucket

_NEVER = 2**62
_KEPT = 64  # numbers that are looked at together, which takes as long as looking at one


class NonfiniteWatch:
    """Records when a worker's numbers ceased to be finite.

    Args:
        where: names this worker's stage and pipeline.
        buckets: its parameters; the sequence may change.
        device: of its tensors.
        losses: look at losses too. In 16-bit mixed precision they may overflow, and the step is skipped then.
    """

    def __init__(self, where: str, buckets: Sequence[FlatBucket], device: torch.device, losses: bool) -> None:
        self._where = where
        self._buckets = buckets
        self._losses = losses
        self._loss, self._parameters = _Earliest(device), _Earliest(device)

    def loss(self, loss: Tensor, batch: int) -> None:
        """Look at the loss of mini-batch ``batch``."""
        if self._losses:
            self._loss.add(loss, batch)

    def parameters(self, update: int) -> None:
        """Look at the parameters after ``update``."""
        for bucket in self._buckets:
            if bucket.trains:
                total = bucket.buffer.sum(dtype=torch.float32)  # finite if all are, and one pass over memory
                self._parameters.add(total, update)

    def check(self) -> None:
        """Raise NonFiniteError if anything was not finite."""
        loss, parameters = torch.stack([self._loss.found(), self._parameters.found()]).tolist()
        if loss == parameters == _NEVER:
            return
        what = f"the loss of mini-batch {loss}" if loss <= parameters else f"the parameters after update {parameters}"
        raise NonFiniteError(f"{what}, counted from 0 since training started, on {self._where}")


class _Earliest:
    """The earliest time of a number that is not finite, as a tensor on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._since = torch.tensor(_NEVER, device=device)
        self._seen: list[tuple[Tensor, int]] = []

    def add(self, value: Tensor, time: int) -> None:
        self._seen.append((value, time))
        if len(self._seen) == _KEPT:
            self.found()

    def found(self) -> Tensor:
        if self._seen:
            finite = torch.stack([value for value, _ in self._seen]).isfinite()
            times = torch.tensor([time for _, time in self._seen], device=self._device)
            self._since = torch.minimum(self._since, times.masked_fill(finite, _NEVER).min())
            self._seen = []
        return self._since
