"""Running averages of the weights, compared with Lightning's own callback in one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_sdpipe import AllReduce, NoSync, SDPipeStrategy, SDPipeWeightAveraging
from lightning_sdpipe.checkpoints.distributed import read_whole
from lightning_sdpipe.checkpoints.files import WholeFiles
from tests.features.running import (
    BATCH,
    Regression,
    assert_same,
    eval_loader,
    on_four_ranks,
    on_pipelines,
    one_process,
    pipelines,
    samples,
    train_loader,
    weights,
)
from tests.features.table import supported

pytestmark = pytest.mark.distributed

EMA = {"decay": 0.8, "update_every_n_steps": 2, "update_starting_at_step": 1, "update_starting_at_epoch": 1}
Outcome = tuple[dict[str, Tensor], list[float], int]


class Normalised(Regression):
    """Has buffers, floating-point and others, which each micro-batch changes alike: it is one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 1))
        self.losses: list[float] = []

    def on_validation_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics["val_loss"]))


class Memory(L.Callback):
    """What the average takes, and what the stage does, in bytes."""

    taken = 0

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if on_pipelines():
            replica = trainer.strategy.training.sync.replica
            self.taken = sum(tensor.nbytes for tensor in replica.averages) - 8  # the number of what is averaged
            held = [t for t in (*pl_module.parameters(), *pl_module.buffers()) if not t.is_meta]
            assert self.taken == sum(tensor.nbytes for tensor in held)


def _train(
    directory: Path,
    model: type[Regression],
    averaging: partial[Any],
    strategy: partial[SDPipeStrategy] | None = None,
    resume: Path | None = None,
) -> Outcome:
    """What this rank holds in the end, the losses of validation, and how much the average took."""
    memory, saving = Memory(), ModelCheckpoint(directory, save_last=True)
    options: dict[str, Any] = {
        "max_epochs": 3 if resume else 2,
        "num_sanity_val_steps": -1,
        "callbacks": [averaging(), memory, saving],
    }
    trainer = pipelines(directory, strategy(), **options) if strategy else one_process(directory, **options)
    module, alone = model(), on_pipelines() and trainer.strategy.num_stages == trainer.world_size
    loader = DataLoader(samples(), 2 * BATCH) if alone else train_loader()
    trainer.fit(module, loader, eval_loader(), ckpt_path=resume)
    return weights(module), getattr(module, "losses", []), memory.taken


def _read(file: Path) -> dict[str, Any]:
    return read_whole(file, WholeFiles()) if file.is_dir() else torch.load(file, weights_only=False)


@supported("Callbacks", "`SDPipeWeightAveraging`: as Lightning's `WeightAveraging` and `EMAWeightAveraging`",
           "one copy of its stage on each worker; resumes on another mesh, and with Lightning's own in one "
           "process")  # fmt: skip
@pytest.mark.parametrize(
    ("model", "num_stages", "options", "given", "own", "other"),
    [
        pytest.param(Normalised, 4, {"num_micro_batches": 1}, EMA, EMAWeightAveraging, 2, id="one pipeline"),
        pytest.param(Regression, 2, {"save_distributed_checkpoint": True}, EMA, EMAWeightAveraging, 4, id="in parts"),
        pytest.param(Regression, 2, {}, {"use_buffers": False}, WeightAveraging, None, id="all alike"),
    ],
)
def test_weight_averaging(
    tmp_path: Path,
    model: type[Regression],
    num_stages: int,
    options: dict[str, Any],
    given: dict[str, Any],
    own: type[WeightAveraging],
    other: int | None,
) -> None:
    ours, theirs = partial(SDPipeWeightAveraging, **given), partial(own, **given)
    strategy = partial(SDPipeStrategy, num_stages, AllReduce(), data="sharded", **options)
    ranks = on_four_ranks(_train, tmp_path / "four", model, ours, strategy)
    expected, losses, _ = _train(tmp_path / "one", model, theirs)
    assert_same([held for held, _, _ in ranks], expected, rtol=1e-6, atol=1e-6)
    assert ranks[0][1] == pytest.approx(losses, rel=1e-6)
    assert all(taken > 0 for _, _, taken in ranks)

    file, its_file = tmp_path / "four" / "last.ckpt", tmp_path / "one" / "last.ckpt"
    saved, its = _read(file), _read(its_file)
    assert saved["averaging_state"]["n_averaged"] == its["averaging_state"]["n_averaged"] > 1
    for state in ("state_dict", "current_model_state"):
        assert_same([saved[state]], its[state], rtol=1e-6, atol=1e-6)
    assert not torch.equal(saved["state_dict"]["net.0.weight"], saved["current_model_state"]["net.0.weight"])

    if other is None:
        return
    expected, _, _ = _train(tmp_path / "its", model, theirs, None, its_file)
    otherwise = partial(SDPipeStrategy, other, AllReduce(), num_micro_batches=1)
    ranks = on_four_ranks(_train, tmp_path / "further", model, ours, otherwise, file, count=other)
    assert_same([held for held, _, _ in ranks], expected, rtol=1e-6, atol=1e-6)
    if file.is_file():
        alone, _, _ = _train(tmp_path / "alone", model, theirs, None, file)
        assert_same([alone], expected, rtol=1e-6, atol=1e-6)


class Seen(L.Callback):
    """The average that validation runs on."""

    def __init__(self) -> None:
        self.averages: list[dict[str, Tensor]] = []

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.averages.append(weights(pl_module))


def _on_shards(directory: Path, shard: int | None = None) -> list[dict[str, Tensor]]:
    """With pipelines that never share models until the end of the epoch, or one of their shards in one process."""
    seen, options = Seen(), {"max_epochs": 1}
    module = Regression()
    if shard is None:
        strategy = SDPipeStrategy(2, NoSync(), data="sharded")
        trainer = pipelines(directory, strategy, callbacks=[SDPipeWeightAveraging(decay=0.8), seen], **options)
        trainer.fit(module, train_loader(), eval_loader())
    else:
        trainer = one_process(directory, callbacks=[EMAWeightAveraging(decay=0.8), seen], **options)
        sampler = DistributedSampler(samples(), num_replicas=2, rank=shard)
        trainer.fit(module, DataLoader(samples(), BATCH, sampler=sampler), eval_loader())
    return [*seen.averages, weights(module)]


@supported("Callbacks", "`SDPipeWeightAveraging` where models are averaged",
           "each pipeline has an average of its own; where models are made equal, it is the mean of these")  # fmt: skip
def test_each_pipeline_averages_its_own_models(tmp_path: Path) -> None:
    ranks = on_four_ranks(_on_shards, tmp_path / "four")
    one, other = (_on_shards(tmp_path / f"shard {shard}", shard) for shard in range(2))
    for number, averages in enumerate(zip(one, other, strict=True)):
        mean = {name: (averages[0][name] + averages[1][name]) / 2 for name in averages[0]}
        assert_same([held[number] for held in ranks], mean, rtol=1e-6, atol=1e-6)
