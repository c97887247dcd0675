"""Who is in an elastic run: events and the time go in, decisions come out.

Each pipeline is a small job of its own. It comes (its stages *enrol*), becomes a member, and goes: it dies, falls
silent, fails, or departs. The rules:

1. *Together or not at all.* A pipeline is a member when all its stages are there, of one incarnation, and it is gone
   when one of them is. An incarnation that was once gone never comes back (a tombstone): whoever of it wakes must end.
2. *Epochs.* Whenever the members change a new epoch begins, with a higher number. Members are listed by age; the oldest
   leads. So the leader changes only when it goes.
3. *The start.* The first pipelines begin together when ``start_pipelines`` are there, or ``gather`` seconds after the
   first if these are at least ``min_pipelines``. Everybody who comes later is given the state of a member
   (``state_transfers.py``), and is a member when all its stages have it. If the donor goes, another one gives it. If
   there is no member left, the run is over, or a new start is made from the newest checkpoint (``resume``), also by a
   new scheduler that is told of one before anything else.
4. *Enough.* With fewer than ``min_pipelines`` nobody begins another turn. Newcomers count, all of whose stages are
   there: they need a member that makes its next updates. After ``hold_limit`` seconds of waiting the run ends.
5. *One job per number.* Who enrols for a pipeline that is there waits until that one is heard of (then it is refused)
   or gone (then it takes its place, when it asks again).
6. *Meetings* (``barriers.py``) wait for the members, and for newcomers whose state has been taken in that stage: they
   are about to be where the others are.
7. *A bug ends the run.* Two pipelines that fail with the same exception would be followed by all others. A pipeline's
   failure is forgotten when it has come back and met others. A SchedulerError counts for nothing: whoever was lost, the
   scheduler for instance, causes several. Nor does what a newcomer fails with while others train.
8. *Out of reach* (``unreachable.py``). Pipelines that find no process group in common make another one, and say
   whom they cannot reach; if that goes on, one of them is put out.
9. *A new scheduler* begins to know when a member of the run resumes: it waits ``recovery_grace`` seconds for the rest
   of the newest epoch that anybody heard of. Who is not in that one has been replaced, and must end. Nobody starts anew
   within its first ``settle`` seconds, in which members make themselves heard.

Promises, which the tests hold against all histories: epochs' numbers grow; no incarnation is a member twice, or after
it was gone; the leader is a member and the oldest; nobody starts fresh while there is a member; a meeting is decided
once, and by everybody awaited.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping

import msgspec

from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.membership import members as w
from lightning_sdpipe.membership.barriers import DecidedBarriers
from lightning_sdpipe.membership.elastic_config import ElasticConfig, differences
from lightning_sdpipe.membership.members import Epoch, Member, MemberDecision, MemberEvent
from lightning_sdpipe.membership.recovery import MemberRecovery
from lightning_sdpipe.membership.state_transfers import StateTransfers
from lightning_sdpipe.membership.unreachable import Reach
from lightning_sdpipe.policies.events import Worker

MOST_PIPELINES = 1024
"""A number from there on is a mistake."""
TOMBSTONES = 4096
"""That are remembered."""
REPEATED = 2
"""Pipelines that fail with one exception before it is taken for a bug of the script."""
NO_BUG = f"{SchedulerError.__name__}: "
"""With what the reason of a failure begins that is not the script's."""
_NUMBER = re.compile(r"\d+")


class _Pipeline:
    """One start of a pipeline's job."""

    __slots__ = ("arrived", "finished", "fresh", "incarnation", "member", "stages")

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.stages: set[int] = set()
        self.arrived: float | None = None
        """When it was complete."""
        self.member = self.fresh = False
        self.finished: set[int] = set()


class Membership:
    """Decides for one run of pipelines of ``num_stages`` stages; ``now`` is when it begins to listen."""

    def __init__(self, num_stages: int, terms: ElasticConfig, now: float = 0.0) -> None:
        self.terms = terms
        self.epoch = Epoch(0, (), "nobody has come yet")
        self.holds = ""
        """Why nobody may train now, if so."""
        self.over: w.RunOver | None = None
        self._num_stages = num_stages
        self._settled = now + terms.settle
        self._pipelines: dict[int, _Pipeline] = {}
        self._rivals: dict[int, dict[Worker, w.Enrolled]] = {}
        self._tombs: dict[Member, str] = {}
        self.ever: set[int] = set()
        """Pipelines that were members at any time."""
        self._expected: dict[str, str] | None = None
        self._held_since = math.inf
        self._failures: dict[int, str] = {}
        """Of each pipeline the last, without its numbers (a wrong index, a rank), until it meets others again."""
        self._returning: MemberRecovery | None = None
        self.donations = StateTransfers(num_stages)
        self.meetings = DecidedBarriers(num_stages)
        self._reach = Reach(terms.apart)
        self._newest: w.Published | None = None
        self.resumed: w.Published | None = None
        """The checkpoint from which a new start was made."""

    # ------------------------------------------------------------------- looks

    @property
    def recovering(self) -> bool:
        """Does it still wait for the members of a run that another scheduler has served?"""
        return self._returning is not None

    @property
    def members(self) -> list[int]:
        """Oldest first."""
        return [member.pipeline for member in self.epoch.members]

    def is_member(self, pipeline: int, incarnation: int) -> bool:
        """Is that start of ``pipeline`` in the run?"""
        here = self._pipelines.get(pipeline)
        return here is not None and here.member and here.incarnation == incarnation

    def is_here(self, worker: Worker, incarnation: int) -> bool:
        """Has that process enrolled, in a start of its pipeline that is not gone?"""
        if self._returning is not None:
            return self._returning.is_there(Member(worker.pipeline, incarnation), worker.stage)
        here = self._pipelines.get(worker.pipeline)
        return here is not None and here.incarnation == incarnation and worker.stage in here.stages

    def tombstone(self, pipeline: int, incarnation: int) -> str | None:
        """Why that start of ``pipeline`` must not come back, if so."""
        return self._tombs.get(Member(pipeline, incarnation))

    def buried(self, most: int) -> list[Member]:
        """The last ``most`` starts that must not come back."""
        return [*self._tombs][-most:]

    @property
    def claimed(self) -> Collection[int]:
        """Pipelines that are there, and of which another start has come."""
        return self._rivals.keys()

    def doubts(self, worker: Worker, incarnation: int) -> bool:
        """Would it help to hear that this process lives? Another job claims its number."""
        return worker.pipeline in self._rivals and self.is_here(worker, incarnation)

    def awaited(self, stage: int) -> list[int]:
        """Whom a meeting of ``stage`` waits for."""
        return sorted(
            i
            for i, here in self._pipelines.items()
            if (here.member or self.donations.taken_in(i, stage)) and stage not in here.finished
        )

    def states(self) -> dict[int, str]:
        """Of each pipeline that is there, in a word or two, for people."""
        said = {}
        for i, here in sorted(self._pipelines.items()):
            donation = self.donations.of(i)
            if here.finished:
                said[i] = "finished"
            elif here.member:
                said[i] = "leader" if self.members[:1] == [i] else "member"
            elif donation is not None:
                said[i] = f"receives from {donation.donor}"
            else:
                absent = sorted(set(range(self._num_stages)) - here.stages)
                out = self._reach.out_until(i) > -math.inf and bool(self.epoch.members)
                waits = "waits, since others could not reach it" if out else "waits"
                said[i] = f"waits for its stages {absent}" if absent else waits
        return said

    def missing(self) -> str:
        """What the start, or everybody, waits for, for people."""
        if self.holds:
            return self.holds
        needed = self.terms.to_start
        there = ", ".join(f"pipeline {i} {state}" for i, state in self.states().items()) or "nobody is there"
        return f"training starts when {needed} pipelines are there; {there}"

    def waits_for(self, worker: Worker, incarnation: int) -> str:
        """What that process, which is no member yet, waits for, for people."""
        if self.recovering:
            return "the scheduler was started again, and waits for the members of the run"
        if not self.is_here(worker, incarnation):
            return f"another job claims pipeline {worker.pipeline}; it is looked whether that one still lives"
        if self.epoch.members:
            return f"pipeline {worker.pipeline} {self.states()[worker.pipeline]}"
        return self.missing()

    def deadline(self) -> float:
        """When a :class:`Passed` is due."""
        if self._returning is not None:
            return self._returning.until
        if self.over is not None:
            return math.inf
        due = self._held_since + self.terms.hold_limit if self.holds else math.inf
        complete = self._complete()
        if complete and not self.epoch.members:
            first = min(here.arrived or 0.0 for here in complete.values())
            enough = len(complete) >= self.terms.min_pipelines
            due = min(due, max(self._settled, first + (self.terms.gather if enough else self.terms.hold_limit)))
            if len(complete) >= self.terms.to_start:
                due = min(due, self._settled)
        elif self.epoch.members:
            out = [self._reach.out_until(i) for i in complete if self.donations.of(i) is None]
            due = min([due, *(until for until in out if until > -math.inf)])
        return due

    # ------------------------------------------------------------------ events

    def on(self, event: MemberEvent, now: float) -> list[MemberDecision]:
        """``event`` happened at ``now``; what follows. No event is refused by an exception."""
        decisions = self._on(event, now)
        return decisions if self.recovering else [*decisions, *self._check_lost(), *self._check_enough(now)]

    def _on(self, event: MemberEvent, now: float) -> list[MemberDecision]:
        if isinstance(event, w.Resumed):
            return self._resumed(event, now)
        if isinstance(event, w.Passed):
            return self._time_passed(now)
        if isinstance(event, w.Published) and not self.epoch.number:  # what an earlier scheduler has kept
            self._newest = event
            return []
        if self._returning is not None:
            return self._heard_while_recovering(event, self._returning)
        match event:
            case w.Enrolled():
                return self._enrolled(event, now)
            case w.Unreachable():
                return self._unreachable(event, now)
            case w.Heard(worker, incarnation):
                return self._heard(worker, incarnation)
        worker, incarnation = event.worker, event.incarnation
        if not self.is_here(worker, incarnation):
            return self._from_a_stranger(event)
        match event:
            case w.Snapshot():
                return self._copied(event, now)
            case w.Received():
                return self._received(event, now)
            case w.Missed(_, _, transfer):
                if given_up := self.donations.give_up(worker.pipeline, transfer):
                    return self._without_state(worker.pipeline, given_up, now)
                return self._repeat(worker.pipeline)
            case w.Meets(_, _, key, value):
                met = self.meetings.comes(worker.stage, worker.pipeline, key, value)
                return self._meet() if met is None else [met]
            case w.Died() if worker.stage in self._pipelines[worker.pipeline].finished:
                return []  # as it said
            case w.Died(_, _, reason):
                return self._goes(worker.pipeline, f"stage {worker.stage} {reason}", now)
            case w.Failed(_, _, reason):
                return self._failed(worker, reason, now)
            case w.Departed(_, _, finished):
                return self._departed(worker, finished, now)
            case w.Published():
                self._newest = event
                return []
            case w.Misses(_, _, epoch, pipelines):
                if epoch == self.epoch.number:
                    self._reach.misses(worker.pipeline, {*pipelines} & {*self.members} - {worker.pipeline})
                return []

    # -------------------------------------------------------------- coming

    def _enrolled(self, event: w.Enrolled, now: float) -> list[MemberDecision]:
        worker, incarnation = event.worker, event.incarnation
        reason = self.tombstone(worker.pipeline, incarnation)
        if reason is not None:
            return [w.Ended(worker, incarnation, reason)]
        refused = self._refusal(event)
        if refused:
            return [w.Denied(worker, incarnation, refused)]
        here = self._pipelines.get(worker.pipeline)
        if here is not None and here.incarnation != incarnation:
            self._rivals.setdefault(worker.pipeline, {})[worker] = event
            return []
        if here is None:
            here = self._pipelines[worker.pipeline] = _Pipeline(incarnation)
        if worker.stage in here.stages:
            return self._repeat(worker.pipeline)
        if self._expected is None:
            self._expected = dict(event.fingerprint)
        here.stages.add(worker.stage)
        if len(here.stages) == self._num_stages:
            here.arrived = now
        return self._admit(now)

    def _refusal(self, event: w.Enrolled | w.Resumed) -> str:
        worker, found = event.worker, event.fingerprint
        if not 0 <= worker.stage < self._num_stages:
            return (
                f"worker {worker} does not exist: this scheduler serves pipelines of {self._num_stages} stages, 0 to "
                f"{self._num_stages - 1}; start the job with as many processes, or the scheduler with another "
                "--num-stages"
            )
        if not 0 <= worker.pipeline < MOST_PIPELINES:
            return f"pipeline {worker.pipeline} is not allowed; give SDPIPE_PIPELINE from 0 to {MOST_PIPELINES - 1}"
        if self.over is not None:
            return f"the run is over: {self.over.reason}; start a new scheduler for the next one"
        others = any(i != worker.pipeline or here.stages - {worker.stage} for i, here in self._pipelines.items())
        if not others and self.epoch.number == 0 and self._returning is None:
            self._expected = None  # who was refused, or died before the start, binds nobody
        return differences(found, self._expected) if self._expected is not None else ""

    def _complete(self) -> Mapping[int, _Pipeline]:
        """Those that could start."""
        return {i: here for i, here in self._pipelines.items() if here.arrived is not None and not here.member}

    def _admit(self, now: float) -> list[MemberDecision]:
        """Those that are complete start, or are found a donor."""
        complete = self._complete()
        if self.epoch.members:
            waiting = [i for i in complete if self.donations.of(i) is None and self._reach.out_until(i) <= now]
            givers = [i for i in self.members if not self._pipelines[i].finished]
            return [d for i in waiting for d in self.donations.choose(i, givers)] if givers else []
        if not complete or now < self._settled or self.over is not None:
            return []
        enough = len(complete) >= self.terms.min_pipelines
        all_there = enough and len(complete) >= self.terms.to_start
        gathered = enough and now >= min(here.arrived or 0.0 for here in complete.values()) + self.terms.gather
        if not (all_there or gathered) or (self.epoch.number and not self._may_resume):
            return []
        self.meetings.begin_anew()
        self.resumed = self._newest = self._newest if self._may_resume else None
        checkpoint = "" if self.resumed is None else self.resumed.path
        for i in complete:
            self._pipelines[i].member = self._pipelines[i].fresh = True
        again = f"again from {checkpoint}, since nobody was left" if checkpoint else "together"
        decisions = self._new_epoch(f"pipelines {', '.join(map(str, sorted(complete)))} start {again}", complete)
        decisions += [w.Started(i, self.epoch, True, checkpoint) for i in sorted(complete)]
        return decisions

    def _copied(self, event: w.Snapshot, now: float) -> list[MemberDecision]:
        donor, donation = event.worker, self.donations.named(event.transfer)
        decisions = self.donations.copied(donor.stage, donor.pipeline, event.transfer, event.update)
        if donation is None or self.donations.of(donation.pipeline) is donation:
            return decisions + self._meet()
        return self._without_state(donation.pipeline, decisions, now)

    def _without_state(self, newcomer: int, decisions: list[MemberDecision], now: float) -> list[MemberDecision]:
        """What ``newcomer`` was to be given is void."""
        self._reach.got_none(newcomer, now)
        return decisions + self._admit(now) + self._meet()

    def _received(self, event: w.Received, now: float) -> list[MemberDecision]:
        worker, transfer, pipeline = event.worker, event.transfer, event.worker.pipeline
        if wrong := self.donations.wrong(pipeline, transfer, event.update):
            gone = self._goes(pipeline, f"stage {worker.stage} is refused: {wrong}", now)
            return [w.Denied(worker, event.incarnation, wrong), *gone]
        if not self.donations.has_received(pipeline, worker.stage, transfer):
            donation = self.donations.of(pipeline)
            if donation is not None and donation.transfer == transfer:
                return []  # its other stages have not yet
            return self._repeat(pipeline)
        self.donations.end(pipeline)
        self._reach.has_come(pipeline)
        here = self._pipelines[pipeline]
        here.member = True
        decisions = self._new_epoch(f"pipeline {pipeline} has come", {pipeline: here})
        return [*decisions, w.Started(pipeline, self.epoch, fresh=False), *self._meet()]

    def _repeat(self, pipeline: int) -> list[MemberDecision]:
        """What ``pipeline`` was told, for one of its workers asks again."""
        if self._pipelines[pipeline].member:
            fresh = self._pipelines[pipeline].fresh
            checkpoint = self.resumed.path if fresh and self.resumed is not None else ""
            return [w.Started(pipeline, self.epoch, fresh, checkpoint)]
        donation = self.donations.taken(pipeline)
        return [] if donation is None else [self.donations.told(donation)]

    # --------------------------------------------------------------- going

    def _goes(self, pipeline: int, reason: str, now: float, left: bool = False) -> list[MemberDecision]:
        """That start of ``pipeline`` is over; ``reason`` begins with what happened to which stage."""
        here = self._pipelines.pop(pipeline)
        self._bury(Member(pipeline, here.incarnation), reason)
        self.meetings.goes(pipeline)
        decisions: list[MemberDecision] = [w.Gone(pipeline, here.incarnation, reason, here.member, left)]
        decisions += self.donations.end(pipeline)
        self.donations.forget(pipeline)
        self.donations.without_donor(pipeline)
        if here.member:
            verb = "left" if left else "lost"
            decisions += self._new_epoch(f"pipeline {pipeline} {verb} ({reason})", lost=(pipeline,))
        self._rivals.pop(pipeline, None)  # who still lives asks again
        return decisions + self._check_over() + self._admit(now) + self._meet()

    def _unreachable(self, event: w.Unreachable, now: float) -> list[MemberDecision]:
        """All shall make another process group, and say whom they cannot reach; or one of them goes."""
        stage, pipelines = event.stage, event.pipelines
        if not self.epoch.members:
            return []
        there = ", ".join(map(str, pipelines))
        found = self._reach.found_none(pipelines, self.members, event.waited, now)
        if found is None:
            reason = f"pipelines {there} have no process group of stage {stage} in common"
            return self._new_epoch(reason, tries=True)
        who, others = found
        self._reach.put_out(who, now)
        missed = f"cannot reach pipelines {', '.join(map(str, others))}" if others else f"is the youngest of {there}"
        return self._goes(
            who,
            f"stage {stage} finds no process group with others, and {missed}, though all reach the scheduler; look at "
            "the network between their machines, and at GLOO_SOCKET_IFNAME",
            now,
        )

    def _failed(self, worker: Worker, reason: str, now: float) -> list[MemberDecision]:
        joins = not self._pipelines[worker.pipeline].member and bool(self.members)
        decisions = self._goes(worker.pipeline, f"stage {worker.stage} failed: {reason}", now)
        if joins or reason.startswith(NO_BUG):  # those that train would not follow who cannot join them
            return decisions
        self._failures[worker.pipeline] = kind = _NUMBER.sub("#", reason)
        hit = [pipeline for pipeline, failure in self._failures.items() if failure == kind]
        if len(hit) >= REPEATED and self.over is None:
            who = " and ".join(map(str, sorted(hit)))
            self.over = w.RunOver(
                f"pipelines {who} failed with the same exception, which is taken for an error of the script: {reason}",
                failed=True,
            )
            decisions.append(self.over)
        return decisions

    def _departed(self, worker: Worker, finished: bool, now: float) -> list[MemberDecision]:
        here = self._pipelines[worker.pipeline]
        if not finished:
            return self._goes(worker.pipeline, f"stage {worker.stage} was told to end", now, left=True)
        here.finished.add(worker.stage)
        return self._check_over() + self._meet()

    def _check_over(self) -> list[MemberDecision]:
        """Have all that are left finished?"""
        members = [self._pipelines[i] for i in self.members if i in self._pipelines]
        if self.over is None and members and all(len(here.finished) == self._num_stages for here in members):
            self.over = w.RunOver("all pipelines have finished their training", failed=False)
            return [self.over]
        return []

    @property
    def _may_resume(self) -> bool:
        return self.terms.resume and self._newest is not None

    def _check_lost(self) -> list[MemberDecision]:
        """Is nobody left who could go on?"""
        if self.over is not None or not self.epoch.number or self.epoch.members or self._may_resume:
            return []
        newest, lost = self._newest, f"all pipelines are lost ({self.epoch.reason})"
        if newest is None:
            advice = "no checkpoint was written; start it again, under a new scheduler"
        else:
            advice = (
                f"the newest checkpoint is {newest.path}, after update {newest.update}; go on from it with "
                "fit(ckpt_path=...), under a new scheduler. With --resume a run does so by itself"
            )
        self.over = w.RunOver(f"{lost}; {advice}", failed=True)
        return [self.over]

    def _from_a_stranger(self, event: MemberEvent) -> list[MemberDecision]:
        """Its process has not enrolled here, or must not."""
        assert not isinstance(event, w.Unreachable | w.Passed)
        worker, incarnation = event.worker, event.incarnation
        reason = self.tombstone(worker.pipeline, incarnation)
        if reason is not None and not isinstance(event, w.Died | w.Failed | w.Departed):
            return [w.Ended(worker, incarnation, reason)]
        rivals = self._rivals.get(worker.pipeline, {})
        if isinstance(event, w.Died | w.Failed | w.Departed) and worker in rivals:
            if rivals[worker].incarnation == incarnation:
                del rivals[worker]
            if not rivals:
                del self._rivals[worker.pipeline]
        return []

    def _heard(self, worker: Worker, incarnation: int) -> list[MemberDecision]:
        if not self.doubts(worker, incarnation):
            return []
        lives = (
            f"pipeline {worker.pipeline} is trained by another job, which lives (its stage {worker.stage} was just "
            "heard of); end that one, or give this one a number of its own in SDPIPE_PIPELINE"
        )
        rivals = self._rivals.pop(worker.pipeline)
        return [w.Denied(event.worker, event.incarnation, lives) for event in rivals.values()]

    # ------------------------------------------------------------- a new scheduler

    def _resumed(self, event: w.Resumed, now: float) -> list[MemberDecision]:
        worker, member = event.worker, Member(event.worker.pipeline, event.incarnation)
        reason = self._tombs.get(member)
        if reason is not None:
            return [w.Ended(worker, event.incarnation, reason)]
        if self._returning is None and self.is_here(worker, event.incarnation):
            return []
        if refused := self._refusal(event):
            return [w.Denied(worker, event.incarnation, refused)]
        if self._returning is None:
            if self.epoch.number > 0:
                return self._resumed_late(worker, member, now)
            self._returning = MemberRecovery(event, now + self.terms.recovery_grace, self._num_stages)
            self._expected = dict(event.fingerprint)
            for pipeline, here in self._pipelines.items():  # newcomers, who must not start now
                self._returning.early += [
                    w.Enrolled(Worker(j, pipeline), here.incarnation, event.fingerprint) for j in sorted(here.stages)
                ]
            self._pipelines = {}
        for met in event.met:
            self.meetings.remember(met)
        self._returning.hear(event)
        return self._end_recovery(self._returning, now) if self._returning.complete() else []

    def _resumed_late(self, worker: Worker, member: Member, now: float) -> list[MemberDecision]:
        late = f"the scheduler was started again, and the others went on without it ({self.epoch.reason})"
        here = self._pipelines.get(member.pipeline)
        partly = here is not None and here.incarnation == member.incarnation
        decisions = self._goes(member.pipeline, late, now) if partly else []
        self._bury(member, late)
        return [*decisions, w.Ended(worker, member.incarnation, late)]

    def _heard_while_recovering(self, event: MemberEvent, returning: MemberRecovery) -> list[MemberDecision]:
        if isinstance(event, w.Died | w.Failed | w.Departed):
            member = Member(event.worker.pipeline, event.incarnation)
            if returning.goes(member):
                reason = f"stage {event.worker.stage} ended while the scheduler was started again"
                self._bury(member, reason)
                return [w.Gone(member.pipeline, member.incarnation, reason, was_member=False)]
            return []
        if isinstance(event, w.Enrolled) and (refused := self._refusal(event)):
            return [w.Denied(event.worker, event.incarnation, refused)]
        returning.keep(event)
        return []

    def _end_recovery(self, returning: MemberRecovery, now: float) -> list[MemberDecision]:
        self._returning = None
        self._settled = now
        decisions: list[MemberDecision] = []
        for member in returning.epoch.members:
            absent = returning.missing(member)
            if absent:
                reason = f"its stages {absent} did not come back to the scheduler that was started again"
                self._bury(member, reason)
                decisions.append(w.Gone(member.pipeline, member.incarnation, reason, was_member=True))
                continue
            here = self._pipelines[member.pipeline] = _Pipeline(member.incarnation)
            here.stages, here.arrived, here.member = set(range(self._num_stages)), now, True
        for member in returning.replaced():
            reason = "the others went on without it"
            self._bury(member, reason)
            decisions.append(w.Gone(member.pipeline, member.incarnation, reason, was_member=False))
        back = tuple(member for member in returning.epoch.members if member.pipeline in self._pipelines)
        lost = tuple(member.pipeline for member in returning.epoch.members if member not in back)
        self.epoch = msgspec.structs.replace(returning.epoch, members=back)
        self.donations.number_from(1000 * self.epoch.number)
        decisions += self._new_epoch("the scheduler was started again", lost=lost)
        for event in returning.early:
            decisions += self._on(event, now)
        return decisions + self._admit(now) + self._meet()

    # ---------------------------------------------------------------- common

    def _time_passed(self, now: float) -> list[MemberDecision]:
        if self._returning is not None:
            return self._end_recovery(self._returning, now) if now >= self._returning.until else []
        complete = self._complete()
        if self.over is None and self.holds and now >= self._held_since + self.terms.hold_limit:
            self.over = w.RunOver(f"{self.holds} for {self.terms.hold_limit:g} s", failed=True)
            return [self.over]
        self._reach.let_in(now)
        decisions = self._admit(now)
        if not self.epoch.members and not decisions and complete and self.over is None:
            first = min(here.arrived or 0.0 for here in complete.values())
            if now >= first + self.terms.hold_limit:
                self.over = w.RunOver(f"for {self.terms.hold_limit:g} s {self.missing()}", failed=True)
                return [self.over]
        return decisions

    def _new_epoch(
        self,
        reason: str,
        more: Mapping[int, _Pipeline] | None = None,
        lost: tuple[int, ...] = (),
        tries: bool = False,
    ) -> list[MemberDecision]:
        stay = [member for member in self.epoch.members if self.is_member(member.pipeline, member.incarnation)]
        come = sorted((more or {}).items(), key=lambda item: item[0])
        stay += [Member(i, here.incarnation) for i, here in come]
        self.ever |= {member.pipeline for member in stay}
        self.epoch = Epoch(self.epoch.number + 1, tuple(stay), reason, lost, tries)
        return [self.epoch]

    def _check_enough(self, now: float) -> list[MemberDecision]:
        count, least = len(self.epoch.members), self.terms.min_pipelines
        if count + len(self._complete()) >= least or not count:  # with nobody left there is nobody to hold
            if not self.holds:
                return []
            self.holds, self._held_since = "", math.inf
            return [w.Held("")]
        there = ", ".join(map(str, sorted(self.members)))
        before, self.holds = self.holds, f"{count} of at least {least} pipelines are left ({there})"
        if not before:
            self._held_since = now
        return [w.Held(self.holds)] if self.holds != before else []

    def _meet(self) -> list[MemberDecision]:
        """Meetings to which everybody has come; those who wait at different places are told."""
        awaited = [self.awaited(stage) for stage in range(self._num_stages)]
        decided = self.meetings.decide(awaited)
        for pipeline in [i for met in decided if len(met.pipelines) > 1 for i in met.pipelines]:
            self._failures.pop(pipeline, None)
        decisions: list[MemberDecision] = [*decided]
        for stage, where in self.meetings.contradictions(awaited).items():
            said = ", ".join(f"pipeline {i} at {key}" for i, key in where.items())
            for i in where:
                reason = (
                    f"the pipelines wait for each other at different places: {said}; all must pause at the same ones, "
                    "whatever their rank, data or clock"
                )
                decisions.append(w.Denied(Worker(stage, i), self._pipelines[i].incarnation, reason))
        return decisions

    def _bury(self, member: Member, reason: str) -> None:
        self._tombs[member] = reason
        while len(self._tombs) > TOMBSTONES:
            del self._tombs[next(iter(self._tombs))]

    def validate(self) -> None:
        """Raise AssertionError if what is known contradicts itself; for tests, after each event."""
        assert len({m.pipeline for m in self.epoch.members}) == len(self.epoch.members), self.epoch
        for member in self._tombs:
            here = self._pipelines.get(member.pipeline)
            assert here is None or here.incarnation != member.incarnation, member
        if self.recovering:
            return
        members = {i for i, here in self._pipelines.items() if here.member}
        assert members == set(self.members), (members, self.epoch)
        for member in self.epoch.members:
            assert self._pipelines[member.pipeline].incarnation == member.incarnation
            assert self._pipelines[member.pipeline].stages == set(range(self._num_stages))
        for newcomer, donation in self.donations.under_way().items():
            assert newcomer in self._pipelines, donation
            assert not self._pipelines[newcomer].member, donation
            assert donation.donor in members, donation
