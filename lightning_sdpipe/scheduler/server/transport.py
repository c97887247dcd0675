"""Which process groups workers have made: an elastic run's answers name one that holds all whom they concern.

A worker makes a group of its stage's replicas for each epoch of membership, in a thread, and says which it holds. What
is decided before all concerned have one in common is held for the few milliseconds that this takes, or until the epoch
is announced anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_sdpipe.policies.events import Worker


class Transport:
    """Of all workers, the epochs whose process group they hold."""

    def __init__(self) -> None:
        self._holds: dict[Worker, frozenset[int]] = {}

    def holds(self, worker: Worker, epochs: Iterable[int]) -> bool:
        """``worker`` has these now; is that news?"""
        now = frozenset(epochs)
        before = self._holds.get(worker)
        self._holds[worker] = now
        return before != now

    def forget(self, worker: Worker) -> None:
        """Its process is gone."""
        self._holds.pop(worker, None)

    def common(self, workers: Sequence[Worker]) -> int | None:
        """The newest epoch of which all of them hold a group."""
        shared = frozenset.intersection(*(self._holds.get(worker, frozenset()) for worker in workers))
        return max(shared, default=None)
