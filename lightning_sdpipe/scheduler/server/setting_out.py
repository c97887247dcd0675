"""Lets workers set out together where replicas are equal in every round.

Replicas that are equal after every round stay equal if each is in every round. So the workers of a stage that join a
segment set out together: a join waits until all others have come. A newcomer whose donor has copied its state in the
middle of a segment takes part from there on: the next round, which the donor has not begun, waits for it.
"""

from __future__ import annotations

from lightning_sdpipe.membership.membership import Membership
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.server.group_desk import GroupDesk
from lightning_sdpipe.scheduler.server.liveness import Liveness
from lightning_sdpipe.scheduler.server.outbox import DeferredRequests


class SettingOut:
    """Holds joins back until all workers of a stage have come.

    Args:
        membership: knows the members, and the newcomers for which a state was copied.
        groups: knows which workers take part.
        presence: the processes that are there.
        early: joins that wait.
        together: True if replicas are equal in every round; else no join waits for another.
    """

    def __init__(
        self, membership: Membership, groups: GroupDesk, presence: Liveness, early: DeferredRequests, together: bool
    ) -> None:
        self._membership, self._groups, self._presence = membership, groups, presence
        self._early, self._together = early, together
        self._expected: set[int] = set()

    @property
    def together(self) -> bool:
        """True if workers that join set out together."""
        return self._together and not self._membership.terms.fixed

    def waits(self, request: m.Request | e.Enrol) -> bool:
        """Return whether ``request`` waits until its stage is :meth:`due`. After a restart of the scheduler, a worker
        goes on in the round in which others are; one that had joined, and was in no round yet, counts as joining."""
        if not self.together or not joins(request):
            return False
        return isinstance(request, m.Join) or not self._groups.sessions.active_in(request.worker.stage)

    def goes_on(self, request: m.Request | e.Enrol) -> bool:
        """Return whether the worker is in a round already. If it first had to share a process group with the others,
        they would make the next group without it; a group waits for that by itself."""
        return self.together and isinstance(request, e.Enrol)

    def due(self) -> set[int]:
        """Return the stages of which all workers in the run wait to join."""
        if not self.together:
            return set()
        core, sessions = self._membership, self._groups.sessions
        here = {*core.members, *(i for i in core.donations.under_way() if core.donations.taken(i) is not None)}
        stages = range(self._groups.extent.num_stages)
        return {
            stage
            for stage in stages
            if not sessions.active_in(stage)
            and all(any(map(joins, self._early.of(Worker(stage, pipeline)))) for pipeline in here)
        }

    def follow(self, now: float) -> None:
        """Follow a decision on membership: newcomers whose donor's state is on its way take part with the donor, and
        those that have lost it no longer do."""
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


def joins(request: m.Request | e.Enrol) -> bool:
    """Return whether the worker is about to be in its first round of a segment."""
    match request:
        case m.Join() | e.Enrol(resumes=e.Resumes(joined=True, answered=None)):
            return True
    return False
