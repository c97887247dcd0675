"""Resuming from every kind of checkpoint, on every kind of mesh, trains what was left of its epoch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.loop.batch_source import ShardBatchSource
from lightning_sdpipe.loop.dealt import DealtBatchSource
from lightning_sdpipe.loop.joint import JointBatchSource
from lightning_sdpipe.sync import AllReduce, NoSync
from tests.features.running import on_four_ranks, pipelines
from tests.loop.numbered import Numbered

pytestmark = pytest.mark.distributed

BATCH, BATCHES = 2, 8  # of each of two pipelines: three have 6, and four have 4
SAMPLES = 2 * BATCH * BATCHES

Seen = list[tuple[int, list[int]]]
"""Of each batch that a rank trained: its epoch, and its samples."""


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
        self.seen: Seen = []
        self.ended: list[tuple[int, int]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, indices = batch
        self.seen.append((self.current_epoch, indices.tolist()))
        return self.net(x).square().mean()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean())

    def on_train_epoch_end(self) -> None:
        self.ended.append((self.current_epoch, self.global_step))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


ROWS = {  # whether the checkpoint is distributed, its place, and the batches of each of two pipelines that are done
    (False, "after a step/step=3.ckpt"): 3,
    (False, "after a step/step=8.ckpt"): 8,
    (False, "validation/step=4.ckpt"): 4,
    (False, "epoch/step=8.ckpt"): 8,
    (True, "after a step/step=3.ckpt"): 3,
    (True, "validation/last.ckpt"): 8,
    (True, "afterwards.ckpt"): 8,
}


def _save(directory: Path, distributed: Any) -> Seen:
    """Train an epoch, and save at all points of it."""
    savers = [
        ModelCheckpoint(directory / "after a step", "{step}", every_n_train_steps=1, save_top_k=-1),
        ModelCheckpoint(directory / "validation", "{step}", "val_loss", save_top_k=-1, save_last=True),
        ModelCheckpoint(directory / "epoch", "{step}", save_on_train_epoch_end=True),
    ]
    strategy = SDPipeStrategy(1, AllReduce(), data="sharded", save_distributed_checkpoint=distributed)
    module, trainer = Model(), pipelines(directory, strategy, max_epochs=1, val_check_interval=0.5, callbacks=savers)
    _fit(trainer, module)
    trainer.save_checkpoint(directory / "afterwards.ckpt")
    return module.seen


def _fit(trainer: L.Trainer, module: Model, **options: Any) -> None:
    loader = DataLoader(Numbered(SAMPLES), BATCH, shuffle=True)
    trainer.fit(module, loader, DataLoader(Numbered(2 * BATCH), BATCH), **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[Path, Sequence[Seen]]]:
    """Where two pipelines have saved, and what each of them had trained."""
    found = {}
    for distributed in (False, True):
        directory = tmp_path_factory.mktemp("saved")
        found[distributed] = directory, on_four_ranks(_save, directory, distributed and "async", count=2)
    return found


SOURCES: dict[str, dict[str, Any]] = {
    "sharded": {"sync": AllReduce()},
    "dealt": {"sync": NoSync(), "data": "dealt"},
    "by speed": {"sync": AllReduce(), "batch_by_speed": True, "num_micro_batches": 2},
}

SOURCES_OF_BATCHES = {"sharded": ShardBatchSource, "dealt": DealtBatchSource, "by speed": JointBatchSource}


def _resume(place: Path, stages: int, source: str, checkpoints: Sequence[Path]) -> list[tuple[Seen, Any]]:
    """Go on from each checkpoint to the end of the second epoch."""
    outcomes = []
    for checkpoint in checkpoints:
        module, strategy = Model(), SDPipeStrategy(stages, **SOURCES[source])
        trainer = pipelines(place, strategy, max_epochs=2, val_check_interval=0.5, enable_checkpointing=False)
        _fit(trainer, module, ckpt_path=checkpoint, weights_only=False)
        assert isinstance(strategy._batches, SOURCES_OF_BATCHES[source])
        outcomes.append((module.seen, module.ended))
    return outcomes


@pytest.mark.filterwarnings("error:.*dataloader is not resumable")
@pytest.mark.parametrize(
    ("count", "stages", "source"),
    [
        *((1, 1, "sharded"), (3, 1, "dealt"), (4, 2, "by speed")),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in ((2, 1, "sharded"), (3, 1, "sharded"), (4, 1, "dealt"))
        ),
    ],
)
def test_table(tmp_path: Path, saved: Any, count: int, stages: int, source: str) -> None:
    rows = dict([*ROWS.items()][count % 2 :: 2]) if count in (1, 4) else ROWS  # 3 pipelines go on from all
    checkpoints = [saved[distributed][0] / place for distributed, place in rows]
    ranks = on_four_ranks(_resume, tmp_path, stages, source, checkpoints, count=count)
    num_pipelines = count // stages
    shard = -(-SAMPLES // num_pipelines)
    each, whole = -(-shard // BATCH), shard * num_pipelines  # padded
    for number, ((distributed, place), done) in enumerate(rows.items()):
        row = f"{place}, distributed: {distributed}"
        went_on = done * 2 // num_pipelines if done < BATCHES else each
        before = [batch for rank in saved[distributed][1] for batch in rank[:done]]
        epochs: list[list[int]] = [[sample for _, samples in before for sample in samples], []]
        assert len(epochs[0]) == done * 2 * BATCH
        for seen, ended in (rank[number] for rank in ranks[::stages]):
            assert ended[-1] == (1, done + (each - went_on) + each), row
            for epoch, samples in seen:
                epochs[epoch] += samples
        for trained in epochs:
            assert set(trained) == set(range(SAMPLES)), row
        again = (done * 2 - went_on * num_pipelines) * BATCH if done < BATCHES else SAMPLES - whole
        assert len(epochs[0]) == whole + again, row
        assert len(epochs[1]) == whole, row
