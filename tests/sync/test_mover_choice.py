"""Exchanges in a real Trainer, on two pipelines: each learns, and ends its epochs with equal replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_sdpipe import (
    ADPSGD,
    AllReduce,
    ConfigurationError,
    Decentralized,
    DiLoCo,
    EightBit,
    Exchange,
    Half,
    LocalSGD,
    OneBit,
    SDPipeStrategy,
    SemiDecentralized,
)
from lightning_sdpipe.loop.optimizers import refuse_unfit_momentum
from lightning_sdpipe.optim import FrozenVariance
from lightning_sdpipe.topology.groups import HOST_VARIABLE
from tests.features.running import Regression, assert_same, samples
from tests.strategy.test_strategy import fit
from tests.sync.test_methods import EqualReplicas, Uneven, train


def loss(model: nn.Module) -> float:
    x, y = samples(48).tensors
    return nn.functional.mse_loss(model.net(x), y).item()  # type: ignore[operator]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("sync", "exchange", "options"),
    [
        pytest.param(SemiDecentralized(), Exchange(EightBit(block=8), "step"), {}, marks=pytest.mark.slow),
        (ADPSGD(asynchronous=True), Exchange(EightBit(block=8), "step"), {"schedule": "pipedream"}),
        pytest.param(LocalSGD(every=1), Exchange(Half(), "free", interval=0.01), {}, marks=pytest.mark.slow),
        pytest.param(
            DiLoCo(every=3, fragments=2, delay=1, mix=0.5), Exchange(OneBit(block=8)), {}, marks=pytest.mark.slow
        ),
        pytest.param(
            Decentralized("ring"),
            Exchange(EightBit(block=8, rounding="stochastic"), "step"),
            {},
            marks=pytest.mark.slow,
        ),
        (AllReduce(), Exchange(EightBit(block=8), hierarchy="hosts"), {"accumulate_grad_batches": 2}),
    ],
    ids=str,
)
def test_it_learns_and_ends_each_epoch_with_equal_replicas(
    tmp_path: Path, sync: Any, exchange: Exchange, options: dict[str, Any]
) -> None:
    before = loss(Regression())
    model, metrics = train(tmp_path, sync, Regression(0.03), exchange=exchange, **options)
    assert loss(model) < 0.95 * before
    assert metrics["groups"] == (12 if "accumulate_grad_batches" not in options else 6)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("sync", "exchange"),
    [
        (AllReduce(), Exchange(OneBit(block=8))),
        (LocalSGD(every=1), Exchange(EightBit(block=8), "free", interval=0.0)),
        pytest.param(DiLoCo(every=2), Exchange(EightBit(block=8), "step"), marks=pytest.mark.slow),
        pytest.param(Decentralized("ring"), Exchange(EightBit(block=8)), marks=pytest.mark.slow),
        pytest.param(SemiDecentralized(), Exchange(Half(), "step"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_pipeline_with_less_data_does_not_hold_others_up(tmp_path: Path, sync: Any, exchange: Exchange) -> None:
    train(tmp_path, sync, Uneven(), stages=1, exchange=exchange)


class OneBitAdam(Regression):
    def __init__(self, after: int = 3, beta: float = 0.9, frozen: bool = True) -> None:
        super().__init__()
        self.after, self.beta, self.frozen = after, beta, frozen

    def configure_optimizers(self) -> torch.optim.Optimizer:
        adam = torch.optim.Adam(self.parameters(), lr=0.01, betas=(self.beta, 0.99))
        return FrozenVariance(adam, after=self.after) if self.frozen else adam


@pytest.mark.distributed
def test_one_bit_adam_trains(tmp_path: Path) -> None:
    before = loss(Regression())
    model, _ = train(tmp_path, AllReduce(), OneBitAdam(), 1, exchange=Exchange(OneBit(block=8, momentum=0.9, after=3)))
    assert loss(model) < 0.95 * before


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (OneBitAdam(frozen=False), r"return FrozenVariance\(optimizer, after=3\)"),
        (OneBitAdam(after=5), r"return FrozenVariance\(optimizer, after=3\)"),
        (OneBitAdam(beta=0.8), r"sends momenta of 0\.9, and the optimizer's first beta is 0\.8"),
    ],
)
def test_momenta_want_an_optimizer_that_takes_them(module: Regression, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        refuse_unfit_momentum(module.configure_optimizers(), OneBit(momentum=0.9, after=3))


@pytest.mark.distributed
def test_machines_without_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_VARIABLE, "localhost")
    strategy = SDPipeStrategy(1, exchange=Exchange(hierarchy="hosts"), start_method="fork")
    with pytest.raises(Exception, match="Give each machine a name, or set the environment variable SDPIPE_HOST"):
        fit(tmp_path, strategy, 2, 4, callbacks=[EqualReplicas()])


@pytest.mark.distributed
def test_eight_bits_on_a_model_in_bfloat16(tmp_path: Path) -> None:
    """Full means and encoded ones end close to each other, in 16 bits."""
    models = [
        train(
            tmp_path / str(number),
            SemiDecentralized(window=float("inf")),
            Regression(0.03),
            stages=1,
            exchange=exchange,
            precision="bf16-true",
        )[0]
        for number, exchange in enumerate([Exchange(), Exchange(EightBit(block=8))])
    ]
    for full, encoded in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert (full - encoded).float().norm() <= 0.05 * full.float().norm()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("sync", "stages"),
    [
        (DiLoCo(every=4, fragments=2), 2),
        pytest.param(DiLoCo(every=4), 1, marks=pytest.mark.slow),
        pytest.param(LocalSGD(every=4), 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_resumed_run_goes_on_with_its_rounds_and_the_outer_momentum(tmp_path: Path, sync: Any, stages: int) -> None:
    """Six updates are done: the next round is due after the eighth. Also on another number of stages. (Fragments are
    parts of a stage.)"""
    options: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 0}
    each = ModelCheckpoint(tmp_path, save_top_k=-1)
    _, straight = _two_pipelines(tmp_path / "straight", sync, 2, **options, callbacks=[each])
    file, _ = sorted(tmp_path.glob("*.ckpt"))
    saved = torch.load(file, weights_only=False)["optimizer_states"][0]["state"]
    assert any("sdpipe_outer_momentum" in state for state in saved.values()) == isinstance(sync, DiLoCo)
    _, resumed = _two_pipelines(tmp_path / "second", sync, stages, ckpt_path=file, **options)
    assert_same([resumed.state_dict()], straight.state_dict())


def _two_pipelines(directory: Path, sync: Any, stages: int, **options: Any) -> tuple[Any, Regression]:
    strategy = SDPipeStrategy(stages, sync=sync, start_method="fork")
    return fit(directory, strategy, 2 * stages, 4, Regression(0.03), **options)
