"""Rounds of an outer optimizer (DiLoCo) of all pipelines that are there.

Each worker trains from a *base*, the result of a round, and brings what its model has moved by. All bases of a stage
are in one line: :mod:`~lightning_sdpipe.policies.rounds_of_all` has the rules. A member that is handed a base gets it
whole, so it may have missed any number of rounds.

A round is due when all together have made ``every`` updates for each pipeline that was planned. They say that they are
ready as soon as they could be in it, and train on: fast ones make more updates than slow ones, and none waits.

With several stages a round begins when all workers of all stages are ready, and one group goes out for each stage, of
the same pipelines; so no stage waits for another one's round. If it breaks off on a stage, it is made again there.
"""

from __future__ import annotations

from lightning_sdpipe.policies.decisions import Decision, Reason
from lightning_sdpipe.policies.events import Progress, Worker
from lightning_sdpipe.policies.policy import PolicyConfig, check_integer
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
        """Updates of all pipelines in a round."""
        self._made = 0
        """Updates since the last round."""
        self._begun = 0
        """Number of rounds that have begun, as far as is known."""

    def worker_contains(self, worker: Worker, rounds: int) -> list[Decision]:
        rises, self._begun = rounds > self._begun, max(self._begun, rounds)
        groups = super().worker_contains(worker, rounds)
        for stage in range(self.participants.num_stages) if rises else ():  # one that lacks that round can make it
            groups += self.advance(stage, Reason.EVERYBODY_CAME)
        return groups

    def worker_progressed(self, progress: Progress, now: float) -> list[Decision]:
        if progress.worker.stage == 0:  # all stages make the same
            self._made += progress.steps
        return self.advance(0, Reason.EVERYBODY_CAME)

    def scheduler_restarted(self, now: float) -> list[Decision]:
        self._made = self._due  # a round that has broken off may be waited for
        return []

    def round_is_due(self, stage: int, why: Reason) -> list[Decision]:
        workers = self.participants
        stages = range(workers.num_stages)
        if self.newest(stage) < self._begun:
            stages = range(stage, stage + 1)
        elif (
            self._made < self._due
            or any(self.newest(other) < self._begun for other in stages)
            or any(workers.waiting[other].keys() != workers.active[stage] for other in stages)
            or any(workers.active[other] != workers.active[stage] for other in stages)
        ):
            return []
        else:
            self._begun, self._made = self._begun + 1, 0
        return [workers.group(each, list(workers.waiting[each]), why) for each in stages]
