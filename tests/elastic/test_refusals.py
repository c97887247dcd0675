"""What elastic jobs cannot do, or cannot mean, is refused by name before anything is waited for."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from lightning.pytorch.trainer.states import TrainerFn

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.elastic import refusals
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.value import Exchange
from lightning_sdpipe.sync import (
    ADPSGD,
    PHDPSGD,
    AllReduce,
    HetPipe,
    LocalSGD,
    NoSync,
    ParameterServer,
    PartialReduce,
    SemiDecentralized,
)


@pytest.fixture(autouse=True)
def elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDPIPE_PIPELINE", "0")
    monkeypatch.setenv("SDPIPE_SCHEDULER", "tcp://127.0.0.1:9")


@pytest.mark.parametrize("sync", [SemiDecentralized(), PartialReduce(), NoSync()])
def test_these_methods_work(sync: Any) -> None:
    options = SDPipeStrategy(sync=sync)
    refusals.check_options(options)
    assert options.data == "dealt"


@pytest.mark.parametrize(
    "sync",
    [AllReduce(), HetPipe(), LocalSGD(every=2), ParameterServer(), ADPSGD(), ADPSGD(asynchronous=True), PHDPSGD()],
)
def test_other_methods_are_refused(sync: Any) -> None:
    with pytest.raises(ConfigurationError, match="SemiDecentralized"):
        refusals.check_options(SDPipeStrategy(sync=sync))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("schedule", "pipedream"),
        ("save_distributed_checkpoint", True),
        ("partition", "balanced"),
        ("start_method", "fork"),
        ("overlap", Exchange(overlap="step")),
        ("batch_by_speed", True),
        ("sync", SemiDecentralized(seating="near")),
    ],
)
def test_other_options_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match="seating='near'" if name == "sync" else name):
        refusals.check_options(SDPipeStrategy(**{"exchange" if name == "overlap" else name: value}))


def test_there_is_a_scheduler_and_as_many_stages_as_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="num_stages=3"):
        SDPipeStrategy(num_stages=3)
    monkeypatch.delenv("SDPIPE_SCHEDULER")
    with pytest.raises(ConfigurationError, match="SDPIPE_SCHEDULER"):
        SDPipeStrategy()


def test_clocks_and_predictions_are_refused() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, max_time={"minutes": 1})
    trainer.state.fn = TrainerFn.FITTING
    with pytest.raises(ConfigurationError, match="Count steps or epochs"):
        refusals.check_trainer(trainer)
    trainer.state.fn = TrainerFn.PREDICTING
    with pytest.raises(ConfigurationError, match="predict"):
        refusals.check_trainer(trainer)
