"""A run that resumes from a checkpoint of an epoch's last batch begins the next epoch as any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.sync import AllReduce
from tests.features.running import quiet_trainer

BATCHES = 4


class Notes(L.Callback):
    """Notes the epochs that have begun, and Lightning's counters within each."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.within: list[dict[str, Any]] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.begun.append(trainer.current_epoch)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready == 2:
            self.within.append(trainer.fit_loop.state_dict())


def trainer(epochs: int, *callbacks: L.Callback) -> L.Trainer:
    few = {"limit_train_batches": BATCHES, "limit_val_batches": 0}
    strategy = SDPipeStrategy(sync=AllReduce())
    return quiet_trainer(devices=1, strategy=strategy, max_epochs=epochs, callbacks=[*callbacks], **few)


def test_it_is_counted_and_hooks_hear_of_it(tmp_path: Path) -> None:
    saves, notes = ModelCheckpoint(tmp_path, every_n_train_steps=BATCHES), Notes()
    trainer(1, saves).fit(BoringModel())
    dist.destroy_process_group()
    trainer(3, notes, ModelCheckpoint(tmp_path / "later")).fit(BoringModel(), ckpt_path=str(saves.best_model_path))
    dist.destroy_process_group()
    assert notes.begun == [1, 2]
    assert len(notes.within) == 2
    for epoch, state in enumerate(notes.within, start=1):
        loop = trainer(3).fit_loop
        loop.load_state_dict(state)
        loop.restarting = True
        loop.update_restart_stage()
        assert loop.restarted_mid_epoch, "who takes these counters over goes on within the epoch"
        assert loop.epoch_progress.current.processed == epoch
