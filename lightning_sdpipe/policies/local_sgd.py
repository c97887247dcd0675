"""Policies that mostly let workers go on alone: local SGD, and no synchronisation at all."""

from __future__ import annotations

from lightning_sdpipe.errors import check_integer
from lightning_sdpipe.policies.capabilities import BASES, BESIDE, DEALT, FREELY, FULL, HOSTS, LIKE, Capabilities
from lightning_sdpipe.policies.decisions import Decision, Reason
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.following_stages import FollowingStages, GroupPart, PlannedGroup
from lightning_sdpipe.policies.group_policy import GroupPolicy
from lightning_sdpipe.policies.policy import PolicyConfig


class LocalSGD(PolicyConfig, frozen=True):
    """Local SGD: models of all pipelines are averaged in each update that ``every`` divides; in others no pipeline
    waits."""

    registered = "local_sgd"
    forms = ({"every": 1}, {"every": 8})
    half = "lightning_sdpipe.sync.methods:among_all"
    in_step = True

    every: int

    def __post_init__(self) -> None:
        check_integer("every", self.every, 1, "updates")

    @property
    def capabilities(self) -> Capabilities:
        overlaps = FREELY if self.every == 1 else BESIDE
        return Capabilities(BASES, overlaps, HOSTS, unlike=LIKE, elastic={"payloads": FULL})

    def make_policy(self, num_stages: int, num_pipelines: int) -> LocalSGDPolicy:
        return LocalSGDPolicy(num_stages, num_pipelines, every=self.every)


class NoSync(PolicyConfig, frozen=True):
    """No synchronisation: pipelines train alone until the next sync point; the bound on throughput that no method can
    beat."""

    registered = "no_sync"
    in_step = True
    capabilities = Capabilities(data=DEALT, unlike={}, elastic={})
    half = "lightning_sdpipe.sync.methods:alone"

    def make_policy(self, num_stages: int, num_pipelines: int) -> LocalSGDPolicy:
        return LocalSGDPolicy(num_stages, num_pipelines, every=None)


class LocalSGDPolicy(GroupPolicy):
    """All active workers of a stage average in every iteration that ``every`` divides, and in no other.

    ``every`` 1 is all-reduce; None is never. Groups are decided on the last stage, and the others replay them
    (``following_stages.py``). Otherwise, if the stages of a pipeline joined at different moments while others average,
    one stage might wait for it and another might not, and pipelines could deadlock.
    """

    def __init__(self, num_stages: int, num_pipelines: int, *, every: int | None) -> None:
        super().__init__(num_stages, num_pipelines)
        self._every = every
        self._last = num_stages - 1
        self._replays = [FollowingStages(j, self.participants, None, self._last) for j in range(self._last)]

    def worker_ready(self, worker: Worker, iteration: int, now: float) -> list[Decision]:
        if self._every is None or iteration % self._every:
            return [self.participants.group(worker.stage, [worker.pipeline], Reason.LOCAL_STEP)]
        if worker.stage == self._last:
            for replay in self._replays:
                replay.heard_of(worker.pipeline)
        return self._release(Reason.EVERYBODY_CAME)

    def worker_left(self, worker: Worker, now: float) -> list[Decision]:
        return self._release(Reason.WORKER_LOST)

    def scheduler_restarted(self, now: float) -> list[Decision]:
        for replay in self._replays:
            replay.forget()
        return self._release(Reason.EVERYBODY_CAME)

    def _release(self, reason: Reason) -> list[Decision]:
        decisions: list[Decision] = []
        if self.participants.all_wait(self._last):
            waiting = dict(self.participants.waiting[self._last])
            parts = tuple(GroupPart(p, {p: iteration}, stays=False, steps=True) for p, iteration in waiting.items())
            for replay in self._replays:
                replay.plan(PlannedGroup(parts, {}, reason))
            decisions.append(self.participants.group(self._last, list(waiting), reason))
        return decisions + [group for replay in self._replays for group in replay.turn()]
