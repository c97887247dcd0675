"""What elastic runs cannot do, or cannot mean, is refused by name before anything is waited for."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.trainer.states import TrainerFn

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.exchange.payloads import EightBit, OneBit
from lightning_sdpipe.policies.all_reduce import AllPresent
from lightning_sdpipe.policies.outer_rounds import OuterRounds
from lightning_sdpipe.sync import (
    ADPSGD,
    AllReduce,
    Decentralized,
    DiLoCo,
    LocalSGD,
    NoSync,
    SemiDecentralized,
)
from lightning_sdpipe.sync.methods import ByPolicy
from lightning_sdpipe.worker.elastic import refusals
from lightning_sdpipe.worker.elastic.run import ElasticRun


@pytest.fixture(autouse=True)
def elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDPIPE_PIPELINE", "0")
    monkeypatch.setenv("SDPIPE_SCHEDULER", "tcp://127.0.0.1:9")


@pytest.mark.parametrize(("name", "value"), [("start_method", "fork"), ("batch_by_speed", True)])
def test_other_options_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=name):
        refusals.check_options(SDPipeStrategy(**{name: value}).options)


def test_machines_must_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("localhost", "one"):
        monkeypatch.setenv("SDPIPE_HOST", name)
        options = SDPipeStrategy(exchange=Exchange(hierarchy="hosts")).options
        with nullcontext() if name == "one" else pytest.raises(ConfigurationError, match="Give each machine a name"):
            ElasticRun(options, SimpleNamespace(), lambda: None).check()  # type: ignore[arg-type]


def test_rounds_of_all_send_payloads_as_diloco_does() -> None:
    for payload in (EightBit(), OneBit()):
        options = SDPipeStrategy(sync=LocalSGD(every=2), exchange=Exchange(payload, overlap="step")).options
        assert options.method == DiLoCo(every=2, lr=1.0, momentum=0.0)
        refusals.check_scheduler(options, OuterRounds(), OuterRounds())
    assert SDPipeStrategy(sync=LocalSGD(every=2)).options.method == ByPolicy(LocalSGD(every=2))
    SDPipeStrategy(sync=LocalSGD(every=1), exchange=Exchange(overlap="free"))
    with pytest.raises(ConfigurationError, match=r"with sync=LocalSGD\(every=1\) does not work in an .* Use Full"):
        SDPipeStrategy(sync=LocalSGD(every=1), exchange=Exchange(EightBit(), overlap="free"))


@pytest.mark.parametrize("sync", [SemiDecentralized(), LocalSGD(every=2), ADPSGD()])
def test_models_may_be_averaged_without_a_flush_and_gradients_may_not(sync: Any) -> None:
    SDPipeStrategy(sync=sync, schedule="pipedream")
    with pytest.raises(ConfigurationError, match=r"Use schedule='1f1b', or sync=SemiDecentralized\(\)"):
        SDPipeStrategy(sync=AllReduce(), schedule="pipedream")
    with pytest.raises(ConfigurationError, match=r"no common turn. Use schedule=.1f1b."):
        SDPipeStrategy(sync=DiLoCo(every=4), schedule="pipedream")  # waited for each other for ever in two stages


def test_pairs_that_compute_meanwhile_need_a_scheduler_that_names_such_pairs() -> None:
    waits, does_not = ADPSGD(), ADPSGD(asynchronous=True)
    refusals.check_scheduler(SDPipeStrategy(sync=does_not).options, does_not, ADPSGD(seed=3, asynchronous=True))
    for needed, held, name in ((does_not, waits, "ad_psgd --set asynchronous=true"), (waits, does_not, "ad_psgd")):
        with pytest.raises(ConfigurationError, match=f"decides by {name}, and .*Start it with --policy {name}, or"):
            refusals.check_scheduler(SDPipeStrategy(sync=needed).options, needed, held)


def test_pipelines_of_unlike_depths_are_for_ordinary_runs() -> None:
    with pytest.raises(ConfigurationError, match=r"num_stages=\[1, 2\] is for an ordinary run: .* Leave num_st"):
        SDPipeStrategy(num_stages=[1, 2])


def test_the_scheduler_must_serve_the_same_pipelines() -> None:
    options = SDPipeStrategy().options
    refusals.check_served(options, (1, 4), "there")
    for served, said in (
        ((2, 2), "pipelines of 2 stages, and pipeline 0 was started with 1 processes"),
        ((2, 2, 1, 2), "pipelines of 1, 2 stages, and pipeline 0 was"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            refusals.check_served(options, served, "there")


def test_there_is_a_scheduler_and_as_many_stages_as_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="num_stages=3"):
        SDPipeStrategy(num_stages=3)
    monkeypatch.delenv("SDPIPE_SCHEDULER")
    with pytest.raises(ConfigurationError, match="SDPIPE_SCHEDULER"):
        SDPipeStrategy()


def test_predictions_are_refused_and_clocks_are_not() -> None:
    options = SDPipeStrategy().options
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, max_time={"minutes": 1})
    trainer.state.fn = TrainerFn.FITTING
    refusals.check_trainer(trainer, options)
    trainer.state.fn = TrainerFn.PREDICTING
    with pytest.raises(ConfigurationError, match="predict"):
        refusals.check_trainer(trainer, options)


def test_what_rounds_of_gradients_cannot_do_is_refused_with_what_they_can() -> None:
    options = SDPipeStrategy(sync=AllReduce()).options
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, accumulate_grad_batches=2)
    trainer.state.fn = TrainerFn.FITTING
    with pytest.raises(ConfigurationError, match="accumulate_grad_batches=1, or sync=SemiDecentralized"):
        refusals.check_trainer(trainer, options)
    refusals.check_trainer(trainer, SDPipeStrategy().options)
    for payload in (EightBit(), EightBit(feedback=True), OneBit(after=10)):
        SDPipeStrategy(sync=AllReduce(), exchange=Exchange(payload, hierarchy="hosts"))
    SDPipeStrategy(sync=DiLoCo(delay=8), exchange=Exchange(overlap="step"))
    with pytest.raises(ConfigurationError, match=r"Use overlap='step'"):
        SDPipeStrategy(sync=DiLoCo(delay=8))
    for exchange in (Exchange(OneBit(momentum=0.9, after=10)), Exchange(overlap="step")):
        with pytest.raises(ConfigurationError, match=r"OneBit\(\)|LocalSGD"):
            SDPipeStrategy(sync=AllReduce(), exchange=exchange)
    refusals.check_scheduler(options, AllPresent(), AllPresent())
    refusals.check_scheduler(SDPipeStrategy().options, SemiDecentralized(), AllPresent())
    outer = SDPipeStrategy(sync=DiLoCo()).options
    refusals.check_scheduler(outer, OuterRounds(), OuterRounds())
    with pytest.raises(ConfigurationError, match="decides by outer_rounds, and this one decides by no_sync"):
        refusals.check_scheduler(outer, OuterRounds(), NoSync())
    ring = SDPipeStrategy(sync=Decentralized()).options
    refusals.check_scheduler(ring, Decentralized(), Decentralized())
    with pytest.raises(ConfigurationError, match="decides by decentralized, and this one decides by no_sync"):
        refusals.check_scheduler(ring, Decentralized(), NoSync())
    with pytest.raises(ConfigurationError, match="decides by all_present, and this one decides by no_sync"):
        refusals.check_scheduler(options, AllPresent(), NoSync())


def test_a_joint_batch_goes_with_samples_as_weights_in_full() -> None:
    asked: dict[str, Any] = {"batch_by_speed": True, "num_micro_batches": 4}
    refusals.check_options(SDPipeStrategy(sync=AllReduce(), **asked).options)
    for sync, exchange, instead in (
        (AllReduce(weights="equal"), Exchange(), r"or sync=AllReduce\(\)\."),
        (AllReduce(), Exchange(EightBit()), "without batch_by_speed"),
        (LocalSGD(every=2), Exchange(), r"or sync=AllReduce\(\)\."),
    ):
        with pytest.raises(ConfigurationError, match=instead):
            SDPipeStrategy(sync=sync, exchange=exchange, **asked)
