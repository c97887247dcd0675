"""The workers that take part and those that wait for a group: bookkeeping and refusals common to all policies."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_sdpipe.errors import shape
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.policy import RefusedEvent


class Participants:
    """The active and the waiting workers of every stage, each by pipeline number.

    ``active[j]`` and ``waiting[j]`` are for reading; ``waiting[j]`` maps a pipeline to the iteration it reported and
    keeps the order of arrival. Every method checks everything before it changes anything.
    """

    def __init__(self, num_stages: int, num_pipelines: int) -> None:
        self.num_stages = num_stages
        self.num_pipelines = num_pipelines
        self.active: list[set[int]] = [set() for _ in range(num_stages)]
        self.waiting: list[dict[int, int]] = [{} for _ in range(num_stages)]
        self.again: list[dict[int, bool]] = [{} for _ in range(num_stages)]
        """Whether the last ready of each worker said that its last round has broken off, by stage and pipeline."""
        self.next_sequence = 0
        """Number of the next group."""
        self._answered: list[dict[int, int]] = [{} for _ in range(num_stages)]
        self._workers = [[Worker(j, i) for i in range(num_pipelines)] for j in range(num_stages)]

    def widen(self, num_pipelines: int) -> None:
        """Allow ``num_pipelines`` pipelines from now on."""
        self.num_pipelines = max(self.num_pipelines, num_pipelines)
        self._workers = [[Worker(j, i) for i in range(self.num_pipelines)] for j in range(self.num_stages)]

    def check_joins(self, worker: Worker) -> None:
        """Raise :class:`RefusedEvent` when ``worker`` may not join now."""
        self.check_exists(worker)
        if worker.pipeline in self.active[worker.stage]:
            raise RefusedEvent(f"worker {worker} joined twice; it must leave before it joins again")

    def joins(self, worker: Worker, answered: int | None = None) -> None:
        """Let ``worker`` take part from now on; its iterations may start anywhere, or after ``answered``."""
        self.check_joins(worker)
        self.active[worker.stage].add(worker.pipeline)
        self._answered[worker.stage].pop(worker.pipeline, None)
        if answered is not None:
            self._answered[worker.stage][worker.pipeline] = answered

    def check_takes_part(self, worker: Worker, what: str) -> None:
        """Raise :class:`RefusedEvent` if ``worker`` did ``what`` without taking part."""
        if not (0 <= worker.stage < self.num_stages and worker.pipeline in self.active[worker.stage]):
            self.check_exists(worker)
            raise RefusedEvent(f"worker {worker} {what} without having joined")

    def leaves(self, worker: Worker) -> None:
        """Remove ``worker``, which no longer takes part; if it waits, it will not be answered."""
        self.check_takes_part(worker, "left")
        self.active[worker.stage].remove(worker.pipeline)
        self.waiting[worker.stage].pop(worker.pipeline, None)

    def check_waits(self, worker: Worker, iteration: int) -> None:
        """Raise :class:`RefusedEvent` when ``worker`` may not report ``iteration`` now."""
        stage, pipeline = worker.stage, worker.pipeline
        if not (0 <= stage < self.num_stages and pipeline in self.active[stage]):
            self.check_takes_part(worker, f"reported iteration {iteration}")
        if pipeline in self.waiting[stage]:
            raise RefusedEvent(
                f"worker {worker} reported iteration {iteration} while its iteration "
                f"{self.waiting[stage][pipeline]} waits for an answer"
            )
        answered = self._answered[stage].get(pipeline)
        if iteration < 0 or (answered is not None and iteration <= answered):
            raise RefusedEvent(f"worker {worker} reported iteration {iteration} after {answered}")

    def waits(self, worker: Worker, iteration: int) -> None:
        """Note that ``worker`` waits for the answer to ``iteration``."""
        self.check_waits(worker, iteration)
        self.waiting[worker.stage][worker.pipeline] = iteration

    def answer(self, worker: Worker) -> None:
        """Note that ``worker`` waits no longer: a group has answered its report."""
        self._answered[worker.stage][worker.pipeline] = self.waiting[worker.stage].pop(worker.pipeline)

    def last_reported(self, stage: int, pipeline: int) -> int | None:
        """Return the last iteration that the worker reported since it joined, answered or not."""
        waiting = self.waiting[stage].get(pipeline)
        return self._answered[stage].get(pipeline) if waiting is None else waiting

    def ready_with(self, pipeline: int) -> int | None:
        """Return the iteration with which ``pipeline`` is ready: the lowest that one of its stages waits with, if all
        that take part have reported as much; else None."""
        reported = [waiting[pipeline] for waiting in self.waiting if pipeline in waiting]
        if not reported:
            return None
        iteration = min(reported)
        for stage, active in enumerate(self.active):
            if pipeline in active:
                last = self.last_reported(stage, pipeline)
                if last is None or last < iteration:
                    return None
        return iteration

    def last_answered(self, stage: int, pipeline: int) -> int | None:
        """Return the last iteration of the worker that was answered since it joined."""
        return self._answered[stage].get(pipeline)

    def all_wait(self, stage: int) -> bool:
        """Return whether every active worker of ``stage`` waits (and there is at least one)."""
        return len(self.waiting[stage]) == len(self.active[stage]) > 0

    def group(
        self,
        stage: int,
        pipelines: Sequence[int],
        reason: str,
        *,
        weights: Sequence[float] | None = None,
        passive: Sequence[int] = (),
        standing: Sequence[int] = (),
    ) -> Group:
        """Make a group of the waiting ``pipelines``, which then wait no longer, and of ``passive`` ones, of which the
        ``standing`` go on waiting.

        ``weights`` belong to ``pipelines`` and then ``passive``, in this order; they are equal by default.
        """
        waiting, answered, worker_of = self.waiting[stage], self._answered[stage], self._workers[stage].__getitem__
        for pipeline in pipelines:
            answered[pipeline] = waiting.pop(pipeline)
        sequence = self.next_sequence
        self.next_sequence = sequence + 1
        together = [*pipelines, *passive]
        if weights is None:
            shares = (1.0 / len(together),) * len(together)
        else:
            shares = tuple([share for _, share in sorted(zip(together, weights, strict=True))])
        together.sort()
        return Group(
            tuple(map(worker_of, together)),
            shares,
            sequence,
            reason,
            tuple(map(worker_of, passive)),
            standing=tuple(map(worker_of, standing)),
        )

    def check_exists(self, worker: Worker) -> None:
        """Raise :class:`RefusedEvent` when there is no such ``worker``."""
        if not (0 <= worker.stage < self.num_stages and 0 <= worker.pipeline < self.num_pipelines):
            raise RefusedEvent(f"worker {worker} does not exist in {shape(self.num_stages, self.num_pipelines)}")
