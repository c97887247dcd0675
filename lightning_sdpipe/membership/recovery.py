"""What a scheduler that was started again learns of the run: from its members, who resume.

It goes by the newest epoch that any of them heard of. A start of a pipeline that is not in that one has been replaced,
or was lost; it may have heard of nothing since, as a machine that was asleep.
"""

from __future__ import annotations

from lightning_sdpipe.membership.members import Enrolled, Member, MemberEvent, Passed, Resumed, Unreachable
from lightning_sdpipe.policies.events import Worker


class MemberRecovery:
    """From the first who resumes, whose event it is made of, until all are back or ``until`` has come."""

    def __init__(self, first: Resumed, until: float, num_stages: int) -> None:
        self.until = until
        self.epoch = first.epoch
        self.early: list[MemberEvent] = []
        """Heard meanwhile, decided after it."""
        self._num_stages = num_stages
        self._back: dict[Member, set[int]] = {}
        self.since: dict[Member, int] = {}
        """The first epoch that each heard of as a member."""

    def hear(self, event: Resumed) -> None:
        """A process resumes."""
        if event.epoch.number > self.epoch.number:
            self.epoch = event.epoch
        member = Member(event.worker.pipeline, event.incarnation)
        self.early = [early for early in self.early if not _rivals(_of(early), member)]
        self._back.setdefault(member, set()).add(event.worker.stage)
        self.since[member] = min(event.since, self.since.get(member, event.since))

    def keep(self, event: MemberEvent) -> None:
        """``event`` is to be decided later, unless it is of a job whose number another one has: that asks again.

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
        """Has that process resumed, or come anew?"""
        return stage in self._back.get(member, ()) or any(
            isinstance(event, Enrolled) and _of(event) == member and event.worker.stage == stage for event in self.early
        )

    def goes(self, member: Member) -> bool:
        """A process of ``member`` is gone, and so are all; had any been there?"""
        before = len(self.early)
        self.early = [event for event in self.early if _of(event) != member]
        return self._back.pop(member, None) is not None or len(self.early) < before

    def missing(self, member: Member) -> list[int]:
        """Its stages that have not resumed."""
        return sorted(set(range(self._num_stages)) - self._back.get(member, set()))

    def complete(self) -> bool:
        """Are all members of the newest epoch back?"""
        return not any(self.missing(member) for member in self.epoch.members)

    def replaced(self) -> list[Member]:
        """Who has resumed, but is not in the newest epoch."""
        return [member for member in self._back if member not in self.epoch.members]


def _of(event: MemberEvent) -> Member | None:
    if isinstance(event, Unreachable | Passed):
        return None
    return Member(event.worker.pipeline, event.incarnation)


def _kind(event: MemberEvent) -> tuple[type, Worker | None]:
    return type(event), None if isinstance(event, Unreachable | Passed) else event.worker


def _rivals(other: Member | None, member: Member) -> bool:
    """Are they two starts of one pipeline?"""
    return other is not None and other.pipeline == member.pipeline and other != member
