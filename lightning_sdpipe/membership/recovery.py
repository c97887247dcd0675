"""Recovery: what a restarted scheduler learns of the run from its members, which resume.

The newest epoch that any of them heard of counts. A start of a pipeline outside that epoch has been replaced, or was
lost; like a machine that was asleep, it may have heard of nothing since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lightning_sdpipe.membership import members as w
from lightning_sdpipe.membership.members import Enrolled, Member, MemberEvent, Passed, Resumed, Unreachable
from lightning_sdpipe.membership.pipelines import Roster
from lightning_sdpipe.policies.events import Worker


class MemberRecovery:
    """Recovery from the first process that resumes, by the event ``first``, until all are back or ``until`` has come.
    ``depth`` returns the number of stages of a pipeline."""

    def __init__(self, first: Resumed, until: float, depth: Callable[[int], int], fixed: bool = False) -> None:
        self.until = until
        self.epoch = first.epoch
        self.early: list[MemberEvent] = []
        """Events that came meanwhile, to be decided afterwards."""
        self._depth, self._fixed = depth, fixed
        self._back: dict[Member, set[int]] = {}
        self.since: dict[Member, int] = {}
        """First epoch that each start heard of as a member."""

    def hear(self, event: Resumed) -> None:
        """Note a process that resumes."""
        if event.epoch.number > self.epoch.number:
            self.epoch = event.epoch
        member = Member(event.worker.pipeline, event.incarnation)
        self.early = [early for early in self.early if not _rivals(_of(early), member)]
        self._back.setdefault(member, set()).add(event.worker.stage)
        self.since[member] = min(event.since, self.since.get(member, event.since))

    def keep(self, event: MemberEvent) -> None:
        """Keep ``event`` for later, unless another job has the number of its job, which then asks again.

        A worker may repeat itself, or be faulty: of each kind only its last event is kept, in the place of the first.
        """
        member = _of(event)
        there = [*self._back, *map(_of, self.early)]
        if member is not None and any(_rivals(other, member) for other in there):
            return
        kind = _kind(event)
        places = [place for place, early in enumerate(self.early) if _kind(early) == kind]
        if places:
            self.early[places[0]] = event
        else:
            self.early.append(event)

    def is_there(self, member: Member, stage: int) -> bool:
        """Return whether that process has resumed, or come anew."""
        return stage in self._back.get(member, ()) or any(
            isinstance(event, Enrolled) and _of(event) == member and event.worker.stage == stage for event in self.early
        )

    def delays(self, roster: Roster, fingerprint: Mapping[str, str]) -> None:
        """Delay the newcomers of ``roster``, whose fingerprint equals the members'."""
        for pipeline, here in roster.here.items():
            workers = [Worker(j, pipeline) for j in sorted(here.processes)]
            self.early += [Enrolled(worker, here.incarnation, dict(fingerprint)) for worker in workers]
        roster.here.clear()

    def hear_other(self, event: MemberEvent, roster: Roster) -> list[w.MemberDecision]:
        """Deal with an event that is no resumption."""
        if self._fixed or not isinstance(event, w.Ended | w.Departed):
            self.keep(event)
            return []
        member, before = Member(event.worker.pipeline, event.incarnation), len(self.early)
        self.early = [early for early in self.early if _of(early) != member]
        if self._back.pop(member, None) is None and len(self.early) == before:
            return []
        reason = f"stage {event.worker.stage} ended while the scheduler was started again"
        return [_ends(member, reason, roster, False)]

    def end(self, roster: Roster, now: float) -> tuple[list[w.MemberDecision], list[Worker]]:
        """Bring back members into ``roster``; return the decisions on those that are gone, and the silent workers of a
        fixed one."""
        decisions: list[w.MemberDecision] = []
        silent: list[Worker] = []
        for member in self.epoch.members:
            absent = self.missing(member)
            if absent and not self._fixed:
                reason = f"its stages {absent} did not come back to the scheduler that was started again"
                decisions.append(_ends(member, reason, roster, True))
                continue
            roster.returns(member, now, self.since.get(member, self.epoch.number))
            silent += [Worker(stage, member.pipeline) for stage in absent]
        replaced = [member for member in self._back if member not in self.epoch.members]
        decisions += [_ends(member, "the others went on without it", roster, False) for member in replaced]
        return decisions, silent

    def missing(self, member: Member) -> list[int]:
        """Return the member's stages that have not resumed. In a fixed roster, enrolling anew counts as well. In others
        a state that has come does, since that process is a member and has not heard so."""
        stages = range(self._depth(member.pipeline))
        here = {stage for stage in stages if self._fixed and self.is_there(member, stage)}
        said = (event for event in self.early if isinstance(event, w.Received) and _of(event) == member)
        came = (event for event in said if not event.missed)
        return sorted(set(stages) - self._back.get(member, set()) - here - {event.worker.stage for event in came})

    def complete(self) -> bool:
        """Return whether all members of the newest epoch are back."""
        return not any(self.missing(member) for member in self.epoch.members)


def _ends(member: Member, reason: str, roster: Roster, was_member: bool) -> w.Gone:
    roster.bury(member, reason)
    return w.Gone(member.pipeline, member.incarnation, reason, was_member)


def _of(event: MemberEvent) -> Member | None:
    if isinstance(event, Unreachable | Passed):
        return None
    return Member(event.worker.pipeline, event.incarnation)


def _kind(event: MemberEvent) -> tuple[type, str, Worker | None]:
    how = event.how if isinstance(event, w.Ended) else ""
    return type(event), how, None if isinstance(event, Unreachable | Passed) else event.worker


def _rivals(other: Member | None, member: Member) -> bool:
    """Return whether these are two starts of one pipeline."""
    return other is not None and other.pipeline == member.pipeline and other != member
