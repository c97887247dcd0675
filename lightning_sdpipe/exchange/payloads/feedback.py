"""What compression has left out so far, to be sent later."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sdpipe.exchange.payloads.payload import residual_dtype


class ErrorFeedback:
    """The residual of one buffer on one worker: one float32 per value (float64 for float64).

    A message holds Q(x + δ), and δ' = x + δ − Q(x + δ) stays for the next one. So over time everything is sent: the sum
    of all messages differs from the sum of all x by the last δ only (Seide et al. 2014; BAGUA §3.2, whose printed signs
    would subtract what was left out a second time).

    Where a group averages in two phases (:mod:`~lightning_sdpipe.exchange.algorithms.centralised`), a worker sends
    every part of the buffer but its own in the first and the mean of its own in the second. So one residual has room
    for the errors of both, BAGUA's δ and ε. Who owns which part must stay the same; when members change, :meth:`drop`
    it.

    It is no part of checkpoints, which are made when replicas are equal: :meth:`drop` it there too, so that a resumed
    run does as the one that went on.
    """

    def __init__(self, buffer: Tensor) -> None:
        self.residual = torch.zeros_like(buffer, dtype=residual_dtype(buffer.dtype))
        self._scale = 1.0

    def follow(self, scale: float) -> None:
        """``scale`` is what gradients are multiplied by from now on, by a loss scaler: rescales what was left out."""
        if scale != self._scale:
            self.residual.mul_(scale / self._scale)
            self._scale = scale

    def drop(self) -> None:
        """Forgets what was left out."""
        self.residual.zero_()
