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
import random

from lightning_sdpipe.scheduler.policy import Group, Reason, Worker
from lightning_sdpipe.scheduler.roster import Roster


class ADPSGDPolicy:
    """Pairs drawn afresh for every iteration; both wait for each other."""

    def __init__(self, num_stages: int, num_pipelines: int, *, seed: int = 0) -> None:
        self.roster = Roster(num_stages, num_pipelines)
        self._seed = seed
        self._waits_for: list[dict[int, set[int]]] = [{} for _ in range(num_stages)]

    def ready(self, worker: Worker, iteration: int, now: float) -> list[Group]:
        """See :class:`~lightning_sdpipe.scheduler.policy.GroupPolicy`, as for all methods here."""
        self.roster.arrive(worker, iteration)
        groups = self._settle(worker.stage, worker.pipeline)
        return groups + self._settle_those_who_wait_for(worker)

    def leave(self, worker: Worker, now: float) -> list[Group]:
        self.roster.leave(worker)
        for waiters in self._waits_for[worker.stage].values():
            waiters.discard(worker.pipeline)
        return self._settle_those_who_wait_for(worker)

    def join(self, worker: Worker, now: float) -> list[Group]:
        self.roster.join(worker)
        return []

    def tick(self, now: float) -> list[Group]:
        return []

    def deadline(self) -> float | None:
        return None

    def _settle_those_who_wait_for(self, worker: Worker) -> list[Group]:
        waiters = sorted(self._waits_for[worker.stage].pop(worker.pipeline, ()))
        still = [waiter for waiter in waiters if waiter in self.roster.waiting[worker.stage]]
        return [group for waiter in still for group in self._settle(worker.stage, waiter)]

    def _settle(self, stage: int, pipeline: int) -> list[Group]:
        """Answer the waiting worker if its partner has come or will not come."""
        iteration = self.roster.waiting[stage][pipeline]
        partner = matching(self.roster.num_pipelines, self._seed, iteration)[pipeline]
        if partner == pipeline:
            return [self.roster.answer(stage, [pipeline], Reason.LOCAL_STEP)]
        if partner not in self.roster.active[stage]:
            return [self.roster.answer(stage, [pipeline], Reason.WORKER_LOST)]
        if self.roster.waiting[stage].get(partner) == iteration:
            return [self.roster.answer(stage, [pipeline, partner], Reason.MATCHED)]
        reported = self.roster.last_reported(stage, partner)
        if reported is not None and reported >= iteration:
            return [self.roster.answer(stage, [pipeline], Reason.LOCAL_STEP)]
        self._waits_for[stage].setdefault(partner, set()).add(pipeline)
        return []


class AsynchronousADPSGDPolicy:
    """A ready worker averages at once with a random neighbour that goes on computing."""

    def __init__(self, num_stages: int, num_pipelines: int, *, rng: random.Random) -> None:
        self.roster = Roster(num_stages, num_pipelines)
        self._rng = rng

    def ready(self, worker: Worker, iteration: int, now: float) -> list[Group]:
        """See :class:`~lightning_sdpipe.scheduler.policy.GroupPolicy`, as for all methods here."""
        self.roster.arrive(worker, iteration)
        neighbours = sorted(self.roster.active[worker.stage] - {worker.pipeline})
        if not neighbours:
            return [self.roster.answer(worker.stage, [worker.pipeline], Reason.LOCAL_STEP)]
        neighbour = self._rng.choice(neighbours)
        return [self.roster.answer(worker.stage, [worker.pipeline], Reason.MATCHED, passive=[neighbour])]

    def leave(self, worker: Worker, now: float) -> list[Group]:
        self.roster.leave(worker)
        return []

    def join(self, worker: Worker, now: float) -> list[Group]:
        self.roster.join(worker)
        return []

    def tick(self, now: float) -> list[Group]:
        return []

    def deadline(self) -> float | None:
        return None


@functools.lru_cache(maxsize=256)
def matching(num_pipelines: int, seed: int, iteration: int) -> tuple[int, ...]:
    """The partner of every pipeline in ``iteration``; one is its own partner where the number is odd."""
    order = list(range(num_pipelines))
    random.Random(f"{seed}/{iteration}").shuffle(order)
    partners = list(range(num_pipelines))
    for a, b in zip(order[::2], order[1::2], strict=False):
        partners[a], partners[b] = b, a
    return tuple(partners)
