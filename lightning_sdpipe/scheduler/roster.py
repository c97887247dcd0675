"""Who takes part and who waits for an answer: the bookkeeping and the refusals common to all policies."""

from __future__ import annotations

import msgspec

from lightning_sdpipe.scheduler.policy import Group, Reason, RefusedEvent, Worker


class Roster:
    """The active and the waiting workers of every stage, each by pipeline number.

    ``active[j]`` and ``waiting[j]`` are for reading; ``waiting[j]`` maps a pipeline to the iteration it
    reported and keeps the order of arrival. Every method checks everything before it changes anything.
    """

    def __init__(self, num_stages: int, num_pipelines: int) -> None:
        self.num_stages = num_stages
        self.num_pipelines = num_pipelines
        self.active: list[set[int]] = [set() for _ in range(num_stages)]
        self.waiting: list[dict[int, int]] = [{} for _ in range(num_stages)]
        self._answered: list[dict[int, int]] = [{} for _ in range(num_stages)]
        self._workers = [[Worker(j, i) for i in range(num_pipelines)] for j in range(num_stages)]
        self._next_sequence = 0

    def check_join(self, worker: Worker) -> None:
        """Raise :class:`RefusedEvent` when ``worker`` may not join now."""
        self._check_exists(worker)
        if worker.pipeline in self.active[worker.stage]:
            raise RefusedEvent(f"worker {worker} joined twice; it must leave before it joins again")

    def join(self, worker: Worker) -> None:
        """``worker`` takes part from now on; its iterations may start anywhere."""
        self.check_join(worker)
        self.active[worker.stage].add(worker.pipeline)
        self._answered[worker.stage].pop(worker.pipeline, None)

    def check_leave(self, worker: Worker) -> None:
        """Raise :class:`RefusedEvent` when ``worker`` may not leave now."""
        self._check_exists(worker)
        if worker.pipeline not in self.active[worker.stage]:
            raise RefusedEvent(f"worker {worker} left without having joined")

    def leave(self, worker: Worker) -> bool:
        """``worker`` no longer takes part; True when it was waiting for an answer, which it will not get."""
        self.check_leave(worker)
        self.active[worker.stage].remove(worker.pipeline)
        return self.waiting[worker.stage].pop(worker.pipeline, None) is not None

    def check_ready(self, worker: Worker, iteration: int) -> None:
        """Raise :class:`RefusedEvent` when ``worker`` may not report ``iteration`` now."""
        stage, pipeline = worker.stage, worker.pipeline
        if not (0 <= stage < self.num_stages and pipeline in self.active[stage]):
            self._check_exists(worker)
            raise RefusedEvent(f"worker {worker} reported iteration {iteration} without having joined")
        if pipeline in self.waiting[stage]:
            raise RefusedEvent(
                f"worker {worker} reported iteration {iteration} while its iteration "
                f"{self.waiting[stage][pipeline]} waits for an answer"
            )
        answered = self._answered[stage].get(pipeline)
        if iteration < 0 or (answered is not None and iteration <= answered):
            raise RefusedEvent(f"worker {worker} reported iteration {iteration} after {answered}")

    def arrive(self, worker: Worker, iteration: int) -> None:
        """``worker`` waits for an answer."""
        self.check_ready(worker, iteration)
        self.waiting[worker.stage][worker.pipeline] = iteration

    def last_reported(self, stage: int, pipeline: int) -> int | None:
        """The last iteration the worker reported since it joined, answered or not."""
        waiting = self.waiting[stage].get(pipeline)
        return self._answered[stage].get(pipeline) if waiting is None else waiting

    def everybody_waits(self, stage: int) -> bool:
        """True when every active worker of ``stage`` waits (and at least one does)."""
        return len(self.waiting[stage]) == len(self.active[stage]) > 0

    def answer(self, stage: int, pipelines: list[int], reason: Reason, passive: list[int] | None = None) -> Group:
        """Make a group of equal weights from waiting workers, which then wait no longer, and ``passive``."""
        waiting, answered, workers = self.waiting[stage], self._answered[stage], self._workers[stage]
        for pipeline in pipelines:
            answered[pipeline] = waiting.pop(pipeline)
        together = sorted(pipelines if passive is None else [*pipelines, *passive])
        members = tuple([workers[pipeline] for pipeline in together])
        size = len(members)
        group = Group(members, (1.0 / size,) * size, self._next_sequence, reason)
        if passive is not None:
            bystanders = tuple(workers[pipeline] for pipeline in passive)
            group = msgspec.structs.replace(group, passive=bystanders)
        self._next_sequence += 1
        return group

    def _check_exists(self, worker: Worker) -> None:
        if not (0 <= worker.stage < self.num_stages and 0 <= worker.pipeline < self.num_pipelines):
            raise RefusedEvent(
                f"worker {worker} does not exist in {self.num_stages} stages × {self.num_pipelines} pipelines"
            )
