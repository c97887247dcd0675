"""What sessions of an elastic run said too early: before their pipeline was a member, or had a process group."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import protocol as m


class DeferredRequests:
    """Keeps the last request of each kind of each worker, in the order in which they came."""

    def __init__(self) -> None:
        self._kept: dict[Worker, list[tuple[bytes, m.Request]]] = {}
        self._since: dict[Worker, float] = {}

    def __contains__(self, worker: Worker) -> bool:
        return worker in self._kept

    def keep(self, peer: bytes, request: m.Request, now: float) -> None:
        """``request`` came from ``peer``; a newer session's takes the place of all that an older one said."""
        kept = self._kept.setdefault(request.worker, [])
        kept[:] = [
            (at, other) for at, other in kept if type(other) is not type(request) and other.session == request.session
        ]
        kept.append((peer, request))
        self._since.setdefault(request.worker, now)

    def waited(self, worker: Worker, now: float) -> float:
        """Seconds since its first one."""
        return now - self._since.get(worker, now)

    def first(self) -> list[tuple[Worker, m.Request]]:
        """Of each worker."""
        return [(worker, requests[0][1]) for worker, requests in self._kept.items()]

    def take(self, worker: Worker) -> list[tuple[bytes, m.Request]]:
        """They are due."""
        self._since.pop(worker, None)
        return self._kept.pop(worker, [])

    def forget(self, workers: Iterable[Worker]) -> None:
        """They are gone."""
        for worker in workers:
            self.take(worker)
