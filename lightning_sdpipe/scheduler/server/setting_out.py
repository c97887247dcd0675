"""Lets workers set out together where replicas are equal in every round.

Replicas that are equal after every round stay equal if each is in every round. So the workers of a stage that join a
segment set out together: a join waits until all others have come. A newcomer whose donor has copied its state in the
middle of a segment takes part from there on: the next round, which the donor has not begun, waits for it.

After a restart of the scheduler, workers that had joined go on with their rounds. One that joins only then takes part
at once. If the others have made a round meanwhile, its model is behind, and it starts anew.
"""

from __future__ import annotations

from lightning_sdpipe.membership.membership import Membership
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.server.group_desk import GroupDesk
from lightning_sdpipe.scheduler.server.liveness import Liveness
from lightning_sdpipe.scheduler.server.outbox import DeferredRequests
from lightning_sdpipe.scheduler.server.process_groups import REMAKE_AFTER, ProcessGroupRegistry


class SettingOut:
    """Holds joins back until all workers of a stage have come.

    Args:
        membership: knows the members, and the newcomers for which a state was copied.
        groups: knows which workers take part.
        process_groups: those of each worker.
        presence: the processes that are there.
        early: joins that wait.
        policy: says whether replicas are equal in every round, and whether rounds are far apart.
    """

    def __init__(
        self,
        membership: Membership,
        groups: GroupDesk,
        process_groups: ProcessGroupRegistry,
        presence: Liveness,
        early: DeferredRequests,
        policy: PolicyConfig,
    ) -> None:
        self._membership, self._groups, self._presence = membership, groups, presence
        self._process_groups = process_groups
        self._early, self._policy = early, policy
        self._expected: set[int] = set()

    @property
    def together(self) -> bool:
        """True if workers that join set out together."""
        return self._policy.keeps_equal and not self._membership.terms.fixed

    def may_begin(self, request: m.Request | e.Enrol, now: float) -> bool:
        """Return whether the worker that joins, or returns to a restarted scheduler, may take part now."""
        worker, sessions = request.worker, self._groups.sessions
        if sessions.takes_part(worker) and sessions.of(worker, request.incarnation) is not None:
            return True
        # If it had to share a process group with the others first, they would make the next group without it; the group
        # itself waits until they share one.
        if self.together:
            return isinstance(request, e.Enrol) or bool(sessions.active_in(worker.stage))  # else its stage must be due
        return self._policy.rounds_are_apart or self._shares_a_group(worker, now)

    def _shares_a_group(self, worker: Worker, now: float) -> bool:
        """Return whether ``worker`` shares a process group with the active workers of its stage, or has waited for
        long."""
        if not self._process_groups.in_use:
            return True
        others = [other for other in self._groups.sessions.active_in(worker.stage) if other != worker]
        if not others or self._early.waited(worker, now) >= REMAKE_AFTER:
            return True
        return self._process_groups.common([worker, *others]) is not None

    def due(self) -> set[int]:
        """Return the stages whose workers in the run all wait to join."""
        if not self.together:
            return set()
        core, sessions = self._membership, self._groups.sessions
        here = {*core.members, *(i for i in core.donations.under_way() if core.donations.taken(i) is not None)}
        stages = range(self._groups.extent.num_stages)
        return {
            stage
            for stage in stages
            if not sessions.active_in(stage)
            and all(any(isinstance(r, m.Join) for r in self._early.of(Worker(stage, pipeline))) for pipeline in here)
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
