"""The dealer's account of one pipeline: the batches that it holds, and when it will have trained them."""

from __future__ import annotations

import math

from lightning_sdpipe.dealing.leases import Done, Lease

SHORTEST = 1e-6
"""Least seconds of a batch; no clock is finer."""


class PipelineProgress:
    """One pipeline's leases in this segment, and its speed as far as known. It has ``depth`` stages."""

    __slots__ = ("asked", "base", "depth", "leased", "leases", "loose", "present", "seconds", "trained")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.seconds: float | None = None
        self.present = True
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """Begin a segment, or the pipeline's part in it."""
        self.leases: list[Lease] = []
        self.leased = 0
        self.trained: dict[int, int] = {}
        self.loose: dict[int, int] = {}
        """By stage, how many of its trained batches no other model has."""
        self.base = now
        """Time from which it takes its remaining batches × ``seconds`` to finish what it holds."""
        self.asked = -1
        """Newest ordinal that some stage asked for."""

    @property
    def open(self) -> bool:
        """True if an ask is unanswered."""
        return self.asked >= len(self.leases)

    @property
    def waits(self) -> bool:
        """True if an ask is open and the pipeline stands still, as an empty lease has told it."""
        return self.open and bool(self.leases) and not self.leases[-1].size

    @property
    def furthest(self) -> int:
        """Batches that some stage has trained."""
        return max(self.trained.values(), default=0)

    def finished(self) -> int:
        """Return the number of batches that all stages have trained."""
        return min(self.trained.values()) if len(self.trained) == self.depth else 0

    def kept(self) -> int:
        """Return the number of batches that stay trained if the pipeline is lost."""
        if len(self.trained) < self.depth:
            return 0
        return max(0, min(trained - self.loose[stage] for stage, trained in self.trained.items()))

    def hear(self, stage: int, done: Done, now: float) -> None:
        """Note how far the worker of ``stage`` is."""
        if done.seconds is not None:
            self.seconds = max(done.seconds, SHORTEST)
        elif not done.batches:  # its speed is unknown, or unknown again
            self.seconds = None
        if done.batches < self.trained.get(stage, 0):
            return  # an overtaken report
        self.trained[stage], self.loose[stage] = done.batches, done.loose
        if done.batches < self.furthest:
            return
        self.base = now - done.ago
        late = done.ago - (self.seconds or math.inf)
        if late > 0 and done.batches < self.leased:  # expect a stall to last as long again
            self.base += 2 * late

    def free_at(self, now: float, seconds: float) -> float:
        """Return when it will have trained what it holds."""
        if self.waits:
            return now
        end = self.base + seconds * (self.leased - self.furthest)
        return end if end >= now else 2 * now - end

    def expected(self, now: float, seconds: float) -> float:
        """Return how many batches it is expected to have trained by now."""
        return min(self.leased, self.furthest + max(0.0, (now - self.base) / seconds))
