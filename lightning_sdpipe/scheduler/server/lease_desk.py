"""Desk of leases: pipelines' asks wait here until the dealer has decided."""

from __future__ import annotations

from collections.abc import Collection

from lightning_sdpipe.dealing.leases import Asked, LeaseEvent, Returned, Trained
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.policy import RefusedEvent
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.server.group_desk import GroupDesk, named
from lightning_sdpipe.scheduler.server.outbox import Outbox
from lightning_sdpipe.scheduler.server.policy_driver import PolicyDriver


class LeaseDesk:
    """Keeps the open asks, and which pipelines may hold leases.

    Args:
        driver: drives the dealer.
        groups: knows the sessions, and whether the run has failed.
        outbox: takes the answers.
    """

    def __init__(self, driver: PolicyDriver, groups: GroupDesk, outbox: Outbox) -> None:
        self._driver, self._dealer = driver, driver.dealer
        self._groups = groups
        self._outbox = outbox
        self._asking: dict[Worker, tuple[bytes, m.AskLease]] = {}
        """Workers whose ask for a lease is not decided: the peer to answer, and the request."""
        self._present: set[int] | None = None
        """Pipelines that may hold leases; None before the first members are known."""

    def ask(self, request: m.AskLease, peer: bytes, now: float) -> None:
        """Deal with an ask. Segment and ordinal identify it, so it needs no session and may be repeated."""
        worker, segment, failure = request.worker, request.segment, self._groups.failure
        if failure is not None:
            self._outbox.say(peer, e.Now(0, over=failure))
            return
        if (lease := self._dealer.answer(worker.pipeline, segment, request.ordinal)) is not None:
            self._outbox.say(peer, m.Dealt(lease, request.number))
        else:
            again = worker in self._asking
            self._asking[worker] = peer, request
            try:
                self.deal(Asked(worker, segment, request.ordinal, request.done), now)
            except RefusedEvent:
                del self._asking[worker]
                raise
            if again and worker in self._asking:
                self._outbox.say(peer, e.Waits(request.number, f"it waits for {named(self._missing(worker))}"))

    def hear_beat(self, beat: e.Beat, now: float) -> None:
        """Note how much of its batches a worker has trained."""
        if beat.dealt is None or self._groups.failure is not None:
            return
        self.deal(Trained(beat.worker, *beat.dealt), now)

    def deal(self, event: LeaseEvent, now: float) -> None:
        """Tell the dealer of ``event``, and answer the asks that it decides."""
        self._driver.deal(event, now)
        for worker, (peer, request) in list(self._asking.items()):
            lease = self._dealer.answer(worker.pipeline, request.segment, request.ordinal)
            if lease is not None:
                self._outbox.say(peer, m.Dealt(lease, request.number))
                del self._asking[worker]

    def _missing(self, asker: Worker) -> list[Worker]:
        """Return the workers that ``asker`` may wait for, of all stages, with a session or without."""
        return sorted({*self._groups.computing(asker), *self._dealer.behind()} - {asker})

    def members_are(self, pipelines: Collection[int], now: float) -> None:
        """Set the pipelines that train; the leases of all others are returned."""
        before = set(range(self._groups.extent.num_pipelines)) if self._present is None else self._present
        for pipeline in sorted(before - set(pipelines)):
            self.deal(Returned(pipeline), now)
        self._present = set(pipelines)

    def forget_asks(self, pipeline: int) -> None:
        """Forget the asks of ``pipeline``, which is gone."""
        for worker in [worker for worker in self._asking if worker.pipeline == pipeline]:
            del self._asking[worker]
