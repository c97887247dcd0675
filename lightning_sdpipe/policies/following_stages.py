"""Replay, on another stage, of what the last stage decided: the same members, iterations and order.

Meetings are numbered in the order in which the last stage decided them, so numbers increase along each pipeline. A
meeting goes out here when all its members have reached the same iteration as on the last stage, and their earlier
meetings have gone out. A waiting worker waits for workers that compute, or that wait for a meeting with a lower number;
the lowest meeting waits for no waiting worker, so there is no deadlock.

This stage keeps its own bound on staleness: groups that a meeting lets go on wait here, too, for the groups behind
them. Waiting for meetings with lower numbers is enough, as it was on the last stage.

A worker that was lost, or has left, is left out. Meetings still to come here would have passed its model on to others,
as happened on the last stage. So the last stage then doubts all versions, and until the doubts are settled, models of
this stage may be older than the bound. (This stage cannot wait for that itself: its pipelines would never reach the
boundary on the last stage.) A worker whose pipeline no longer has a last stage goes on alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_sdpipe.policies.decisions import Decision, Reason
from lightning_sdpipe.policies.participants import Participants
from lightning_sdpipe.policies.versions import Versions


@dataclass(frozen=True)
class GroupPart:
    """One group's part in a meeting: the iterations of its pipelines, and whether it goes on waiting afterwards
    (``stays``).

    ``steps`` says that this is the group's first meeting since its last step.
    """

    group: int
    iterations: Mapping[int, int]
    stays: bool
    steps: bool


@dataclass(frozen=True)
class PlannedGroup:
    """A meeting that the last stage has decided. ``computing`` has, by group, the pipelines of groups that were not
    ready."""

    parts: tuple[GroupPart, ...]
    computing: Mapping[int, tuple[int, ...]]
    reason: Reason


@dataclass
class _Due:
    """A meeting that has not gone out on this stage."""

    planned: PlannedGroup
    stepped: set[int] = field(default_factory=set)
    missing: tuple[int, int] | None = None
    """A pipeline that was missing at the last look, and its iteration."""


class FollowingStages:
    """The meetings still to come in ``stage``; ``last`` is the stage that decides. ``versions`` tracks the age of
    models; None where that does not matter."""

    def __init__(self, stage: int, participants: Participants, versions: Versions | None, last: int) -> None:
        self._stage, self._last = stage, last
        self._participants = participants
        self._versions = versions
        self._due: list[_Due] = []
        self._planned: Counter[tuple[int, int]] = Counter()
        """Number of meetings due for each pipeline and iteration."""
        self._unheard: set[int] = set()
        """Pipelines whose last stage has not reported since the scheduler was restarted."""

    def plan(self, meeting: PlannedGroup) -> None:
        """Add a meeting that the last stage has decided."""
        self._due.append(_Due(meeting))
        self._planned.update(_iterations(meeting))

    def heard_of(self, pipeline: int) -> None:
        """Note that the last stage of ``pipeline`` has reported."""
        self._unheard.discard(pipeline)

    def forget(self) -> None:
        """Forget all earlier decisions, which the restarted scheduler does not know."""
        self._due.clear()
        self._planned.clear()
        self._unheard = set(range(self._participants.num_pipelines))

    def expects(self, group: int) -> bool:
        """Return whether ``group`` still has a meeting with others to come."""
        return any(
            len(due.planned.parts) + len(due.planned.computing) > 1
            and (group in due.planned.computing or any(part.group == group for part in due.planned.parts))
            for due in self._due
        )

    def turn(self) -> list[Decision]:
        """Return the decisions that can go out now."""
        decisions: list[Decision] = []
        while True:
            group = self._next()
            if group is None:
                return decisions + self._strays()
            decisions.append(group)

    def _next(self) -> Decision | None:
        """Return the first meeting that can go out."""
        if len(self._due) == 1 and (missing := self._due[0].missing) is not None and self._comes(*missing):
            return None  # the usual case: a meeting is looked through about log N times, not N
        waiting = self._participants.waiting[self._stage]
        busy: set[int] = set()
        """Pipelines with a meeting that cannot go out yet."""
        groups: set[int] = set()
        for due in list(self._due):
            planned = due.planned
            coming = {p: k for p, k in _iterations(planned) if self._comes(p, k)}
            due.missing = next(reversed(coming.items()), None)
            here = [
                (part, [p for p, iteration in part.iterations.items() if waiting.get(p) == iteration])
                for part in planned.parts
            ]
            present = [(part, members) for part, members in here if members]
            every_member = {p for _, members in present for p in members}
            if self._versions is not None and self._versions.bound is not None:
                # these keep their place, too: they contain the average from the end of their step on
                every_member.update(*planned.computing.values())
            if not coming and not any(not part.stays for part, _ in present):
                self._is_over(due)  # the worker that it would have answered has gone
                self._step(due, present)
                continue
            if coming or every_member & busy or not self._fresh(due, present, groups):
                busy |= coming.keys() | every_member
                groups |= {part.group for part in planned.parts} | set(planned.computing)
                continue
            self._is_over(due)
            return self._goes_out(planned, present)
        return None

    def _is_over(self, due: _Due) -> None:
        self._due.remove(due)
        self._planned.subtract(_iterations(due.planned))
        for each in _iterations(due.planned):
            if not self._planned[each]:
                del self._planned[each]

    def _comes(self, pipeline: int, iteration: int) -> bool:
        """Return whether ``pipeline`` takes part and has not come to ``iteration`` yet."""
        if pipeline not in self._participants.active[self._stage]:
            return False
        reported = self._participants.last_reported(self._stage, pipeline)
        return reported is None or reported < iteration

    def _fresh(self, due: _Due, present: Sequence[tuple[GroupPart, Sequence[int]]], earlier: set[int]) -> bool:
        """Return whether no group that goes on would have to wait for one with an earlier meeting to come."""
        self._step(due, present)
        if self._versions is None:
            return True
        nodes = [part.group for part, _ in present]
        return not any(self._versions.behind(part.group, nodes) & earlier for part, _ in present if not part.stays)

    def _step(self, due: _Due, present: Sequence[tuple[GroupPart, Sequence[int]]]) -> None:
        if self._versions is None:
            return
        for part, _ in present:
            if part.steps and part.group not in due.stepped:
                due.stepped.add(part.group)
                self._versions.stepped(part.group)

    def _goes_out(self, planned: PlannedGroup, present: Sequence[tuple[GroupPart, Sequence[int]]]) -> Decision:
        active = self._participants.active[self._stage]
        asleep = {k: [p for p in pipelines if p in active] for k, pipelines in planned.computing.items()}
        asleep = {k: pipelines for k, pipelines in asleep.items() if pipelines}
        go = [(part, members) for part, members in present if not part.stays]
        stay = [(part, members) for part, members in present if part.stays]
        members = [list(own) for _, own in (*go, *stay)] + list(asleep.values())
        group = self._participants.group(
            self._stage,
            [p for _, own in go for p in own],
            planned.reason,
            weights=mean_of_groups(members),
            passive=[p for own in members[len(go) :] for p in own],
            standing=[p for _, own in stay for p in own],
        )
        if self._versions is None:
            return group
        waiting = self._participants.waiting[self._stage]
        awake = [k for k, own in asleep.items() if all(p in waiting for p in own)]
        nodes = [part.group for part, _ in (*go, *stay)] + awake
        self._versions.met(nodes, [k for k in asleep if k not in awake])
        return group

    def _strays(self) -> list[Decision]:
        """Let workers go on alone if the last stage will not decide for them."""
        waiting = self._participants.waiting[self._stage].items()
        unplanned = waiting - self._planned.keys()
        if unplanned and not self._unheard:  # the last stage decides for those that wait there; this is quicker
            unplanned.difference_update(self._participants.waiting[self._last].items())
        strays = {each for each in unplanned if not self._will_be_decided(*each)}
        in_order = [pipeline for pipeline, iteration in waiting if (pipeline, iteration) in strays] if strays else []
        return [self._participants.group(self._stage, [pipeline], Reason.WORKER_LOST) for pipeline in in_order]

    def _will_be_decided(self, pipeline: int, iteration: int) -> bool:
        participants = self._participants
        if pipeline not in participants.active[self._last] or pipeline in self._unheard:
            return False
        reported = participants.last_reported(self._last, pipeline)
        if reported == iteration:
            return pipeline in participants.waiting[self._last]
        return reported is None or reported < iteration


def _iterations(meeting: PlannedGroup) -> list[tuple[int, int]]:
    """Return the pipelines that ``meeting`` expects, each with its iteration."""
    return [each for part in meeting.parts for each in part.iterations.items()]


def mean_of_groups(groups: Sequence[Sequence[int]]) -> list[float]:
    """Return the weight of each member, in order, in the mean of the groups' models."""
    return [1 / (len(groups) * len(group)) for group in groups for _ in group]
