"""What must happen on every worker before any user's callback sees the end of an epoch."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_sdpipe import p2p
from lightning_sdpipe.groups import ProcessGroups


class EpochCallback(Callback):
    """Ends an epoch with equal replicas, and gives all stages the metrics that only the last one has, so that
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
        mesh = self._groups.mesh
        stage, pipeline = mesh.locate(self._groups.rank)
        last = mesh.num_stages - 1
        metrics = trainer.callback_metrics  # the Trainer's own dict: updating it is what makes monitors see the values
        mine = {name: float(value) for name, value in metrics.items()} if stage == last else {}
        data = p2p.broadcast_bytes(json.dumps(mine).encode(), mesh.rank(last, pipeline), self._groups.pipeline)
        if stage != last:
            metrics.update({name: torch.tensor(value) for name, value in json.loads(data).items()})
