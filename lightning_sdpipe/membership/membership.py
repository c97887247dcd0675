"""The rules of membership in an elastic run: events and the time go in, decisions come out.

Each pipeline is a small job of its own. It enrols stage by stage, becomes a member, and goes: it dies, falls silent,
fails, or departs. ``pipelines.py`` has the tables of its states, and of those of its processes. The rules:

1. *Together or not at all.* A pipeline is a member when all its stages are there, of one incarnation, and it is gone
   when one of them is gone. An incarnation that was once gone never comes back (a tombstone): its processes must end.
2. *Epochs.* Whenever the members change a new epoch begins, with a higher number. Members are listed by age; the oldest
   leads, so the leader changes only when it goes.
3. *The start.* The first pipelines begin together when ``start_pipelines`` are there, or ``gather`` seconds after the
   first if these are at least ``min_pipelines``. A pipeline that comes later is given the state of a member
   (``state_transfers.py``), and is a member when all its stages have it. If the donor goes, another member gives it. If
   no member is left, the run is over, or a new start is made from the newest checkpoint (``resume``), even by a new
   scheduler, if it is told of one before anything else.
4. *Enough.* With fewer than ``min_pipelines``, no pipeline begins another turn. Newcomers whose stages are all there
   count: they need a member that makes its next updates. After ``hold_limit`` seconds of waiting the run ends.
5. *One job per number.* A second job that claims a pipeline's number waits. It is refused once the first job is heard
   of, and admitted on its next request once the first job is gone.
6. *Barriers* (``barriers.py``) wait for the members, and for newcomers whose state has been copied in that stage, as
   they are about to catch up.
7. *A bug ends the run.* Two pipelines that fail with the same exception would be followed by all others. A pipeline's
   failure is forgotten when it has come back and passed a barrier with others. A SchedulerError does not count, since
   one loss (of the scheduler, for instance) causes several. Nor does the failure of a newcomer while others train.
8. *Out of reach* (``failure_detection.py``). Pipelines without a common process group make another one, and report
   which pipelines they cannot reach; if that goes on, one of them is put out.
9. *A new scheduler* learns of the run when a member resumes, or a newcomer enrols that has heard of members: it waits
   ``recovery_grace`` seconds for the other members of the newest epoch that any heard of. A start outside that epoch
   has been replaced, and must end. No pipeline starts anew in its first ``settle`` seconds.
10. *A fixed roster* (``fixed``) is one start of a fixed number of pipelines. A process that has ended, or is silent on
    a machine that cannot be reached, ends the run, which names it; so does the scheduler's end. When all have finished,
    the next run may begin. The first process of a run determines its kind.

Promises, which tests check on many histories: epoch numbers grow; no incarnation is a member twice, or after it was
gone; the leader is the oldest member; none starts fresh while there is a member; a barrier is decided once.
"""

from __future__ import annotations

import math
from typing import assert_never

import msgspec

from lightning_sdpipe.membership import members as w
from lightning_sdpipe.membership.members import Epoch, Member, MemberDecision, MemberEvent
from lightning_sdpipe.membership.recovery import MemberRecovery
from lightning_sdpipe.membership.run_state import RunState
from lightning_sdpipe.policies.events import Worker


class Membership(RunState):
    """The membership of one run."""

    # ------------------------------------------------------------------ events

    def on(self, event: MemberEvent, now: float) -> list[MemberDecision]:
        """Return the decisions that follow from ``event`` at ``now``. No event is refused by an exception."""
        self._due, decisions = None, self._on(event, now)
        if self.recovering:
            return decisions
        decisions += self.ending.are_lost(self.epoch)
        return decisions + self.ending.are_enough(self.members, len(self.roster.complete()), now)

    def _on(self, event: MemberEvent, now: float) -> list[MemberDecision]:
        if isinstance(event, w.Resumed):
            return self._resumed(event, now)
        if isinstance(event, w.Passed):
            return self._time_passed(now)
        if isinstance(event, w.Published) and not self.epoch.number:  # kept by an earlier scheduler
            self.ending.newest = event
            return []
        if self._returning is not None:
            if isinstance(event, w.Enrolled) and (refused := self._refusal(event)):
                return [w.Denied(event.worker, event.incarnation, refused)]
            heard = self._returning.hear_other(event, self.roster)
            return heard + (self._end_recovery(self._returning, now) if self._returning.complete() else [])
        if isinstance(event, w.Enrolled):
            return self._enrolled(event, now)
        if isinstance(event, w.Unreachable):
            return self._unreachable(event, now)
        if isinstance(event, w.Heard):
            return self._heard(event.worker, event.incarnation)
        if not self.is_here(event.worker, event.incarnation):
            return self._from_a_stranger(event)
        return self._from_a_process(event, now)

    def _from_a_process(self, event: w.FromProcess, now: float) -> list[MemberDecision]:
        worker = event.worker
        here = self.roster.here[worker.pipeline]
        done = here.processes[worker.stage] == "done"
        match event:
            case w.Snapshot():
                return self._copied(event, now)
            case w.Received(_, _, transfer) if event.missed:
                if given_up := self.donations.give_up(worker.pipeline, transfer):
                    return self._without_state(worker.pipeline, given_up, now)
                return self._repeat(worker.pipeline)
            case w.Received():
                return self._received(event, now)
            case w.Meets(_, _, key, value):
                met = self.barriers.comes(worker.stage, worker.pipeline, key, value)
                return self._meet() if met is None else [met]
            case w.Ended(how="ended" | "silent") if done:
                return []  # as it said it would
            case w.Ended() if self.terms.fixed:
                return self._ends_it(worker, _ended(event))
            case w.Ended(_, _, reason, "ended" | "silent"):
                return self._goes(worker.pipeline, f"stage {worker.stage} {reason}", now)
            case w.Ended(_, _, reason):
                joins = not here.member and bool(self.members)  # the training members would not follow it
                decisions = self._goes(worker.pipeline, f"stage {worker.stage} failed: {reason}", now)
                return decisions if joins else decisions + self.ending.fails(worker.pipeline, reason)
            case w.Departed():
                return self._departed(event, now)
            case w.Published():
                self.ending.newest = event
                return []
            case w.Misses(_, _, epoch, pipelines):
                if epoch == self.epoch.number:
                    self._reach.misses(worker.pipeline, {*pipelines} & {*self.members} - {worker.pipeline})
                return []
            case _:
                assert_never(event)

    # -------------------------------------------------------------- coming

    def _enrolled(self, event: w.Enrolled, now: float) -> list[MemberDecision]:
        worker, incarnation, roster = event.worker, event.incarnation, self.roster
        reason = roster.tombstone(worker.pipeline, incarnation)
        if reason is not None:
            return [w.Denied(worker, incarnation, reason, must_end=True)]
        if not roster.has(worker, incarnation):
            self._make_room(w.is_fixed(event.fingerprint), now)
        if refused := self._refusal(event):
            return [w.Denied(worker, incarnation, refused)]
        heard_of = None if self.epoch.number or self.terms.fixed else event.epoch
        if heard_of is not None:
            returning = self._begin_recovery(event, heard_of, now)
            returning.hear_other(event, roster)
            return self._end_recovery(returning, now) if returning.complete() else []
        if roster.claims(event):
            return []
        if roster.has(worker, incarnation):
            return self._heard(worker, incarnation) + self._repeat(worker.pipeline)
        self._entry.binds(event)
        roster.enrols(worker, incarnation, now)
        return self._admit(now)

    def _refusal(self, event: w.Enrolled | w.Resumed) -> str:
        if self.epoch.number == 0 and self._returning is None:
            self._entry.forget_alone(event.worker, self.roster)
        return self._entry.refusal(event, self.ending.over)

    def _admit(self, now: float) -> list[MemberDecision]:
        """Start the complete pipelines, or find donors for them."""
        complete, here = self.roster.complete(), self.roster.here
        if self.epoch.members:
            waiting = [i for i in complete if self.donations.of(i) is None and self._reach.out_until(i) <= now]
            givers = {i: here[i].incarnation for i in self.members if i in here and not here[i].finishes}
            if not givers:
                return []
            for i in waiting:
                here[i].move("finds a donor")
            return [d for i in waiting for d in self.donations.choose(i, givers)]
        if not complete or now < self._settled or self.ending.over is not None:
            return []
        enough = len(complete) >= self.terms.min_pipelines
        all_there = enough and len(complete) >= self.terms.to_start
        gathered = enough and now >= min(start.arrived for start in complete.values()) + self.terms.gather
        again = self.epoch.number and not self.terms.fixed
        if not (all_there or gathered) or (again and not self.ending.may_resume):
            return []
        self.barriers.begin_anew()
        checkpoint = self.ending.resume()
        for start in complete.values():
            start.move("begins")
            start.fresh = True
        come, names = tuple(sorted(complete)), ", ".join(map(str, sorted(complete)))
        why = f"again from {checkpoint}, since no member was left" if checkpoint else "together"
        if again:
            self.epoch = msgspec.structs.replace(self.epoch, starts=self.epoch.starts + 1)
        decisions = self._new_epoch(f"pipelines {names} start {why}", come)
        return decisions + [w.Started(i, self.epoch, True, checkpoint) for i in come]

    def _copied(self, event: w.Snapshot, now: float) -> list[MemberDecision]:
        donor, donation = event.worker, self.donations.named(event.transfer)
        decisions = self.donations.copied(donor.stage, donor.pipeline, event.transfer, event.update)
        if donation is None or self.donations.of(donation.pipeline) is donation:
            return decisions + self._meet()
        return self._without_state(donation.pipeline, decisions, now)

    def _without_state(self, newcomer: int, decisions: list[MemberDecision], now: float) -> list[MemberDecision]:
        """Find another donor for ``newcomer``, whose transfer is void."""
        self._reach.got_none(newcomer, now)
        self.roster.here[newcomer].move("loses it")
        return decisions + self._admit(now) + self._meet()

    def _received(self, event: w.Received, now: float) -> list[MemberDecision]:
        worker, transfer, pipeline = event.worker, event.transfer, event.worker.pipeline
        if wrong := self.donations.wrong(pipeline, transfer, event.update):
            gone = self._goes(pipeline, f"stage {worker.stage} is refused: {wrong}", now)
            return [w.Denied(worker, event.incarnation, wrong), *gone]
        if not self.donations.has_received(pipeline, worker.stage, transfer):
            donation = self.donations.of(pipeline)
            if donation is not None and donation.transfer == transfer:
                return []  # its other stages do not have it yet
            return self._repeat(pipeline)
        self.donations.end(pipeline)
        self._reach.has_come(pipeline)
        self.roster.here[pipeline].move("has it")
        decisions = self._new_epoch(f"pipeline {pipeline} has come", (pipeline,))
        return [*decisions, w.Started(pipeline, self.epoch, fresh=False), *self._meet()]

    def _repeat(self, pipeline: int) -> list[MemberDecision]:
        """Repeat what ``pipeline`` was told, since one of its workers asks again."""
        here, resumed = self.roster.here[pipeline], self.ending.resumed
        if here.member:
            return [w.Started(pipeline, self.epoch, here.fresh, resumed.path if here.fresh and resumed else "")]
        donation = self.donations.taken(pipeline)
        return [] if donation is None else [self.donations.told(donation)]

    # --------------------------------------------------------------- going

    def _ends_it(self, worker: Worker, reason: str) -> list[MemberDecision]:
        """End the run, since a process of a fixed roster has ended."""
        here = self.roster.here[worker.pipeline]
        self.roster.goes(worker.pipeline, reason)
        self.barriers.goes(worker.pipeline)
        return [*self.ending.ends(reason, worker), w.Gone(worker.pipeline, here.incarnation, reason, was_member=False)]

    def _goes(self, pipeline: int, reason: str, now: float, left: bool = False) -> list[MemberDecision]:
        """Remove that start of ``pipeline``, which is over; ``reason`` begins with what happened to which stage."""
        here = self.roster.here[pipeline]
        was_member = here.member
        self.roster.goes(pipeline, reason)
        self.barriers.goes(pipeline)
        decisions: list[MemberDecision] = [w.Gone(pipeline, here.incarnation, reason, was_member, left)]
        decisions += self.donations.end(pipeline)
        self.donations.forget(pipeline)
        for newcomer in self.donations.without_donor(pipeline):
            self.roster.here[newcomer].move("loses it")
        if was_member:
            verb = "left" if left else "lost"
            decisions += self._new_epoch(f"pipeline {pipeline} {verb} ({reason})", lost=(pipeline,))
        return decisions + self.ending.have_finished(self.epoch, self.roster.here) + self._admit(now) + self._meet()

    def _unreachable(self, event: w.Unreachable, now: float) -> list[MemberDecision]:
        """Let all make another process group, and report which pipelines they cannot reach; or put one of them out."""
        stage, pipelines = event.stage, event.pipelines
        if not self.epoch.members or self.terms.fixed:
            return []
        there = ", ".join(map(str, pipelines))
        found = self._reach.found_none(pipelines, self.members, event.waited, now)
        if found is None:
            reason = f"pipelines {there} have no process group of stage {stage} in common"
            return self._new_epoch(reason, tries=True)
        unlucky, others = found
        self._reach.put_out(unlucky, now)
        missed = f"cannot reach pipelines {', '.join(map(str, others))}" if others else f"is the youngest of {there}"
        return self._goes(
            unlucky,
            f"stage {stage} finds no process group with others, and {missed}, though all reach the scheduler; look at "
            "the network between their machines, and at GLOO_SOCKET_IFNAME",
            now,
        )

    def _departed(self, event: w.Departed, now: float) -> list[MemberDecision]:
        worker, finished = event.worker, event.finished
        here = self.roster.here[worker.pipeline]
        if finished and (here.member or self.terms.fixed):
            here.move_process(worker.stage, "finishes")
            if all(state == "done" for state in here.processes.values()):
                if here.member:
                    here.move("finishes")
                else:
                    self.roster.goes(worker.pipeline, "it has finished before the others came")
            return self.ending.have_finished(self.epoch, self.roster.here) + self._meet()
        if self.terms.fixed:
            return self._ends_it(worker, _ended(event))
        said = "has finished before its pipeline took part" if finished else _ended(event)
        return self._goes(worker.pipeline, f"stage {worker.stage} {said}", now, left=True)

    def _heard(self, worker: Worker, incarnation: int) -> list[MemberDecision]:
        """Refuse the jobs that claim the number of this process, which is alive."""
        if not self.doubts(worker, incarnation):
            return []
        lives = (
            f"pipeline {worker.pipeline} is trained by another job, which is alive (its stage {worker.stage} was just "
            "heard of); end that one, or give this one "
            + ("a scheduler of its own" if self.terms.fixed else "a number of its own in SDPIPE_PIPELINE")
        )
        rivals = self.roster.take_rivals(worker.pipeline)
        return [w.Denied(event.worker, event.incarnation, lives) for event in rivals]

    def _from_a_stranger(self, event: w.FromProcess) -> list[MemberDecision]:
        """Decide on an event of a process that has not enrolled here, or must not."""
        worker, incarnation = event.worker, event.incarnation
        if isinstance(event, w.Departed) or (isinstance(event, w.Ended) and event.how != "silent"):
            self.roster.rival_ends(worker, incarnation)
            return []
        reason = self.roster.tombstone(worker.pipeline, incarnation)
        return [] if reason is None else [w.Denied(worker, incarnation, reason, must_end=True)]

    # ------------------------------------------------------------- a new scheduler

    def _resumed(self, event: w.Resumed, now: float) -> list[MemberDecision]:
        worker, member = event.worker, Member(event.worker.pipeline, event.incarnation)
        reason = self.roster.tombstone(worker.pipeline, event.incarnation)
        if reason is not None:
            return [w.Denied(worker, event.incarnation, reason, must_end=True)]
        if self._returning is None and self.is_here(worker, event.incarnation):
            return self._heard(worker, event.incarnation)
        self._make_room(w.is_fixed(event.fingerprint), now)
        if refused := self._refusal(event):
            return [w.Denied(worker, event.incarnation, refused)]
        returning = self._returning
        if returning is None:
            if self.epoch.number > 0:
                return self._resumed_late(worker, member, now)
            returning = self._begin_recovery(event, event.epoch, now)
        for met in event.met:
            self.barriers.remember(met)
        returning.hear(event)
        return self._end_recovery(returning, now) if returning.complete() else []

    def _begin_recovery(self, event: w.Enrolled | w.Resumed, epoch: Epoch, now: float) -> MemberRecovery:
        returning = self._returning = MemberRecovery(epoch, now + self.terms.recovery_grace, self._num_stages)
        self._entry.binds(event, anew=True)
        returning.delays(self.roster, event.fingerprint)
        return returning

    def _resumed_late(self, worker: Worker, member: Member, now: float) -> list[MemberDecision]:
        late = f"the scheduler was started again, and the others went on without it ({self.epoch.reason})"
        here = self.roster.here.get(member.pipeline)
        partly = here is not None and here.incarnation == member.incarnation
        decisions = self._goes(member.pipeline, late, now) if partly else []
        self.roster.bury(member, late)
        return [*decisions, w.Denied(worker, member.incarnation, late, must_end=True)]

    def _end_recovery(self, returning: MemberRecovery, now: float) -> list[MemberDecision]:
        self._returning, self._settled = None, now
        decisions = returning.end(self.roster, now)
        back = tuple(member for member in returning.epoch.members if member.pipeline in self.roster.here)
        lost = tuple(member.pipeline for member in returning.epoch.members if member not in back)
        self.epoch = msgspec.structs.replace(returning.epoch, members=back)
        self.donations.number_from(1000 * self.epoch.number)
        decisions += self._new_epoch("the scheduler was started again", lost=lost)
        for event in returning.enrolments():
            decisions += self._on(event, now)
        return decisions + self._admit(now) + self._meet()

    # ---------------------------------------------------------------- common

    def _time_passed(self, now: float) -> list[MemberDecision]:
        if self._returning is not None:
            return self._end_recovery(self._returning, now) if now >= self._returning.until else []
        limit, complete = self.terms.hold_limit, self.roster.complete()
        if self.ending.over is None and now >= self.ending.hold_ends:
            return self.ending.ends(f"{self.ending.holds} for {limit:g} s")
        self._reach.let_in(now)
        decisions = self._admit(now)
        waits_since = min((here.arrived for here in complete.values()), default=math.inf)
        if not self.epoch.members and not decisions and now >= waits_since + limit:
            return self.ending.ends(f"for {limit:g} s {self.missing()}")
        return decisions

    def _new_epoch(
        self, reason: str, come: tuple[int, ...] = (), lost: tuple[int, ...] = (), tries: bool = False
    ) -> list[MemberDecision]:
        here = self.roster.here
        stay = [member for member in self.epoch.members if self.roster.is_member(member.pipeline, member.incarnation)]
        stay += [Member(i, here[i].incarnation) for i in come]
        for i in come:
            here[i].since = self.epoch.number + 1
        self.ever |= {member.pipeline for member in stay}
        self.epoch = Epoch(self.epoch.number + 1, tuple(stay), reason, lost, tries, self.epoch.starts)
        return [self.epoch]

    def _meet(self) -> list[MemberDecision]:
        """Decide the barriers that all have reached; refuse workers that wait at different keys."""
        awaited = [self.awaited(stage) for stage in range(self._num_stages)]
        decided = self.barriers.decide(awaited)
        self.ending.meet(i for met in decided if len(met.pipelines) > 1 for i in met.pipelines)
        decisions: list[MemberDecision] = [*decided]
        for stage, where in self.barriers.contradictions(awaited).items():
            said = ", ".join(f"pipeline {i} at {key}" for i, key in where.items())
            for i in where:
                reason = (
                    f"the pipelines wait for each other at different places: {said}; all must pause at the same ones, "
                    "whatever their rank, data or clock"
                )
                decisions.append(w.Denied(Worker(stage, i), self.roster.here[i].incarnation, reason))
        return decisions


def _ended(event: w.Ended | w.Departed) -> str:
    """Return what has happened to the process, for people."""
    if isinstance(event, w.Departed):
        return "was told to end"
    return event.reason if event.how == "failed" else f"its process {event.reason}"
