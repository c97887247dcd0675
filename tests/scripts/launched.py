"""A short training, started by test_launching.py; each rank tells where it is."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning as L
from torch.utils.data import DataLoader

from lightning_sdpipe import SDPipeStrategy
from tests.features.running import Regression, quiet_trainer, samples


def main(nodes: int, devices: int) -> dict[str, Any]:
    strategy = SDPipeStrategy(2, timeout=timedelta(minutes=10))
    addresses: list[str] = []

    class Address(L.Callback):
        def on_train_start(self, *_: object) -> None:
            addresses.append(strategy.membership.client.address)

    trainer = quiet_trainer(
        devices=devices,
        num_nodes=nodes,
        strategy=strategy,
        callbacks=[Address()],
        max_epochs=1,
        enable_checkpointing=False,
    )
    trainer.fit(Regression(), DataLoader(samples(32), 4))
    assert strategy._launcher is not None
    return {
        "rank": trainer.global_rank,
        "worker": list(strategy.mesh.locate(trainer.global_rank)),
        "world": trainer.world_size,
        "steps": trainer.global_step,
        "children": len(strategy._launcher.procs),  # type: ignore[attr-defined]
        "scheduler": addresses[0],
    }
