"""State of a run, and the questions that the rules, the scheduler and people ask about it."""

from __future__ import annotations

import math
from itertools import islice

from lightning_sdpipe.membership.barriers import DecidedBarriers
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.membership.ending import Ending
from lightning_sdpipe.membership.members import Epoch, Member
from lightning_sdpipe.membership.pipelines import EntryRules, Roster
from lightning_sdpipe.membership.recovery import MemberRecovery
from lightning_sdpipe.membership.state_transfers import StateTransfers
from lightning_sdpipe.membership.unreachable import Reach
from lightning_sdpipe.policies.events import Worker

NAMED = 8
"""Most pipelines that are named to each process that waits for the start."""


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
        self.donations = StateTransfers(self.roster.depth)
        self.barriers = DecidedBarriers(num_stages)
        self._num_stages, self._num_pipelines = num_stages, num_pipelines
        self._settled = now + terms.settle
        self._entry = EntryRules(num_stages, terms)
        self._returning: MemberRecovery | None = None
        self._reach = Reach(terms.apart)
        self._due: float | None = None

    @property
    def recovering(self) -> bool:
        """True while the members of a run that another scheduler has served are waited for."""
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
        """Return whether it would help to hear that this process lives: another job claims its number, or it is
        lost."""
        claimed = worker.pipeline in self.roster.claimed
        return self.is_here(worker, incarnation) and (claimed or self.is_lost(worker))

    def is_lost(self, worker: Worker) -> bool:
        """Return whether the worker belongs to a fixed roster and has not been heard of for too long."""
        here = self.roster.here.get(worker.pipeline)
        return here is not None and here.is_lost(worker.stage)

    def unit(self, worker: Worker) -> object:
        """Return what falls silent together with ``worker``: its pipeline, or in a fixed roster the worker alone."""
        return worker if self.terms.fixed else worker.pipeline

    def awaited(self, stage: int) -> list[int]:
        """Return the pipelines that a barrier of ``stage`` waits for."""
        return sorted(
            i
            for i, here in self.roster.here.items()
            if (here.member or self.donations.taken_in(i, stage))
            and here.processes.get(stage, "done") not in ("done", "lost")
        )

    def states(self) -> dict[int, str]:
        """Return the state of each pipeline that is there, for people."""
        return {pipeline: self.state(pipeline) for pipeline in sorted(self.roster.here)}

    def state(self, pipeline: int) -> str:
        """Return the state of ``pipeline``, which is there, for people; as fast with many pipelines as with few."""
        members = self.epoch.members
        leads = bool(members) and members[0].pipeline == pipeline
        out = bool(members) and self._reach.out_until(pipeline) > -math.inf
        return self.roster.state(pipeline, self.donations, leads, out)

    def missing(self) -> str:
        """Describe what the start, or training, waits for, for people."""
        if self.ending.holds:
            return self.ending.holds
        some = sorted(islice(self.roster.here, NAMED))
        said = [f"pipeline {pipeline} {self.state(pipeline)}" for pipeline in some] or ["no pipeline is there"]
        if more := len(self.roster.here) - len(some):
            said.append(f"and {more} more")
        return f"training starts when {self.terms.to_start} pipelines are there; {', '.join(said)}"

    def waits_for(self, worker: Worker, incarnation: int) -> str:
        """Describe what that process, which is no member yet, waits for, for people."""
        if self.recovering:
            return "the scheduler was started again, and waits for the members of the run"
        if not self.is_here(worker, incarnation):
            return f"another job claims pipeline {worker.pipeline}; it is looked whether that one still lives"
        if self.epoch.members:
            return f"pipeline {worker.pipeline} {self.state(worker.pipeline)}"
        return self.missing()

    def deadline(self) -> float:
        """Return when a :class:`Passed` is due. It is asked for after each message, and only events of members change
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
        """Make room for the next run after a fixed roster that has finished; an empty roster becomes of the kind that
        comes."""
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
                terms = ElasticConfig.of_fixed(self._num_pipelines, terms.recovery_grace, terms.depths)
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
