"""What must happen on every worker before any user's callback sees the end of an epoch."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_sdpipe import p2p
from lightning_sdpipe.groups import ProcessGroups


class EpochCallback(Callback):
    """Ends an epoch with equal replicas, and gives everybody the metrics of rank 0, which holds a last stage, so that
    ModelCheckpoint, EarlyStopping and plateau schedulers decide alike everywhere. The strategy puts it first."""

    def __init__(self, groups: ProcessGroups, pause: Callable[[], None]) -> None:
        self._groups = groups
        self._pause = pause

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause()
        self._share_metrics(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._share_metrics(trainer)

    def _share_metrics(self, trainer: Trainer) -> None:
        everybody = dist.group.WORLD
        assert everybody is not None
        metrics = trainer.callback_metrics  # the Trainer's own dict: updating it is what makes monitors see the values
        mine = {name: float(value) for name, value in metrics.items()} if self._groups.rank == 0 else {}
        data = p2p.broadcast_bytes(json.dumps(mine).encode(), 0, everybody)
        if self._groups.rank != 0:
            metrics.update({name: torch.tensor(value) for name, value in json.loads(data).items()})
