"""AD-PSGD as policies: every worker averages with one neighbour at a time.

:class:`ADPSGDPolicy` is the baseline of SDPipe §5: for every iteration a perfect matching of the pipelines is drawn,
the same for all stages, and a worker waits for its partner of that iteration. With an odd number of pipelines one of
them goes on alone. A partner that is not active, or past that iteration, is not waited for. There is no deadlock: to
report iteration k a worker needs only groups of iterations before k, so among all waiting workers those of the lowest
iteration have partners that come.

``staleness`` bounds how old a model may be (``versions.py``). A pair that may not begin its next step is held, with all
other held pairs, until the pipelines behind it are ready, which then average with it: STALENESS. Their partners of that
iteration do not wait for them. Since the pairs are the same for all stages, the last stage can decide for all, and the
others replay (``following_stages.py``): so the bound holds in every stage, and held workers wait for others that
compute.

:class:`AsynchronousADPSGDPolicy` is the algorithm as its authors describe it (AD-PSGD, Lian et al. 2018): a ready
worker averages at once with a random neighbour, whatever that neighbour is doing. The group then has a member that did
not ask for it, listed in ``Group.passive``. Such a neighbour has to average in the background of its computation, and
must never wait for another worker before it answers: then no cycle of neighbours that chose each other can wait for
ever.
"""

from __future__ import annotations

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.policies.decisions import Decision, Reason
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.following_stages import FollowingStages, Part, PlannedGroup
from lightning_sdpipe.policies.group_policy import GroupPolicy
from lightning_sdpipe.policies.pairing import matching, uniform
from lightning_sdpipe.policies.policy import PolicyConfig, check_integer
from lightning_sdpipe.policies.versions import Versions


class ADPSGD(PolicyConfig, frozen=True):
    """AD-PSGD: models are averaged in pairs after every step.

    As in the comparison of SDPipe §5.1, pairs are drawn from ``seed``, afresh for every iteration, and the two wait for
    each other. ``asynchronous`` is the algorithm of Lian et al. 2018: a worker averages at once with a random
    neighbour, which goes on computing.

    ``staleness`` is the number of steps of any pipeline that a model may lack; None for no bound.
    """

    seed: int = 0
    asynchronous: bool = False
    staleness: int | None = None

    def __post_init__(self) -> None:
        check_integer("seed", self.seed, 0, "any")
        check_integer("staleness", self.staleness, 1, "steps, or null for no bound", optional=True)
        if self.asynchronous and self.staleness is not None:
            raise ConfigurationError(
                f"staleness={self.staleness} cannot be kept with asynchronous=True, where no worker waits for "
                "another's step; leave one of the two out"
            )

    def make_policy(self, num_stages: int, num_pipelines: int) -> GroupPolicy:
        if self.asynchronous:
            return AsynchronousADPSGDPolicy(num_stages, num_pipelines, seed=self.seed)
        if self.staleness is not None:
            return BoundedADPSGDPolicy(num_stages, num_pipelines, seed=self.seed, staleness=self.staleness)
        return ADPSGDPolicy(num_stages, num_pipelines, seed=self.seed)


class ADPSGDPolicy(GroupPolicy):
    """Pairs drawn afresh for every iteration; both wait for each other."""

    def __init__(self, num_stages: int, num_pipelines: int, *, seed: int = 0) -> None:
        super().__init__(num_stages, num_pipelines)
        self._seed = seed
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
            return self._goes_out(stage, {pipeline}, Reason.LOCAL_STEP)
        if partner not in participants.active[stage]:
            return self._goes_out(stage, {pipeline}, Reason.WORKER_LOST)
        if participants.waiting[stage].get(partner) == iteration:
            return self._goes_out(stage, {pipeline, partner}, Reason.MATCHED)
        reported = participants.last_reported(stage, partner)
        if reported is not None and reported >= iteration:
            return self._goes_out(stage, {pipeline}, Reason.LOCAL_STEP)
        self._waits_for[stage].setdefault(partner, set()).add(pipeline)
        return []

    def _partner(self, pipeline: int, iteration: int) -> int:
        """Return the pipeline's partner in ``iteration``; the pipeline itself if it goes on alone."""
        return matching(self.participants.num_pipelines, self._seed, iteration)[pipeline]

    def _goes_out(self, stage: int, pipelines: set[int], reason: Reason) -> list[Decision]:
        return [self.participants.group(stage, sorted(pipelines), reason)]


class BoundedADPSGDPolicy(ADPSGDPolicy):
    """Pairs, and larger groups where a model would be too old otherwise."""

    def __init__(self, num_stages: int, num_pipelines: int, *, seed: int = 0, staleness: int) -> None:
        super().__init__(num_stages, num_pipelines, seed=seed)
        self._last = num_stages - 1
        self.versions = [Versions(num_pipelines, staleness) for _ in range(num_stages)]
        self._replays = [FollowingStages(j, self.participants, self.versions[j], self._last) for j in range(self._last)]
        self._held: set[int] = set()
        """Pipelines that wait, on the last stage, for others that are behind them."""

    def widened(self, num_pipelines: int) -> None:
        for versions in self.versions:
            versions.widen(num_pipelines)

    def worker_ready(self, worker: Worker, iteration: int, now: float) -> list[Decision]:
        if worker.stage != self._last:
            return self._replays[worker.stage].turn()
        for replay in self._replays:
            replay.heard_of(worker.pipeline)
        self.versions[self._last].stepped(worker.pipeline)
        decisions = self._release_held()
        if worker.pipeline in self.participants.waiting[self._last]:
            decisions += super().worker_ready(worker, iteration, now)
        return decisions + self._replay()

    def worker_left(self, worker: Worker, now: float) -> list[Decision]:
        return self._goes(worker, now, lost=False)

    def worker_lost(self, worker: Worker, now: float) -> list[Decision]:
        return self._goes(worker, now, lost=True)

    def worker_joined(self, worker: Worker, now: float) -> list[Decision]:
        self.versions[worker.stage].joins(worker.pipeline)
        return []

    def group_broke(self, sequence: int, now: float) -> list[Decision]:
        for versions in self.versions:
            versions.broke(sequence)
        return self._release_held() + self._replay()

    def scheduler_restarted(self, now: float) -> list[Decision]:
        for versions in self.versions:
            versions.doubted()
        for replay in self._replays:
            replay.forget()
        return self._release_held() + self._replay()

    def _goes(self, worker: Worker, now: float, lost: bool) -> list[Decision]:
        stage, pipeline = worker.stage, worker.pipeline
        self.versions[stage].leaves(pipeline, lost)
        if stage == self._last:
            self._held.discard(pipeline)
            return self._release_held() + super().worker_left(worker, now) + self._replay()
        if self._replays[stage].expects(pipeline):
            self.versions[self._last].doubted()
        return self._release_held() + self._replay()

    def _goes_out(self, stage: int, pipelines: set[int], reason: Reason) -> list[Decision]:
        """Let the pipelines average with those that are behind them and ready too, or holds them until all of these
        are ready."""
        versions, waiting = self.versions[stage], self.participants.waiting[stage]
        together = pipelines | self._held if pipelines & self._held else set(pipelines)
        while True:
            behind = {k for pipeline in together for k in versions.behind(pipeline, together)}
            if not behind & waiting.keys():
                break
            together |= behind & waiting.keys()
        if behind:
            self._held |= together
            return []
        if together != pipelines or together & self._held:
            reason = Reason.STALENESS
        self._held -= together
        parts = tuple(Part(p, {p: waiting[p]}, stays=False, steps=True) for p in sorted(together))
        group = self.participants.group(stage, sorted(together), reason)
        versions.met(group.sequence, together)
        for replay in self._replays:
            replay.plan(PlannedGroup(parts, {}, reason))
        decisions: list[Decision] = [group]
        for pipeline in sorted(together):  # their partners of this iteration need not wait for them
            decisions += self._settle_those_who_wait_for(stage, pipeline)
        return decisions

    def _release_held(self) -> list[Decision]:
        """Release the held pipelines if those that they waited for have come."""
        return self._goes_out(self._last, set(self._held), Reason.STALENESS) if self._held else []

    def _replay(self) -> list[Decision]:
        return [group for replay in self._replays for group in replay.turn()]


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
