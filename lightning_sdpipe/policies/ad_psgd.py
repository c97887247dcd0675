"""AD-PSGD as policies: every worker averages with one neighbour at a time.

:class:`ADPSGDPolicy` is the baseline of SDPipe §5: for every iteration a perfect matching of the pipelines is
drawn, the same for all stages, and a worker waits for its partner of that iteration. With an odd number of
pipelines one of them goes on alone. A partner that is not active, or past that iteration, is not waited for.
Nothing deadlocks: to report iteration k a worker needs only groups of iterations before k, so among all that
wait those of the lowest iteration have partners that come.

:class:`AsynchronousADPSGDPolicy` is the algorithm as its authors describe it (AD-PSGD, Lian et al. 2018): a
ready worker averages at once with a random neighbour, whatever that neighbour is doing. The group then has a
member that did not ask for it, named in ``Group.passive``. Such a neighbour has to average in the background
of its computation, and must never wait for another worker before it answers: then no ring of neighbours that
have named each other can wait for ever.
"""

from __future__ import annotations

import functools

from lightning_sdpipe.policies.decisions import Decision, Reason
from lightning_sdpipe.policies.draws import uniform
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.group_policy import GroupPolicy
from lightning_sdpipe.policies.policy import PolicyConfig, check_integer


class ADPSGD(PolicyConfig, frozen=True):
    """AD-PSGD: models are averaged in pairs after every step.

    As SDPipe §5.1 compares with it, pairs are drawn from ``seed``, afresh for every iteration, and the two wait for
    each other. ``asynchronous`` is the algorithm of Lian et al. 2018: a worker averages at once with a random
    neighbour, which goes on computing.
    """

    seed: int = 0
    asynchronous: bool = False

    def __post_init__(self) -> None:
        check_integer("seed", self.seed, 0, "any")

    def make_policy(self, num_stages: int, num_pipelines: int) -> GroupPolicy:
        policy = AsynchronousADPSGDPolicy if self.asynchronous else ADPSGDPolicy
        return policy(num_stages, num_pipelines, seed=self.seed)


class ADPSGDPolicy(GroupPolicy):
    """Pairs drawn afresh for every iteration; both wait for each other."""

    def __init__(self, num_stages: int, num_pipelines: int, *, seed: int = 0) -> None:
        super().__init__(num_stages, num_pipelines)
        self._seed = seed
        self._waits_for: list[dict[int, set[int]]] = [{} for _ in range(num_stages)]

    def worker_ready(self, worker: Worker, iteration: int, now: float) -> list[Decision]:
        decisions = self._settle(worker.stage, worker.pipeline)
        return decisions + self._settle_those_who_wait_for(worker)

    def worker_left(self, worker: Worker, now: float) -> list[Decision]:
        for waiters in self._waits_for[worker.stage].values():
            waiters.discard(worker.pipeline)
        return self._settle_those_who_wait_for(worker)

    def _settle_those_who_wait_for(self, worker: Worker) -> list[Decision]:
        waiters = sorted(self._waits_for[worker.stage].pop(worker.pipeline, ()))
        still = [waiter for waiter in waiters if waiter in self.participants.waiting[worker.stage]]
        return [group for waiter in still for group in self._settle(worker.stage, waiter)]

    def _settle(self, stage: int, pipeline: int) -> list[Decision]:
        """Answer the waiting worker if its partner has come or will not come."""
        participants = self.participants
        iteration = participants.waiting[stage][pipeline]
        partner = matching(participants.num_pipelines, self._seed, iteration)[pipeline]
        if partner == pipeline:
            return [participants.group(stage, [pipeline], Reason.LOCAL_STEP)]
        if partner not in participants.active[stage]:
            return [participants.group(stage, [pipeline], Reason.WORKER_LOST)]
        if participants.waiting[stage].get(partner) == iteration:
            return [participants.group(stage, [pipeline, partner], Reason.MATCHED)]
        reported = participants.last_reported(stage, partner)
        if reported is not None and reported >= iteration:
            return [participants.group(stage, [pipeline], Reason.LOCAL_STEP)]
        self._waits_for[stage].setdefault(partner, set()).add(pipeline)
        return []


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


@functools.lru_cache(maxsize=256)
def matching(num_pipelines: int, seed: int, iteration: int) -> tuple[int, ...]:
    """The partner of every pipeline in ``iteration``; one is its own partner where the number is odd."""
    order = sorted(range(num_pipelines), key=lambda pipeline: uniform(seed, iteration, pipeline))
    partners = list(range(num_pipelines))
    for a, b in zip(order[::2], order[1::2], strict=False):
        partners[a], partners[b] = b, a
    return tuple(partners)
