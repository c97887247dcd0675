"""Policies that mostly let workers go on alone: local SGD, and no synchronisation at all."""

from __future__ import annotations

from lightning_sdpipe.policies.decisions import Decision, Reason
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.group_policy import GroupPolicy
from lightning_sdpipe.policies.policy import PolicyConfig, check_integer


class LocalSGD(PolicyConfig, frozen=True):
    """Models are averaged with everybody in each update that ``every`` divides, and nobody waits in the others."""

    every: int

    def __post_init__(self) -> None:
        check_integer("every", self.every, 1, "updates")

    def make_policy(self, num_stages: int, num_pipelines: int) -> LocalSGDPolicy:
        return LocalSGDPolicy(num_stages, num_pipelines, every=self.every)


class NoSync(PolicyConfig, frozen=True):
    """Pipelines train alone until the next pause: the bound on throughput that no method can beat."""

    def make_policy(self, num_stages: int, num_pipelines: int) -> LocalSGDPolicy:
        return LocalSGDPolicy(num_stages, num_pipelines, every=None)


class LocalSGDPolicy(GroupPolicy):
    """All active workers of a stage average in every iteration that ``every`` divides, and never else.

    ``every`` 1 is all-reduce; None is never. Which iterations synchronise depends on their number alone, so all stages
    agree on it.
    """

    def __init__(self, num_stages: int, num_pipelines: int, *, every: int | None) -> None:
        super().__init__(num_stages, num_pipelines)
        self._every = every

    def worker_ready(self, worker: Worker, iteration: int, now: float) -> list[Decision]:
        if self._every is None or iteration % self._every:
            return [self.participants.group(worker.stage, [worker.pipeline], Reason.LOCAL_STEP)]
        return self._release(worker.stage, Reason.EVERYBODY_CAME)

    def worker_left(self, worker: Worker, now: float) -> list[Decision]:
        return self._release(worker.stage, Reason.WORKER_LOST)

    def _release(self, stage: int, reason: Reason) -> list[Decision]:
        if not self.participants.everybody_waits(stage):
            return []
        return [self.participants.group(stage, list(self.participants.waiting[stage]), reason)]
