"""AD-PSGD as policies: every worker averages with one neighbour at a time.

:class:`ADPSGDPolicy` is the baseline of SDPipe §5: every iteration draws a perfect matching of the pipelines, the same
for all stages, and a worker waits for its partner of that iteration. With an odd number of pipelines, one goes on
alone. The pairs depend on the iteration's number and on the pipelines that take part when the first worker reports it,
on any stage. Later changes do not alter them: no worker waits for a partner that is inactive or already past that
iteration, and a pipeline that joined too late to be drawn goes on alone. There is no deadlock: to report iteration k, a
worker needs only groups of iterations before k, so the waiting workers of the lowest iteration have partners that will
come.

:class:`AsynchronousADPSGDPolicy` is the algorithm as its authors describe it (AD-PSGD, Lian et al. 2018): a ready
worker averages at once with a random neighbour, whatever that neighbour is doing. The group then has a member that did
not ask for it, listed in ``Group.passive``. Such a neighbour averages in the background of its computation and must
never wait for another worker before it answers, so a cycle of neighbours that chose each other cannot deadlock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

from lightning_sdpipe.errors import check_integer
from lightning_sdpipe.policies.capabilities import BESIDE, CHANGING, DEALT, FLAT, GROUPS, SHARDED, Capabilities
from lightning_sdpipe.policies.decisions import Decision, Reason
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.group_policy import GroupPolicy
from lightning_sdpipe.policies.pairing import matching, shift_one, uniform
from lightning_sdpipe.policies.policy import PolicyConfig


class ADPSGD(PolicyConfig, frozen=True):
    """AD-PSGD: models are averaged in pairs after every step.

    As in the comparison of SDPipe §5.1, pairs are drawn from ``seed``, afresh for every iteration, and the two wait for
    each other. ``asynchronous`` is the algorithm of Lian et al. 2018: a worker averages at once with a random
    neighbour, which goes on computing.
    """

    registered = "ad_psgd"
    forms = ({}, {"asynchronous": True})
    in_step = True

    seed: int = 0
    asynchronous: bool = False

    def __post_init__(self) -> None:
        check_integer("seed", self.seed, 0, "any")

    @property
    def capabilities(self) -> Capabilities:
        if self.asynchronous:
            return Capabilities(CHANGING, BESIDE, data=DEALT, elastic={})
        return replace(GROUPS, hierarchies=FLAT, data=SHARDED)

    @property
    def half(self) -> str:
        return "lightning_sdpipe.sync.methods:asynchronously" if self.asynchronous else super().half

    @property
    def must_hold(self) -> Mapping[str, object]:
        return {"asynchronous": True} if self.asynchronous else {}

    def make_policy(self, num_stages: int, num_pipelines: int) -> GroupPolicy:
        if self.asynchronous:
            return AsynchronousADPSGDPolicy(num_stages, num_pipelines, seed=self.seed)
        return ADPSGDPolicy(num_stages, num_pipelines, seed=self.seed)


_REMEMBERED = 64
"""Number of iterations whose pipelines are remembered."""


class ADPSGDPolicy(GroupPolicy):
    """Pairs that wait for each other: redrawn for every iteration, or shifted by one every ``shifts`` iterations."""

    def __init__(self, num_stages: int, num_pipelines: int, *, seed: int = 0, shifts: int | None = None) -> None:
        super().__init__(num_stages, num_pipelines)
        self._seed, self._shifts = seed, shifts
        self._there: OrderedDict[int, list[int]] = OrderedDict()
        """By iteration, the pipelines that took part when the first worker reported it."""
        self._waits_for: list[dict[int, set[int]]] = [{} for _ in range(num_stages)]

    def worker_ready(self, worker: Worker, iteration: int, now: float) -> list[Decision]:
        decisions = self._settle(worker.stage, worker.pipeline)
        return decisions + self._settle_those_who_wait_for(worker.stage, worker.pipeline)

    def worker_left(self, worker: Worker, now: float) -> list[Decision]:
        for waiters in self._waits_for[worker.stage].values():
            waiters.discard(worker.pipeline)
        return self._settle_those_who_wait_for(worker.stage, worker.pipeline)

    def _settle_those_who_wait_for(self, stage: int, pipeline: int) -> list[Decision]:
        waiters = sorted(self._waits_for[stage].pop(pipeline, ()))
        waiting = self.participants.waiting[stage]
        return [group for waiter in waiters if waiter in waiting for group in self._settle(stage, waiter)]

    def _settle(self, stage: int, pipeline: int) -> list[Decision]:
        """Answer the waiting worker if its partner has come or will not come."""
        participants = self.participants
        iteration = participants.waiting[stage][pipeline]
        partner = self._partner(pipeline, iteration)
        if partner == pipeline:
            return [participants.group(stage, [pipeline], Reason.LOCAL_STEP)]
        if partner not in participants.active[stage]:
            return [participants.group(stage, [pipeline], Reason.WORKER_LOST)]
        if participants.waiting[stage].get(partner) == iteration:
            return [participants.group(stage, sorted((pipeline, partner)), Reason.MATCHED)]
        reported = participants.last_reported(stage, partner)
        if reported is not None and reported >= iteration:
            return [participants.group(stage, [pipeline], Reason.LOCAL_STEP)]
        self._waits_for[stage].setdefault(partner, set()).add(pipeline)
        return []

    def _partner(self, pipeline: int, iteration: int) -> int:
        """Return the pipeline's partner in ``iteration``; the pipeline itself if it goes on alone."""
        there = self._there.setdefault(iteration, sorted(set[int]().union(*self.participants.active)))
        if len(self._there) > _REMEMBERED:
            self._there.popitem(last=False)
        if pipeline not in there:
            return pipeline
        place, size = there.index(pipeline), len(there)
        if self._shifts is None:
            return there[matching(size, self._seed, iteration)[place]]
        partner = shift_one(place, size, iteration // self._shifts)
        return pipeline if partner is None else there[partner]


class AsynchronousADPSGDPolicy(GroupPolicy):
    """A ready worker averages at once with a random neighbour that goes on computing."""

    def __init__(self, num_stages: int, num_pipelines: int, *, seed: int = 0) -> None:
        super().__init__(num_stages, num_pipelines)
        self._seed = seed

    def worker_ready(self, worker: Worker, iteration: int, now: float) -> list[Decision]:
        stage, pipeline = worker.stage, worker.pipeline
        neighbours = sorted(self.participants.active[stage] - {pipeline})
        if not neighbours:
            return [self.participants.group(stage, [pipeline], Reason.LOCAL_STEP)]
        drawn = neighbours[int(uniform(self._seed, stage, pipeline, iteration) * len(neighbours))]
        return [self.participants.group(stage, [pipeline], Reason.MATCHED, passive=[drawn])]
