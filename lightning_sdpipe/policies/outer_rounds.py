"""Rounds of an outer optimizer (DiLoCo) among all present pipelines.

Each worker trains from a *base*, the result of a round, and contributes how far its model has moved from it. The bases
of a stage form one sequence; :mod:`~lightning_sdpipe.policies.rounds_of_all` has the rules. A base is handed over
whole, so a member may have missed any number of rounds.

A round is due when all pipelines together have made ``every`` updates per planned pipeline. Each reports ready as soon
as it could take part, and trains on: fast ones make more updates than slow ones, and none waits.

With several stages, a round begins when all workers of all stages are ready, and one group of the same pipelines goes
out for each stage, so no stage waits for another one's round. If it breaks off on a stage, its remaining members make
it again there; it is handed over to the others, which train on. If no member remains, its outcome is lost on that
stage, and the next round of all is a further one on each stage.
"""

from __future__ import annotations

from lightning_sdpipe.errors import check_integer
from lightning_sdpipe.policies.decisions import Decision, Reason
from lightning_sdpipe.policies.events import Progress
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.policies.rounds_of_all import RoundsOfAll


class OuterRounds(PolicyConfig, frozen=True):
    """Rounds of an outer optimizer: when all pipelines together have made ``every`` updates for each that was planned;
    or, if it is None, whenever all that take part are ready."""

    registered = "outer_rounds"
    in_step = True

    every: int | None = 500

    def __post_init__(self) -> None:
        check_integer("every", self.every, 1, "updates", optional=True)

    @property
    def rounds_are_apart(self) -> bool:
        return True

    def make_policy(self, num_stages: int, num_pipelines: int) -> OuterRoundsPolicy:
        return OuterRoundsPolicy(num_stages, num_pipelines, self.every)


class OuterRoundsPolicy(RoundsOfAll):
    """See the module's docstring."""

    def __init__(self, num_stages: int, num_pipelines: int, every: int | None = None) -> None:
        super().__init__(num_stages, num_pipelines)
        self._due = num_pipelines * (every or 0)
        """Updates of all pipelines together that make a round due."""
        self._made = 0
        """Updates since the last round."""

    def worker_progressed(self, progress: Progress, now: float) -> list[Decision]:
        if progress.worker.stage == 0:  # all stages make the same
            self._made += progress.steps
        return [] if self._made < self._due else self.advance(0, Reason.EVERYBODY_CAME)

    def scheduler_restarted(self, now: float) -> list[Decision]:
        self._made = self._due  # how many updates were made is not known
        return []

    def round_is_due(self, stage: int, why: Reason) -> list[Decision]:
        workers = self.participants
        waiting, stages = workers.waiting[stage], range(workers.num_stages)
        # The others train on, and begin a round only with their stage 0: never this one.
        if again := [pipeline for pipeline in waiting if workers.again[stage][pipeline]]:
            return [workers.group(stage, again, Reason.MADE_AGAIN)]
        if (
            self._made < self._due
            or any(workers.waiting[other].keys() != workers.active[stage] for other in stages)
            or any(workers.active[other] != workers.active[stage] for other in stages)
        ):
            return []
        self._made = 0
        return [workers.group(each, list(workers.waiting[each]), why) for each in stages]
