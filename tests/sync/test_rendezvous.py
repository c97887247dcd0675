"""Between two trainings: nothing of what was averaged is lost, and nothing is done twice. In threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.options import Exchange, Overlap
from lightning_sdpipe.exchange.payloads import EightBit, Full, Payload
from lightning_sdpipe.sync import ADPSGD, DiLoCo, LocalSGD, SemiDecentralized
from lightning_sdpipe.sync.background_averaging import AsynchronousPairs
from lightning_sdpipe.sync.methods import method_of
from lightning_sdpipe.sync.rendezvous import Rendezvous
from lightning_sdpipe.sync.synchronizer import Synchronizer
from tests.exchange.test_group_mean import values
from tests.sync.stage import Stage, make_update

N, SIZE = 4, 100


def start(pipeline: int) -> Tensor:
    return values(99, SIZE)


@pytest.mark.parametrize("overlap", ["none", "step"])
@pytest.mark.parametrize("payload", [Full(), EightBit(block=64)], ids=str)
@pytest.mark.parametrize("sync", [ADPSGD(asynchronous=True), SemiDecentralized(window=0.005)], ids=str)
def test_who_rests_and_comes_back_keeps_the_mean(stage: Stage, sync: Any, payload: Payload, overlap: Overlap) -> None:
    beside = set[bool]()

    def train(pipeline: int, parameter: nn.Parameter, sync: Synchronizer, rendezvous: Rendezvous) -> Tensor:
        rendezvous.join()
        for number in range(8):
            make_update(sync, parameter, number, values(10 * number + pipeline, SIZE))
            beside.add(isinstance(sync, AsynchronousPairs) and sync._job is not None)
            rendezvous.rest()
            rendezvous.rejoin()
        rendezvous.pause(position=8)
        return parameter.detach().clone()

    ended = stage.run(method_of(sync), Exchange(payload, overlap), start, train)
    assert (True in beside) == (overlap == "step" and isinstance(sync, ADPSGD))
    exact = start(0) + torch.stack([values(10 * k + p, SIZE) for p in range(N) for k in range(8)]).sum(0) / N
    for parameter in ended:
        torch.testing.assert_close(parameter, exact, rtol=1e-4, atol=1e-4)


def test_a_pause_while_a_mean_travels_is_no_round_of_its_own(stage: Stage) -> None:
    """What was trained meanwhile is lost, as ``mix=0`` says, so there is nothing to apply the outer momentum to."""

    def train(pipeline: int, parameter: nn.Parameter, sync: Synchronizer, rendezvous: Rendezvous) -> list[Tensor]:
        rendezvous.join()
        for number in range(5):
            make_update(sync, parameter, number, values(10 * number + pipeline, SIZE))
        rendezvous.pause(position=5)
        momentum = sync.parameter_states()[parameter]["outer_momentum"].clone()
        return [parameter.detach().clone(), momentum]

    moved = torch.stack([values(10 * k + p, SIZE) for p in range(N) for k in range(4)]).sum(0) / N
    for parameter, momentum in stage.run(method_of(DiLoCo(every=4, delay=2)), Exchange(), start, train):
        torch.testing.assert_close(momentum, moved)
        torch.testing.assert_close(parameter, start(0) + 0.7 * (1 + 0.9) * moved)


def test_layers_that_are_frozen_in_one_pipeline_only(stage: Stage) -> None:
    def train(pipeline: int, parameter: nn.Parameter, sync: Synchronizer, rendezvous: Rendezvous) -> str:
        with pytest.raises(ConfigurationError) as refusal:
            rendezvous.tell_freezing(True) if pipeline == 1 else rendezvous.join()
        return str(refusal.value)

    for pipeline, message in enumerate(stage.run(method_of(DiLoCo(every=4)), Exchange(), start, train)):
        assert f"it has {'' if pipeline == 1 else 'not '}in pipeline {pipeline} of stage 0" in message


@pytest.mark.parametrize(
    ("sync", "models"),
    [(LocalSGD(every=4), N), (DiLoCo(every=4, lr=1.0, momentum=0.0), N), (DiLoCo(every=4), 1)],
    ids=str,
)
def test_a_plain_mean_of_models_is_one_whichever_method_makes_it(stage: Stage, sync: Any, models: int) -> None:
    """By that number variances are corrected."""

    def count(pipeline: int, parameter: nn.Parameter, sync: Synchronizer, rendezvous: Rendezvous) -> float:
        return sync.models_averaged

    assert stage.run(method_of(sync), Exchange(), start, count) == [models] * N
