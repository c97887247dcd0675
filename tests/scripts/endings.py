"""A training that never ends by itself, for tests that end it; prints the process of each rank when training runs.

Arguments: how to start (popen or fork), what happens to a rank after some batches (``none``, ``raise:RANK``,
``kill:RANK``, ``term:RANK``: SIGTERM, which the others get while they are a batch behind, or ``linger:RANK``: the same,
and these take long to end), and the number of processes.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdpipe import SDPipeStrategy
from tests.features.running import quiet_trainer


class Model(L.LightningModule):
    def __init__(self, fault: str, at: int) -> None:
        super().__init__()
        self.fault, self.at = fault, at
        self.begun = 0  # batches of this pipeline: dealt ones pass over numbers where it is late
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        if self.begun == 6 and self.global_rank == self.at:
            if self.fault == "raise":
                raise ZeroDivisionError("the user's own mistake")
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.begun += 1
        if self.begun == 7 and self.fault in ("term", "linger") and self.global_rank == self.at:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.begun == 6:
            print(f"rank {self.global_rank} is process {os.getpid()}", flush=True)
            if self.fault in ("term", "linger") and self.global_rank != self.at:
                time.sleep(2)
                if self.fault == "linger":
                    atexit.register(time.sleep, 4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def main(start: str, fault: str, devices: int = 4) -> None:
    L.seed_everything(1)
    kind, _, rank = fault.partition(":")
    trainer = quiet_trainer(
        devices=devices,
        strategy=SDPipeStrategy(2, start_method=start, timeout=timedelta(minutes=5)),  # of waits that nothing else ends
        max_epochs=-1,
        enable_checkpointing=False,
    )
    trainer.fit(Model(kind, int(rank or 0)), DataLoader(TensorDataset(torch.randn(4096, 4)), batch_size=8))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
