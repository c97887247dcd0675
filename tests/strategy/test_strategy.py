"""The strategy inside a real Trainer, on real processes."""

from __future__ import annotations

import json
import logging
import math
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core import rank_zero
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_sdpipe import AllReduce, SDPipeStrategy, SemiDecentralized
from lightning_sdpipe.optim import VarianceCorrection
from lightning_sdpipe.strategy.setup import Setup
from tests.features.running import Regression, assert_same, quiet_trainer, samples
from tests.own_session import module, script


def fit(
    directory: Path,
    strategy: Any,
    devices: int,
    batch_size: int,
    module: Regression | None = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> tuple[L.Trainer, Regression]:
    options = {"num_sanity_val_steps": 1, "enable_checkpointing": True, **options}  # where Lightning saves by itself
    trainer = quiet_trainer(devices=devices, strategy=strategy, default_root_dir=directory, **options)
    model = Regression() if module is None else module
    own_loader = is_overridden("train_dataloader", getattr(model, "_orig_mod", model))
    train = None if own_loader else train_loader(batch_size, devices)
    trainer.fit(model, train, DataLoader(samples(20), 5), ckpt_path=ckpt_path)
    return trainer, model


def train_loader(batch_size: int, devices: int) -> DataLoader[Any]:
    """In the order of Lightning's DistributedSampler, which deals the shuffled samples out in turn: two batches of 4
    on two pipelines hold what one batch of 8 holds in one process."""
    sampler = DistributedSampler(samples(48), num_replicas=1, rank=0) if devices == 1 else None
    return DataLoader(samples(48), batch_size, sampler=sampler)


@pytest.mark.distributed
def test_two_pipelines_take_the_step_of_one_process_on_the_joined_batch(tmp_path: Path) -> None:
    reference, expected = fit(tmp_path / "one", "auto", 1, 8)
    strategy = SDPipeStrategy(num_stages=2, sync=SemiDecentralized(window=math.inf), start_method="fork")
    trainer, model = fit(tmp_path / "four", strategy, 4, 4)
    assert_same([model.state_dict()], expected.state_dict())
    assert reference.global_step == 12
    for name in ("loss_epoch", "val_loss"):
        assert trainer.callback_metrics[name] == pytest.approx(reference.callback_metrics[name].item(), rel=1e-5)
    assert strategy.statistics.mean_group_size == 2, "rank 0's, although this process is no worker"
    assert strategy.seconds_waiting_for_pipeline > 0


@pytest.mark.distributed
@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_rule_of_compiling(tmp_path: Path, stages: int) -> None:
    """With several stages blocks may be compiled, with one stage the module, too; what else is refused is in
    worker/test_failures.py."""
    _, expected = fit(tmp_path / "one", "auto", 1, 8)
    compiled: Any = torch.compile(Regression(), backend="eager") if stages == 1 else Regression()
    if stages == 2:
        for block in compiled.net:
            block.compile(backend="eager")
    strategy = SDPipeStrategy(stages, sync=AllReduce(), start_method="fork")
    fit(tmp_path / "compiled", strategy, 2, 4 * stages, compiled)
    for key, value in expected.state_dict().items():
        found = compiled.state_dict()[key if key in compiled.state_dict() else f"_orig_mod.{key}"]
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)


def test_what_a_run_cost_is_known_after_it() -> None:
    with pytest.raises(RuntimeError, match=r"strategy.statistics is known once the strategy has run"):
        _ = SDPipeStrategy(2, start_method="fork").statistics


@pytest.mark.distributed
def test_after_fit_the_users_process_has_the_whole_module(tmp_path: Path) -> None:
    strategy = SDPipeStrategy(2, AllReduce(), save_distributed_checkpoint=True, start_method="fork")
    trainer, model = fit(tmp_path, strategy, 4, 4, max_epochs=1)
    (saved,) = tmp_path.rglob("*.ckpt")
    assert saved.is_dir()
    fitted = trainer.callback_metrics["val_loss"].item()
    x, y = samples(20).tensors
    assert nn.functional.mse_loss(model.net(x), y).item() == pytest.approx(fitted, rel=1e-5)
    assert model.net[0].weight.untyped_storage().nbytes() == 4 * 6 * 8
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    loaded = Regression.load_from_checkpoint(tmp_path / "after.ckpt")
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())
    (metrics,) = trainer.validate(model, DataLoader(samples(20), 5), verbose=False)
    assert metrics["val_loss"] == pytest.approx(fitted, rel=1e-6)


@pytest.mark.distributed
def test_a_script_fits_validates_and_fits_again(tmp_path: Path) -> None:
    with script(tmp_path, module, "tests.scripts.fit_twice", str(tmp_path)) as run:
        assert run.wait() == 0, run.printed()
        assert run.left() == []
    outcome = json.loads((tmp_path / "seen.json").read_text())
    assert outcome["validated"] == pytest.approx(outcome["fitted"], rel=1e-6)
    assert outcome["alone"] == pytest.approx(outcome["fitted"], rel=1e-6)
    saved, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    checkpoint = torch.load(tmp_path / "after.ckpt")["state_dict"]
    assert saved.keys() == other.keys() == checkpoint.keys() == Regression().state_dict().keys()
    assert all(torch.equal(saved[name], other[name]) for name in saved)
    assert all(torch.equal(saved[name], checkpoint[name]) for name in saved)
    assert outcome["fitted_again"] < outcome["fitted"]
    (log,) = tmp_path.glob("**/metrics.csv")
    assert {"loss_step", "loss_epoch", "val_loss"} <= set(log.read_text().splitlines()[0].split(","))


class AdamRegression(Regression):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert isinstance(optimizer, VarianceCorrection)
        assert optimizer.num_workers == self.trainer.world_size // 2  # the pipelines, whatever the groups


def train_adam(directory: Path, devices: int, epochs: int, ckpt_path: Path | None = None) -> AdamRegression:
    strategy = SDPipeStrategy(2, variance_correction=True, start_method="fork")
    module, each = AdamRegression(), ModelCheckpoint(directory, save_top_k=-1)
    fit(directory, strategy, devices, 4, module, ckpt_path, max_epochs=epochs, callbacks=[each])
    return module


@pytest.mark.distributed
def test_variance_correction_wraps_adam_and_knows_the_number_of_pipelines(tmp_path: Path) -> None:
    before = AdamRegression().net[0].weight
    assert not torch.equal(train_adam(tmp_path, 4, 1).net[0].weight, before)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("module", "note"), [(AdamRegression, "has nothing to correct: AllReduce("), (Regression, "does not apply to SGD")]
)
def test_a_correction_that_corrects_nothing_says_so_once(
    tmp_path: Path, module: type[Regression], note: str, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = SDPipeStrategy(2, sync=AllReduce(), variance_correction=True, start_method="fork")
    caplog.set_level(logging.INFO, rank_zero.log.name)  # other tests may have made it quiet
    written = tmp_path / "notes.txt"
    handler = logging.FileHandler(written)  # which workers inherit
    rank_zero.log.addHandler(handler)
    try:
        fit(tmp_path, strategy, 2, 4, module(), max_epochs=1)
    finally:
        rank_zero.log.removeHandler(handler)
        handler.close()
    assert written.read_text().count(note) == 1


@pytest.mark.distributed
def test_the_state_of_corrected_adam_is_resumed(tmp_path: Path) -> None:
    # with one pipeline: of several, a checkpoint holds the moments of the first
    whole = train_adam(tmp_path / "whole", 2, 2)
    half, _ = sorted((tmp_path / "whole").glob("*.ckpt"))
    resumed = train_adam(tmp_path / "resumed", 2, 2, half)
    assert_same([resumed.state_dict()], whole.state_dict(), rtol=1.3e-6, atol=1e-5)


def test_the_strategy_is_known_by_name() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="sdpipe", logger=False)
    assert isinstance(trainer.strategy, SDPipeStrategy)


@pytest.mark.parametrize("what", ["its last checkpoint could not be written", "a callback could not be changed back"])
def test_a_worker_says_that_it_ends_though(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is left to undo is undone."""
    strategy, run = SDPipeStrategy(num_stages=2), Mock()
    fails, other = Mock(side_effect=OSError("No space left on device")), Mock()
    checkpoints = Mock(wait=fails) if "checkpoint" in what else Mock()
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    undo = [other] if "checkpoint" in what else [fails, other]
    made = Mock(checkpoints=checkpoints, undo=undo, trainer=trainer)
    made.take_apart = partial(Setup.take_apart, made) if "checkpoint" in what else checkpoints.wait
    monkeypatch.setattr(strategy, "_set_up", made)
    monkeypatch.setattr(strategy, "_run", run)
    monkeypatch.setattr(DDPStrategy, "teardown", lambda self: None)
    with pytest.raises(OSError, match="No space left"):
        strategy.teardown()
    checkpoints.wait.assert_called_once()
    other.assert_called_once_with()
    run.close.assert_called_once_with()


def test_a_module_whose_state_cannot_be_saved_is_given_back(tmp_path: Path) -> None:
    class Unsaved(Regression):
        def on_fit_start(self) -> None:
            raise AssertionError("it was refused before")

        def setup(self, stage: str) -> None:
            self.net.register_state_dict_post_hook(lambda *_: 1 // 0)

    model = Unsaved()
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, SDPipeStrategy(), 1, 8, model)
    dist.destroy_process_group()
    assert not [name for block in model.net for name in vars(block) if name in ("_call_impl", "__reduce_ex__")]
