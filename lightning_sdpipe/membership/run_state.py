"""State of a run, and the questions that the rules, the scheduler and people ask about it."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from itertools import islice

from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.membership import members as w
from lightning_sdpipe.membership.barriers import DecidedBarriers
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.membership.failure_detection import Reach
from lightning_sdpipe.membership.members import Epoch, Member, MemberDecision
from lightning_sdpipe.membership.pipelines import EntryRules, PipelineStart, Roster
from lightning_sdpipe.membership.recovery import MemberRecovery
from lightning_sdpipe.membership.state_transfers import StateTransfers
from lightning_sdpipe.policies.events import Worker

NAMED = 8
"""Most pipelines that are named to each process that waits for the start."""

REPEATED = 2
"""Pipelines that must fail with one exception for it to be taken for a bug of the script."""
NO_BUG = f"{SchedulerError.__name__}: "
"""Beginning of the reason of a failure that is not the script's."""
_NUMBER = re.compile(r"\d+")


class RunState:
    """The state of one run of pipelines of ``num_stages`` stages; ``now`` is when the scheduler begins to listen.
    Unless the ``terms`` are of a fixed roster, the first process determines whether a fixed run of ``num_pipelines``
    begins."""

    def __init__(self, num_stages: int, terms: ElasticConfig, now: float = 0.0, num_pipelines: int = 1) -> None:
        self.offered = self.terms = terms
        self.epoch = Epoch(0, (), "no pipeline has come yet")
        self.roster = Roster(num_stages, terms.depths)
        self.ending = Ending(terms)
        self.ever: set[int] = set()
        """Pipelines that were members at any time."""
        self.donations = StateTransfers(num_stages)
        self.barriers = DecidedBarriers(num_stages)
        self._num_stages, self._num_pipelines = num_stages, num_pipelines
        self._settled = now + terms.settle
        self._entry = EntryRules(num_stages, terms)
        self._returning: MemberRecovery | None = None
        self._reach = Reach(terms.apart)
        self._due: float | None = None

    @property
    def recovering(self) -> bool:
        """True while the scheduler waits for the members of a run that an earlier one served."""
        return self._returning is not None

    @property
    def members(self) -> list[int]:
        """Pipelines of the members, oldest first."""
        return [member.pipeline for member in self.epoch.members]

    def is_here(self, worker: Worker, incarnation: int) -> bool:
        """Return whether that process has enrolled, in a start of its pipeline that is not gone."""
        if self._returning is not None:
            return self._returning.is_there(Member(worker.pipeline, incarnation), worker.stage)
        return self.roster.has(worker, incarnation)

    def doubts(self, worker: Worker, incarnation: int) -> bool:
        """Return whether it would help to hear that this process lives, since another job claims its number."""
        return worker.pipeline in self.roster.claimed and self.is_here(worker, incarnation)

    def unit(self, worker: Worker) -> object:
        """Return what falls silent together with ``worker``: its pipeline, or in a fixed roster the worker alone."""
        return worker if self.terms.fixed else worker.pipeline

    def awaited(self, stage: int) -> list[int]:
        """Return the pipelines that a barrier of ``stage`` waits for."""
        return sorted(
            i
            for i, here in self.roster.here.items()
            if (here.member or self.donations.taken_in(i, stage)) and here.processes.get(stage, "done") != "done"
        )

    def states(self) -> dict[int, str]:
        """Return the state of each pipeline that is there, for people."""
        return {pipeline: self.state(pipeline) for pipeline in sorted(self.roster.here)}

    def state(self, pipeline: int) -> str:
        """Describe the state of ``pipeline``, which is there, for people; as fast with many pipelines as with few."""
        members = self.epoch.members
        leads = bool(members) and members[0].pipeline == pipeline
        out = bool(members) and self._reach.out_until(pipeline) > -math.inf
        return self.roster.state(pipeline, self.donations, leads, out)

    def missing(self) -> str:
        """Return in words what the start, or training, waits for."""
        if self.ending.holds:
            return self.ending.holds
        some = sorted(islice(self.roster.here, NAMED))
        said = [f"pipeline {pipeline} {self.state(pipeline)}" for pipeline in some] or ["no pipeline is there"]
        if more := len(self.roster.here) - len(some):
            said.append(f"and {more} more")
        return f"training starts when {self.terms.to_start} pipelines are there; {', '.join(said)}"

    def waits_for(self, worker: Worker, incarnation: int) -> str:
        """Return in words what that process, which is not a member yet, waits for."""
        if self.recovering:
            return "the scheduler was started again, and waits for the members of the run"
        if not self.is_here(worker, incarnation):
            return f"another job claims pipeline {worker.pipeline}; it is looked whether that one still lives"
        if self.epoch.members:
            return f"pipeline {worker.pipeline} {self.state(worker.pipeline)}"
        return self.missing()

    def deadline(self) -> float:
        """Return when a :class:`Passed` is due. It is asked for after each message, but only membership's events change
        it."""
        if self._due is None:
            self._due = self._next_due()
        return self._due

    def _next_due(self) -> float:
        if self._returning is not None:
            return self._returning.until
        if self.ending.over is not None:
            return math.inf
        due = self.ending.hold_ends
        complete = self.roster.complete()
        if complete and not self.epoch.members:
            first = min(here.arrived for here in complete.values())
            enough = len(complete) >= self.terms.min_pipelines
            due = min(due, max(self._settled, first + (self.terms.gather if enough else self.terms.hold_limit)))
            if len(complete) >= self.terms.to_start:
                due = min(due, self._settled)
        elif self.epoch.members:
            out = [self._reach.out_until(i) for i in complete if self.donations.of(i) is None]
            due = min([due, *(until for until in out if until > -math.inf)])
        return due

    def _make_room(self, fixed: bool, now: float) -> None:
        """Make room for the next run after a fixed roster that has finished; an empty roster takes on the kind of the
        run that comes."""
        over = self.ending.over
        if self.terms.fixed and over is not None and not over.failed:
            for pipeline in [*self.roster.here]:
                self.roster.goes(pipeline, "its run is over, and another has begun")
                self.barriers.goes(pipeline)
            self.epoch = Epoch(0, (), "no pipeline has come yet")
            self.ever.clear()
            self.ending.begin_anew()
        if not (self.roster.here or self.ending.over or self.epoch.number or self.recovering):
            terms = self.offered
            if fixed and not terms.fixed:
                terms = ElasticConfig.of_fixed(self._num_pipelines)
                self._settled = now
            self.terms = self.ending.terms = terms
            self._entry = EntryRules(self._num_stages, terms)

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself; for tests, after each event."""
        assert len({m.pipeline for m in self.epoch.members}) == len(self.epoch.members), self.epoch
        self.roster.validate()
        if self.recovering or (self.terms.fixed and self.ending.over is not None):
            return
        here = self.roster.here
        members = {i for i, start in here.items() if start.member}
        assert members == set(self.members), (members, self.epoch)
        for member in self.epoch.members:
            assert here[member.pipeline].incarnation == member.incarnation
        receiving = {i for i, start in here.items() if start.state == "receiving"}
        assert receiving == self.donations.under_way().keys(), (receiving, self.donations.under_way())
        assert all(donation.donor in members for donation in self.donations.under_way().values())


class Ending:
    """The holds and the end of a run with these ``terms``: when its members wait for more pipelines, and when it is
    over (rules 3, 4 and 7 of :mod:`lightning_sdpipe.membership.membership`)."""

    def __init__(self, terms: ElasticConfig) -> None:
        self.terms = terms
        self.over: w.RunOver | None = None
        self.holds = ""
        """Reason why no pipeline may train now; empty if one may."""
        self.newest: w.Published | None = None
        self.resumed: w.Published | None = None
        """Checkpoint from which a new start was made."""
        self._held_since = math.inf
        self._failures: dict[int, str] = {}
        """Last failure of each pipeline, without its numbers (an index, a rank), until it passes a barrier with others
        again."""

    @property
    def may_resume(self) -> bool:
        """True if a new start can be made when no pipeline is left."""
        return self.terms.resume and self.newest is not None

    @property
    def hold_ends(self) -> float:
        """Time at which waiting for more pipelines ends the run."""
        return self._held_since + self.terms.hold_limit if self.holds else math.inf

    def resume(self) -> str:
        """Begin a new start; return the checkpoint file that it goes on from, empty if there is none."""
        self.resumed = self.newest = self.newest if self.may_resume else None
        return "" if self.resumed is None else self.resumed.path

    def ends(self, reason: str, worker: Worker | None = None, failed: bool = True) -> list[MemberDecision]:
        """End the run, unless it is over already."""
        if self.over is not None:
            return []
        self.over = w.RunOver(reason, failed, worker)
        return [self.over]

    def fails(self, pipeline: int, reason: str) -> list[MemberDecision]:
        """Note that ``pipeline`` has failed with an exception of the script; end the run if others failed with the
        same."""
        if reason.startswith(NO_BUG):
            return []
        self._failures[pipeline] = kind = _NUMBER.sub("#", reason)
        hit = [other for other, failure in self._failures.items() if failure == kind]
        if len(hit) < REPEATED:
            return []
        names = " and ".join(map(str, sorted(hit)))
        return self.ends(
            f"pipelines {names} failed with the same exception, which is taken for an error of the script: {reason}"
        )

    def meet(self, pipelines: Iterable[int]) -> None:
        """Forget the failures of these pipelines, which have come back and passed a barrier."""
        for pipeline in pipelines:
            self._failures.pop(pipeline, None)

    def have_finished(self, epoch: Epoch, here: Mapping[int, PipelineStart]) -> list[MemberDecision]:
        """End the run if all members of ``epoch`` that are left ``here`` have finished."""
        left = [here[i] for i in epoch.pipelines if i in here]
        if left and all(start.state == "done" for start in left):
            return self.ends("all pipelines have finished their training", failed=False)
        return []

    def are_lost(self, epoch: Epoch) -> list[MemberDecision]:
        """End the run if no pipeline is left that could go on."""
        if self.over is not None or not epoch.number or epoch.members or self.may_resume or self.terms.fixed:
            return []
        if self.newest is None:
            advice = "no checkpoint was written; start it again, under a new scheduler"
        else:
            advice = (
                f"the newest checkpoint is {self.newest.path}, after update {self.newest.update}; continue from it "
                "with fit(ckpt_path=...), under a new scheduler. With --resume a run does this by itself"
            )
        return self.ends(f"all pipelines are lost ({epoch.reason}); {advice}")

    def are_enough(self, members: Collection[int], more: int, now: float) -> list[MemberDecision]:
        """Decide whether ``members`` may train, if ``more`` pipelines could join them."""
        count, least = len(members), self.terms.min_pipelines
        if count + more >= least or not count:  # without a member there is none to hold
            if not self.holds:
                return []
            self.holds, self._held_since = "", math.inf
            return [w.Held("")]
        there = ", ".join(map(str, sorted(members)))
        before, self.holds = self.holds, f"{count} of at least {least} pipelines are left ({there})"
        if not before:
            self._held_since = now
        return [w.Held(self.holds)] if self.holds != before else []

    def begin_anew(self) -> None:
        """Forget the end of a run, for the next run of a fixed roster."""
        self.over = self.newest = self.resumed = None
        self._failures.clear()
