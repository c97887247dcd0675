"""Methods that go on from a common model find out whether there is one. In threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.exchange.payloads import EightBit
from lightning_sdpipe.sync import AllReduce, Decentralized, DiLoCo, LocalSGD, SemiDecentralized
from lightning_sdpipe.sync.methods import method_of
from lightning_sdpipe.sync.rendezvous import Rendezvous
from lightning_sdpipe.sync.synchronizer import Synchronizer
from tests.exchange.test_group_mean import values
from tests.sync.stage import SIZE, Stage, equal

N = 3
NEED_IT = [
    (AllReduce(), Exchange()),
    (DiLoCo(every=2), Exchange()),
    (LocalSGD(every=2), Exchange(EightBit(block=64))),
    (LocalSGD(every=1), Exchange(EightBit(block=64), "free", interval=0.0)),
    (Decentralized("ring"), Exchange(EightBit(block=64))),
]


@pytest.mark.parametrize(("sync", "exchange"), NEED_IT, ids=str)
def test_models_that_hooks_took_apart_are_refused_by_name(stage: Stage, sync: Any, exchange: Exchange) -> None:
    """Before the first batch, and after a pause."""

    def train(pipeline: int, parameter: nn.Parameter, sync: Synchronizer, rendezvous: Rendezvous) -> str:
        rendezvous.join()
        rendezvous.pause(position=0)
        with torch.no_grad():
            parameter[7] += 0.1 * (pipeline == 2)
        with pytest.raises(ConfigurationError) as refused:
            rendezvous.join()
        return str(refused.value)

    for message in stage.run(method_of(sync), exchange, equal, train):
        assert "Parameters 'of shape (50,)' of stage 0 differ between pipeline 0 and pipelines [2]" in message


@pytest.mark.parametrize(("sync", "exchange"), NEED_IT, ids=str)
def test_what_differs_by_rounding_is_taken_over(stage: Stage, sync: Any, exchange: Exchange) -> None:
    def train(pipeline: int, parameter: nn.Parameter, sync: Synchronizer, rendezvous: Rendezvous) -> Tensor:
        if pipeline == 1:
            parameter.data.mul_(1 + 1e-7)
        rendezvous.join()
        begun = parameter.detach().clone()
        rendezvous.pause(position=0)
        return begun

    for begun in stage.run(method_of(sync), exchange, equal, train):
        assert torch.equal(begun, equal(0))


def test_averages_of_models_may_begin_anywhere(stage: Stage) -> None:
    def train(pipeline: int, parameter: nn.Parameter, sync: Synchronizer, rendezvous: Rendezvous) -> Tensor:
        rendezvous.join()
        rendezvous.pause(position=0)
        return parameter.detach().clone()

    mean = torch.stack([values(pipeline, SIZE) for pipeline in range(N)]).mean(0)
    for ended in stage.run(method_of(SemiDecentralized()), Exchange(), lambda i: values(i, SIZE), train):
        torch.testing.assert_close(ended, mean)
