"""Decisions about whole pipelines, where the stages of one pipeline are not replicas of another's.

Pipelines with different depths or cuts share no stage whose workers could form a group. So a policy made for one stage
decides about whole pipelines as its nodes: ``Worker(0, i)`` stands for all workers of pipeline i. A node takes part
when all of its workers have joined, is ready when the last of them is (as in P-Reduce), and is gone when one of them
is. Its group answers all of them.

When a group goes out, its workers wait for no other group, so exchanges in the order of groups cannot deadlock. With
one stage the token is always free: the policy never lets workers go on because another stage waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from lightning_sdpipe.policies import events
from lightning_sdpipe.policies.decisions import Decision
from lightning_sdpipe.policies.participants import Participants
from lightning_sdpipe.policies.policy import Policy, RefusedEvent


class PerPipeline:
    """Passes events of pipelines with ``depths`` stages to ``policy``, which decides for one stage."""

    def __init__(self, policy: Policy, depths: Sequence[int]) -> None:
        self._policy = policy
        self._depths = tuple(depths)
        self.participants = Participants(max(depths), len(depths))
        """All workers, by stage."""
        self._joined: set[int] = set()
        """Pipelines that the policy counts on."""

    def on(self, event: events.Event, now: float) -> list[Decision]:
        workers = self.participants
        match event:
            case events.Ready(worker, iteration):
                workers.check_waits(worker, iteration)
                waits = self._beside(worker, iteration)
                pipeline = worker.pipeline
                complete = waits == self._depths[pipeline] - 1 and pipeline in self._joined
                decisions = self._policy.on(_of_pipeline(event), now) if complete else []
                workers.waits(worker, iteration)
                return self._answered(decisions)
            case events.Joined(worker):
                self._check_exists(worker)
                workers.check_joins(worker)
                decisions = []
                if self._active(worker.pipeline) == self._depths[worker.pipeline] - 1:
                    decisions = self._policy.on(_of_pipeline(event), now)
                    self._joined.add(worker.pipeline)
                workers.joins(worker)
                return self._answered(decisions)
            case events.Left(worker) | events.Lost(worker):
                workers.check_takes_part(worker, "left")
                decisions = []
                if worker.pipeline in self._joined:
                    decisions = self._policy.on(_of_pipeline(event), now)
                    self._joined.discard(worker.pipeline)
                workers.leaves(worker)
                return self._answered(decisions)
            case events.Progress(worker):
                workers.check_takes_part(worker, "went on")
                last = worker.stage == self._depths[worker.pipeline] - 1
                if not (last and worker.pipeline in self._joined):
                    return []
                return self._answered(self._policy.on(_of_pipeline(event), now))
            case events.Contains():
                return []  # the last of the pipeline's workers says so when it is ready
            case events.Vanished():
                return self._answered(self._policy.on(_of_pipeline(event), now))
            case events.Widened():
                raise RefusedEvent(f"there are {len(self._depths)} pipelines, each with a number of stages of its own")
        return self._answered(self._policy.on(event, now))

    def deadline(self) -> float | None:
        return self._policy.deadline()

    def sync_graph(self, stage: int) -> Any:
        """Return the graph of pipelines' meetings, the same for every stage; None if the policy keeps none."""
        return self._policy.sync_graph(0) if hasattr(self._policy, "sync_graph") else None

    def _answered(self, decisions: list[Decision]) -> list[Decision]:
        """Mark the workers of answered pipelines as no longer waiting."""
        for group in decisions:
            for member in group.members:
                if not group.passive or member not in group.passive:
                    for stage in range(self._depths[member.pipeline]):
                        self.participants.answer(events.Worker(stage, member.pipeline))
        return decisions

    def _active(self, pipeline: int) -> int:
        """Return how many workers of ``pipeline`` have joined."""
        return sum(pipeline in active for active in self.participants.active)

    def _beside(self, worker: events.Worker, iteration: int) -> int:
        """Return how many other workers of its pipeline wait.

        Raises:
            RefusedEvent: one of them waits with a different iteration.
        """
        found = 0
        for stage, waiting in enumerate(self.participants.waiting):
            other = waiting.get(worker.pipeline)
            if other is not None and other != iteration:
                raise RefusedEvent(
                    f"worker {worker} reported iteration {iteration}, and stage {stage} of its pipeline waits with "
                    f"iteration {other}"
                )
            found += other is not None
        return found

    def _check_exists(self, worker: events.Worker) -> None:
        pipelines = len(self._depths)
        if not (0 <= worker.pipeline < pipelines and 0 <= worker.stage < self._depths[worker.pipeline]):
            raise RefusedEvent(
                f"worker {worker} does not exist in {pipelines} pipelines of {', '.join(map(str, self._depths))} stages"
            )


def _of(worker: events.Worker) -> events.Worker:
    return events.Worker(0, worker.pipeline)


def _of_pipeline(event: Any) -> Any:
    """Return the same event for the node that stands for the pipeline."""
    return msgspec.structs.replace(event, worker=_of(event.worker))
