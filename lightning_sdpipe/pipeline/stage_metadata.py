"""Metadata about updates that the stages of a pipeline without a flush exchange beside activations and gradients.

Stages update at different times, so a stage cannot know all stages' updates when it makes its own. What it knows
travels with messages that are waited for anyway, so this costs no wait.

Squared norms, for clipping. The sum over this stage and all before it goes with the activations, and the sum over this
stage and all after it goes with a gradient. Each is of the stages' newest updates. So when stage j applies the gradient
of mini-batch v at turn v + M − 1 − j, it knows the norm of the same mini-batch for the stages after it, and for a stage
i before it the norm of mini-batch v − (j − i) − 1, that stage's newest update before this turn. Before a stage's first
update since the last sync point its norm counts as 0: a stage may clip by less than the whole norm, but never by less
than its own.

The loss scale is the last stage's. It goes up with each gradient, for the stages to divide by. When a stage's gradients
have overflowed, the scale with which they were computed goes down with the next activations.
"""

from __future__ import annotations

import math

import torch

from lightning_sdpipe import p2p
from lightning_sdpipe.p2p import Tag
from lightning_sdpipe.pipeline.link import StageLink


class StageNotes:
    """One stage's end of the metadata.

    Args:
        link: the link to this stage's neighbours.
    """

    def __init__(self, link: StageLink) -> None:
        self._link = link
        self.norms = False  # whether squared norms travel; the same on all stages
        self.scales = False  # whether loss scales travel; the same on all stages
        self._own = self._earlier = self._later = 0.0
        self._expected: p2p.Transfer | None = None  # the squared norms of later stages
        self._owes = False  # whether the previous stage waits for the squared norms of this stage and later ones
        self._overflowed = math.inf
        self._sent: list[p2p.Transfer] = []

    def send_down(self) -> None:
        """Send metadata to the next stage, after activations."""
        if self.norms or self.scales:
            self._send([self._own + self._earlier, self._overflowed], self._link.stage + 1, Tag.NORM_SO_FAR)
            self._overflowed = math.inf

    def receive_down(self) -> None:
        """Receive metadata from the previous stage, after activations."""
        if self.norms or self.scales:
            self._earlier, overflowed = self._receive(2, self._link.stage - 1, Tag.NORM_SO_FAR).wait()[0].tolist()
            self.report_overflow(overflowed)

    def send_scale(self, scale: float) -> None:
        """Send the loss scale to the previous stage, after a gradient."""
        if self.scales:
            self._send([scale], self._link.stage - 1, Tag.SCALE)

    def receive_scale(self) -> float:
        """Receive the loss scale from the next stage, after a gradient; return 1 without a loss scale."""
        return float(self._receive(1, self._link.stage + 1, Tag.SCALE).wait()[0]) if self.scales else 1.0

    def gradient_received(self) -> None:
        """Note that a gradient has come from the next stage, which will then send its squared norm."""
        if self.norms:
            self._hear()
            self._expected = self._receive(1, self._link.stage + 1, Tag.NORM)

    def gradient_sent(self) -> None:
        """Note that a gradient went to the previous stage, which then expects the squared norm, including that of an
        update that follows."""
        self._owes = self.norms

    def squared_norm(self, own: float) -> float:
        """Return the squared norm over all stages, as far as known; ``own`` is this stage's, of its newest update."""
        self._own = own
        self.pay()
        self._hear()
        return self._own + self._earlier + self._later

    def pay(self) -> None:
        """Send the previous stage the squared norm, if it expects one."""
        if self._owes:
            self._owes = False
            self._hear()
            self._send([self._own + self._later], self._link.stage - 1, Tag.NORM)

    def report_overflow(self, scale: float) -> None:
        """Report that gradients computed with this loss scale are not finite."""
        self._overflowed = min(self._overflowed, scale)

    def take_overflow(self) -> float:
        """Return the smallest loss scale reported since the last call; infinite if there is none."""
        scale, self._overflowed = self._overflowed, math.inf
        return scale

    def forget(self) -> None:
        """Wait until all metadata is sent and received, when the pipeline is empty, and reset the norms."""
        self.pay()
        self._hear()
        self._own = self._earlier = self._later = 0.0
        self._settle(0)

    def _hear(self) -> None:
        if self._expected is not None:
            self._later = float(self._expected.wait()[0])
            self._expected = None

    def _send(self, values: list[float], stage: int, tag: int) -> None:
        tensor = torch.tensor(values, dtype=torch.float64)
        link = self._link
        self._sent.append(p2p.send([tensor], link.ranks[stage], link.group, tag, link.name(stage)))
        self._settle(4 * len(link.ranks))  # a stage cannot be further ahead of its neighbours

    def _receive(self, count: int, stage: int, tag: int) -> p2p.Transfer:
        link = self._link
        buffer = torch.empty(count, dtype=torch.float64)
        return p2p.receive([buffer], link.ranks[stage], link.group, tag, link.name(stage))

    def _settle(self, leave: int) -> None:
        while len(self._sent) > leave:
            self._sent.pop(0).wait()
