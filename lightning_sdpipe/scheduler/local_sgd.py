"""Policies that mostly let workers go on alone: no synchronisation at all, and local SGD."""

from __future__ import annotations

from lightning_sdpipe.scheduler.policy import Group, Reason, Worker
from lightning_sdpipe.scheduler.roster import Roster


class LocalSGDPolicy:
    """All active workers of a stage average in every iteration that ``every`` divides, and never else.

    ``every`` 1 is all-reduce; None is never: the bound on speed that no synchronisation can beat. Which
    iterations synchronise depends on their number alone, so all stages agree on it.
    """

    def __init__(self, num_stages: int, num_pipelines: int, *, every: int | None) -> None:
        self.roster = Roster(num_stages, num_pipelines)
        self._every = every

    def ready(self, worker: Worker, iteration: int, now: float) -> list[Group]:
        """See :class:`~lightning_sdpipe.scheduler.policy.GroupPolicy`, as for all methods here."""
        self.roster.arrive(worker, iteration)
        if self._every is None or iteration % self._every:
            return [self.roster.answer(worker.stage, [worker.pipeline], Reason.LOCAL_STEP)]
        return self._release(worker.stage, Reason.EVERYBODY_CAME)

    def leave(self, worker: Worker, now: float) -> list[Group]:
        self.roster.leave(worker)
        return self._release(worker.stage, Reason.WORKER_LOST)

    def join(self, worker: Worker, now: float) -> list[Group]:
        self.roster.join(worker)
        return []

    def tick(self, now: float) -> list[Group]:
        return []

    def deadline(self) -> float | None:
        return None

    def _release(self, stage: int, reason: Reason) -> list[Group]:
        if not self.roster.everybody_waits(stage):
            return []
        return [self.roster.answer(stage, list(self.roster.waiting[stage]), reason)]
