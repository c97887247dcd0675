"""What an operator sees of a run: plain data, counted as events pass by."""

from __future__ import annotations

from collections import Counter, deque

import msgspec

from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker

RATE_SECONDS = 10
"""Signals per second are counted over this many whole seconds."""


class WorkerStatus(msgspec.Struct, frozen=True):
    """One worker: ``state`` is compute, ready, sync, lost, or away (never joined, or left)."""

    worker: Worker
    state: str
    iteration: int | None
    """The last one reported."""
    staleness: int | None
    """How many iterations it is behind the furthest worker of its stage."""
    last_group: Group | None
    silent: float | None
    """Seconds since it was last heard of."""


class Status(msgspec.Struct, frozen=True):
    """The whole run."""

    policy: str
    uptime: float
    signals: int
    signals_per_second: float
    groups_by_size: dict[int, int]
    groups_by_reason: dict[str, int]
    refused: dict[str, int]
    failure: str | None
    workers: list[WorkerStatus]


class Statistics:
    """Counts signals and groups."""

    def __init__(self) -> None:
        self.signals = 0
        self.sizes: Counter[int] = Counter()
        self.reasons: Counter[str] = Counter()
        self._per_second: deque[list[int]] = deque(maxlen=RATE_SECONDS + 1)

    def signal(self, now: float) -> None:
        """A ready was accepted."""
        self.signals += 1
        second = int(now)
        if self._per_second and self._per_second[-1][0] == second:
            self._per_second[-1][1] += 1
        else:
            self._per_second.append([second, 1])

    def group(self, group: Group) -> None:
        """A group went out."""
        self.sizes[len(group.members)] += 1
        self.reasons[group.reason] += 1

    def rate(self, now: float, uptime: float) -> float:
        """Signals per second lately."""
        oldest = int(now) - RATE_SECONDS
        recent = sum(count for second, count in self._per_second if second >= oldest)
        return recent / max(1.0, min(uptime, RATE_SECONDS + now - int(now)))
