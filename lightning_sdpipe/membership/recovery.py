"""Recovery: what a restarted scheduler learns of the run from its members, which resume, and from newcomers.

The newest epoch that any of them heard of counts. A start of a pipeline outside that epoch has been replaced, or was
lost; like a machine that was asleep, it may have heard of nothing since.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning_sdpipe.membership import members as w
from lightning_sdpipe.membership.members import Enrolled, Epoch, Member, MemberEvent, Resumed
from lightning_sdpipe.membership.pipelines import Roster
from lightning_sdpipe.policies.events import Worker


class MemberRecovery:
    """Recovery of an elastic run from the first process that has heard of an ``epoch``, until all are back or ``until``
    has come. Each pipeline has ``num_stages`` stages. Only enrolments are kept, since other requests are repeated until
    they are answered."""

    def __init__(self, epoch: Epoch, until: float, num_stages: int) -> None:
        self.until = until
        self.epoch = epoch
        self.early: dict[Worker, Enrolled] = {}
        """The last enrolment of each worker that came meanwhile."""
        self._stages = range(num_stages)
        self._back: dict[Member, set[int]] = {}
        self._received: dict[Member, dict[int, int]] = {}
        """Stages of newcomers that have received a state, each with the :attr:`Epoch.starts` that it had heard of."""

    def hear(self, event: Resumed) -> None:
        """Note a process that resumes."""
        self._hear_of(event.epoch)
        member = Member(event.worker.pipeline, event.incarnation)
        self._back.setdefault(member, set()).add(event.worker.stage)

    def _hear_of(self, epoch: Epoch) -> None:
        if epoch.number > self.epoch.number:
            self.epoch = epoch

    def is_there(self, member: Member, stage: int) -> bool:
        """Return whether that process has resumed, or has enrolled and claims the number of none that has resumed."""
        early, back = self.early.get(Worker(stage, member.pipeline)), self._back.keys()
        if early is None or early.incarnation != member.incarnation:
            return stage in self._back.get(member, ())
        return not any(other.pipeline == member.pipeline for other in back - {member})

    def delays(self, roster: Roster, fingerprint: Mapping[str, str]) -> None:
        """Delay the newcomers of ``roster``, whose fingerprint equals the members'."""
        for worker, incarnation in roster.processes().items():
            self.early[worker] = Enrolled(worker, incarnation, dict(fingerprint))
        roster.here.clear()

    def hear_other(self, event: MemberEvent, roster: Roster) -> list[w.MemberDecision]:
        """Deal with an event other than :class:`Resumed`."""
        match event:
            case Enrolled(worker):
                self.early[worker] = event
                self._hear_of(event.epoch or self.epoch)
            case w.Received(worker, incarnation, missed=""):
                early = self.early.get(worker)
                if early is not None and early.incarnation == incarnation and early.epoch is not None:
                    received = self._received.setdefault(Member(worker.pipeline, incarnation), {})
                    received[worker.stage] = early.epoch.starts
            case w.Ended(worker, incarnation) | w.Departed(worker, incarnation):
                member = Member(worker.pipeline, incarnation)
                there = any(self.is_there(member, stage) for stage in self._stages)
                for each in (Worker(stage, member.pipeline) for stage in self._stages):
                    if there or (each in self.early and self.early[each].incarnation == incarnation):
                        self.early.pop(each, None)
                if there:
                    self._back.pop(member, None)
                    return [_ends(member, f"stage {worker.stage} ended while the scheduler was started again", roster)]
        return []

    def enrolments(self) -> list[Enrolled]:
        """Return the enrolments of processes that are there; the others repeat theirs."""
        return [
            event
            for worker, event in self.early.items()
            if self.is_there(Member(worker.pipeline, event.incarnation), worker.stage)
        ]

    def end(self, roster: Roster, now: float) -> list[w.MemberDecision]:
        """Bring back members into ``roster``; return the decisions on those that are gone."""
        decisions: list[w.MemberDecision] = []
        for member in self.epoch.members:
            if absent := self.missing(member):
                reason = f"its stages {absent} did not come back to the scheduler that was started again"
                decisions.append(_ends(member, reason, roster, was_member=True))
            else:
                roster.returns(member, now, self.epoch.number)
        replaced = [member for member in self._back if member not in self.epoch.members]
        return decisions + [_ends(member, "the others went on without it", roster) for member in replaced]

    def missing(self, member: Member) -> list[int]:
        """Return the member's stages that have not resumed. One that has received a state counts as resumed: it became
        a member without hearing so, unless all have started again since."""
        received = self._received.get(member, {}).items()
        came = self._back.get(member, set()) | {stage for stage, starts in received if starts == self.epoch.starts}
        return [stage for stage in self._stages if stage not in came]

    def complete(self) -> bool:
        """Return whether all members of the newest epoch are back; if it has none, others may have begun since."""
        return bool(self.epoch.members) and not any(self.missing(member) for member in self.epoch.members)


def _ends(member: Member, reason: str, roster: Roster, was_member: bool = False) -> w.Gone:
    roster.bury(member, reason)
    return w.Gone(member.pipeline, member.incarnation, reason, was_member)
