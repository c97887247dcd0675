"""Hooks on gradients: called with what they see in one process, or refused."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError
from tests.pipeline.harness import TRAIN
from tests.pipeline.test_exchange import Chain, Tied, assembled
from tests.workers import run_workers


class TiedInTurn(Chain):
    """Each worker has both stages that use one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2].weight, self.net[3].weight = self.net[0].weight, self.net[1].weight


def clamp(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.clamp_(-1e-3, 1e-3)


def train(rank: int) -> dict[str, str]:
    """What is said against hooks on the weight of the first block, by case."""
    said = {}
    batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    for case, make, schedule, early in (
        ("own", Chain, "1f1b", True),
        ("shared", Tied, "1f1b", True),
        ("shared, afterwards", Tied, "1f1b", False),
        ("shared, pipedream", Tied, "pipedream", True),
        ("shared within a worker", TiedInTurn, "interleaved_1f1b", True),
        ("split", Chain, "zero_bubble", True),
        ("late", Chain, "pipedream", True),
        ("accumulated", Chain, "1f1b", False),
    ):
        module = make()
        for weight in module.parameters():
            if early:
                weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
            else:
                weight.register_post_accumulate_grad_hook(clamp)
        pipeline = assembled(module, schedule).pipeline
        try:
            for number in range(2):
                pipeline.train(batch, TRAIN, number, accumulated=number > 0).backward()
            said[case] = ""
        except ConfigurationError as error:
            said[case] = str(error)
        pipeline.settle()
        dist.barrier()
    return said


@pytest.mark.distributed
def test_hooks_that_would_see_something_else_are_refused() -> None:
    for said in run_workers(2, train):
        assert said["own"] == ""
        for case in ("shared", "shared, afterwards", "shared, pipedream"):
            assert "'net.0.weight' has a hook on its gradient, and stages [0, 1] hold it" in said[case]
        assert re.search(r"stages \[(0, 2|1, 3)\] hold it", said["shared within a worker"])
        assert "zero_bubble" in said["split"]
        assert "schedule='pipedream' computes it of copies" in said["late"]
        assert "of all so far in one process" in said["accumulated"]
