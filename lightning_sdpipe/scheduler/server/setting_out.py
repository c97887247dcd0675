"""Requests of training threads that came too early, and who sets out together where replicas are equal in every round.

Replicas that are equal after every round stay so if every one is in every round. So the workers of a stage that join
a segment set out together: a join waits until all others have come. A newcomer whose donor has copied its state in the
middle of a segment takes part from there on. It is waited for in the next round, which the donor has not begun.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_sdpipe.membership.membership import Membership
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.server.group_desk import GroupDesk
from lightning_sdpipe.scheduler.server.liveness import Liveness


class DeferredRequests:
    """What training threads said too early, before their pipeline was a member or had a process group: the last request
    of each kind of each worker, in the order in which it made them."""

    def __init__(self) -> None:
        self._kept: dict[Worker, list[tuple[bytes, m.Request]]] = {}
        self._since: dict[Worker, float] = {}

    def __contains__(self, worker: Worker) -> bool:
        return worker in self._kept

    def keep(self, peer: bytes, request: m.Request, now: float) -> None:
        """``request`` came from ``peer``; a newer session's takes the place of all that an older one said."""
        kept = [*self._kept.get(request.worker, ()), (peer, request)]
        kept.sort(key=lambda pair: pair[1].number)
        newest = {type(other): (at, other) for at, other in kept if other.incarnation == request.incarnation}
        self._kept[request.worker] = sorted(newest.values(), key=lambda pair: pair[1].number)
        self._since.setdefault(request.worker, now)

    def joins(self, worker: Worker) -> bool:
        """Is that among what it has said?"""
        return any(isinstance(request, m.Join) for _, request in self._kept.get(worker, ()))

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


class SettingOut:
    """Args:
    membership: knows the members, and whose state was copied for whom.
    groups: knows who takes part.
    presence: which processes are there.
    early: joins that wait.
    together: are replicas equal in every round? Else nobody waits for anybody.
    """

    def __init__(
        self, membership: Membership, groups: GroupDesk, presence: Liveness, early: DeferredRequests, together: bool
    ) -> None:
        self._membership, self._groups, self._presence = membership, groups, presence
        self._early, self._together = early, together
        self._expected: set[int] = set()

    @property
    def together(self) -> bool:
        """Do those that join set out together?"""
        return self._together and not self._membership.terms.fixed

    def waits(self, request: m.Join) -> bool:
        """Does it wait until its stage is :meth:`due`? One that was in the round before the scheduler was started again
        goes on."""
        return self.together and not request.resumed

    def due(self) -> set[int]:
        """Stages of which all that are in the run wait to join."""
        if not self.together:
            return set()
        core, sessions = self._membership, self._groups.sessions
        here = {*core.members, *(i for i in core.donations.under_way() if core.donations.taken(i) is not None)}
        stages = range(self._groups.extent.num_stages)
        return {
            stage
            for stage in stages
            if not sessions.active_in(stage) and all(self._early.joins(Worker(stage, pipeline)) for pipeline in here)
        }

    def follow(self, now: float) -> None:
        """Membership has decided something: newcomers that have a donor's state to come take part with it, and those
        that have lost it do not any more."""
        if not self.together:
            return
        core, sessions, stages = self._membership, self._groups.sessions, range(self._groups.extent.num_stages)
        here: set[int] = set()
        for newcomer in [*core.donations.under_way()]:
            donation = core.donations.taken(newcomer)
            if donation is None:
                continue
            here.add(newcomer)
            if newcomer not in self._expected and all(sessions.takes_part(Worker(j, donation.donor)) for j in stages):
                self._expected.add(newcomer)
                for worker in (Worker(j, newcomer) for j in stages):
                    self._groups.expect(worker, self._presence.incarnations[worker], now)
        for lost in self._expected - here:
            self._expected.discard(lost)
            if lost not in core.members:
                self._groups.lose(lost, left=True, now=now)
