"""All-reduce as a policy: in every iteration, all active workers of a stage form one group."""

from __future__ import annotations

from lightning_sdpipe.scheduler.policy import Group, Reason, Worker
from lightning_sdpipe.scheduler.roster import Roster


class AllReducePolicy:
    """The synchronous baseline, and the limit T = ∞ of the semi-decentralised policy (SDPipe §3.2)."""

    def __init__(self, num_stages: int, num_pipelines: int) -> None:
        self.roster = Roster(num_stages, num_pipelines)

    def ready(self, worker: Worker, iteration: int, now: float) -> list[Group]:
        """See :class:`~lightning_sdpipe.scheduler.policy.GroupPolicy`, as for all methods here."""
        self.roster.arrive(worker, iteration)
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
