"""Stages that follow the last one decide as quickly in a run of many pipelines as in one of few."""

from __future__ import annotations

import pytest

from lightning_sdpipe.policies.events import Joined, Ready, Worker
from lightning_sdpipe.policies.following_stages import FollowingStages
from lightning_sdpipe.policies.local_sgd import LocalSGD

PIPELINES = 128


def test_a_meeting_is_not_looked_through_for_each_worker_that_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, comes = [0], FollowingStages._comes

    def counted(self: FollowingStages, pipeline: int, iteration: int) -> bool:
        looks[0] += 1
        return comes(self, pipeline, iteration)

    policy = LocalSGD(every=1).make_policy(2, PIPELINES)
    for stage in (0, 1):
        for pipeline in range(PIPELINES):
            policy.on(Joined(Worker(stage, pipeline)), 0.0)
    for pipeline in range(PIPELINES):
        last = policy.on(Ready(Worker(1, pipeline), 1), 0.0)
    monkeypatch.setattr(FollowingStages, "_comes", counted)
    for pipeline in range(PIPELINES):
        first = policy.on(Ready(Worker(0, pipeline), 1), 0.0)
    members = [[worker.pipeline for worker in group.members] for group in (*last, *first)]  # type: ignore[union-attr]
    assert members == [[*range(PIPELINES)]] * 2
    assert looks[0] < 8 * PIPELINES
