"""Rounds of an outer optimizer (DiLoCo) of all pipelines that are there.

Each worker trains from a *base*, the result of a round, and brings what its model has moved by. All bases of a stage
are in one line: :mod:`~lightning_sdpipe.policies.rounds_of_all` has the rules. A member that is handed a base gets it
whole, so it may have missed any number of rounds.

A round is due when all together have made ``every`` updates for each pipeline that was planned. They say that they are
ready as soon as they could be in it, and train on: fast ones make more updates than slow ones, and none waits.

With several stages a round begins when all workers of all stages are ready, and one group goes out for each stage, of
the same pipelines; so no stage waits for another one's round. If it breaks off on a stage, it is made again there, by
those of its members that are left: others, which train on, get it handed over. If none is left there, its outcome is
lost on that stage, and the next round of all is one more for each stage.
"""

from __future__ import annotations

from lightning_sdpipe.errors import check_integer
from lightning_sdpipe.policies.decisions import Decision, Reason
from lightning_sdpipe.policies.events import Progress, Worker
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
        """Updates of all pipelines in a round."""
        self._made = 0
        """Updates since the last round."""
        self._last: list[tuple[set[int] | None, int]] = [(set(), -1) for _ in range(num_stages)]
        """Members of the last round, by stage, and number of rounds that they had; None if it is not known."""

    def worker_contains(self, worker: Worker, rounds: int) -> list[Decision]:
        found = super().worker_contains(worker, rounds)
        for stage, (members, _) in enumerate(self._last):
            if members is None and stage != worker.stage:  # what it has says that they lack the last round
                found += self.advance(stage, Reason.EVERYBODY_CAME)
        return found

    def worker_vanished(self, worker: Worker) -> list[Decision]:
        (self._last[worker.stage][0] or set()).discard(worker.pipeline)
        return super().worker_vanished(worker)

    def worker_progressed(self, progress: Progress, now: float) -> list[Decision]:
        if progress.worker.stage == 0:  # all stages make the same
            self._made += progress.steps
        return [] if self._made < self._due else self.advance(0, Reason.EVERYBODY_CAME)

    def scheduler_restarted(self, now: float) -> list[Decision]:
        self._made = self._due  # a round that has broken off may be waited for
        self._last = [(None, -1) for _ in self._last]
        return []

    def round_is_due(self, stage: int, why: Reason) -> list[Decision]:
        workers = self.participants
        stages = range(workers.num_stages)
        if again := self._lacks(stage):
            return [self._round(stage, again, Reason.MADE_AGAIN)]
        if (
            self._made < self._due
            or any(workers.waiting[other].keys() != workers.active[stage] for other in stages)
            or any(workers.active[other] != workers.active[stage] for other in stages)
            or any(map(self._lacks, stages))
        ):
            return []
        self._made = 0
        return [self._round(each, list(workers.waiting[each]), why) for each in stages]

    def _round(self, stage: int, members: list[int], why: Reason) -> Decision:
        self._last[stage] = set(members), self.newest(stage)
        return self.participants.group(stage, members, why)

    def _lacks(self, stage: int) -> list[int]:
        """Return those that wait for the last round of ``stage`` to be made again. Others may wait for the next one,
        and train on meanwhile: without stage 0 they would never begin it."""
        waiting, newest, (members, before) = self.participants.waiting[stage], self.newest(stage), self._last[stage]
        if members is None:
            stages = range(self.participants.num_stages)
            return list(waiting) if any(self.newest(other) == newest + 1 for other in stages) else []
        known = self.contains[stage]
        return [pipeline for pipeline in waiting if pipeline in members and known.get(pipeline) == newest == before]
