"""Rounds whose outcome all replicas take over, so that they are equal after each, though pipelines come, go and fail.

An exchange that breaks off may have ended for some of its members. Each reports with its next ready how many rounds its
model contains, so the scheduler asks and remembers nothing:

1. *Handed over.* If a worker that is there has a round that others lack, it gives them the outcome, bit for bit, each
   in an ordinary group of two in which it has all of the weight. It may train on meanwhile, or have left. Then they
   report again. If it cannot (a newcomer has the rounds of its donor, but not their outcomes), the next worker is
   asked.
2. *Made again.* If no remaining worker has it, all of them report that they are ready for it, and make it again.

A worker that has the outcome of a round may have to wait for another stage of its pipeline, which lacks it, before it
is ready again. So heartbeats report outcomes, too.
"""

from __future__ import annotations

from lightning_sdpipe.policies.decisions import Decision, Reason
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.group_policy import GroupPolicy


class RoundsOfAll(GroupPolicy):
    """Lets a round of a stage go out when all of its active workers wait and have the same rounds, and it is due."""

    def __init__(self, num_stages: int, num_pipelines: int) -> None:
        super().__init__(num_stages, num_pipelines)
        self.contains: list[dict[int, int]] = [{} for _ in range(num_stages)]
        """Least number of rounds in each worker's model, by stage and pipeline, while its process is there."""

    def round_is_due(self, stage: int, why: Reason) -> list[Decision]:
        """Send out the round of ``stage``, whose active workers all wait and have the same rounds. Stages do not replay
        the last one's decisions: a worker that went on alone would have a different model."""
        return [self.participants.group(stage, list(self.participants.waiting[stage]), why)]

    def newest(self, stage: int) -> int:
        """Return the most rounds that the model of a worker of ``stage`` contains."""
        return max(self.contains[stage].values(), default=0)

    def worker_ready(self, worker: Worker, iteration: int, now: float) -> list[Decision]:
        return self.advance(worker.stage, Reason.EVERYBODY_CAME)

    def worker_contains(self, worker: Worker, rounds: int) -> list[Decision]:
        known = self.contains[worker.stage]
        known[worker.pipeline] = max(rounds, known.get(worker.pipeline, 0))
        return self.advance(worker.stage, Reason.EVERYBODY_CAME)

    def worker_left(self, worker: Worker, now: float) -> list[Decision]:
        return self.advance(worker.stage, Reason.WORKER_LOST)

    def worker_lost(self, worker: Worker, now: float) -> list[Decision]:
        return self.worker_vanished(worker)

    def worker_vanished(self, worker: Worker) -> list[Decision]:
        self.contains[worker.stage].pop(worker.pipeline, None)
        return self.advance(worker.stage, Reason.WORKER_LOST)

    def advance(self, stage: int, why: Reason) -> list[Decision]:
        """Send out what the waiting workers of ``stage`` need."""
        known, newest, waiting = self.contains[stage], self.newest(stage), self.participants.waiting[stage]
        behind = [pipeline for pipeline in waiting if known.get(pipeline, newest) < newest]
        if behind:
            sources = sorted(pipeline for pipeline, rounds in known.items() if rounds == newest)
            # Iterations count the attempts, so each worker asks all sources in turn, even if the scheduler restarts.
            of = {pipeline: sources[waiting[pipeline] % len(sources)] for pipeline in behind}
            return [
                self.participants.group(stage, [pipeline], Reason.HANDED_OVER, weights=[0.0, 1.0], passive=[source])
                for pipeline, source in of.items()
            ]
        return self.round_is_due(stage, why) if self.participants.all_wait(stage) else []
