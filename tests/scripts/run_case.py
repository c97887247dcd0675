"""A user's script that goes wrong in the way that its argument names; started by test_failures.py."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdpipe import ADPSGD, AllReduce, SDPipeStrategy
from recipes.baselines import HetPipe
from tests.features.running import quiet_trainer


class Model(L.LightningModule):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        if case != "no_chain":
            self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        if case == "compiled_chain":
            self.net.compile(backend="eager")
        self.automatic_optimization = case != "manual"

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 3 and self.global_rank == 1:
            if self.case == "raises":
                raise ZeroDivisionError("the user's own mistake")
            if self.case.startswith("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            if self.case == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.case == "parted":
                print("it trains", flush=True)
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def main(case: str, start_method: Any = "popen", **environment: str) -> None:
    os.environ |= environment
    L.seed_everything(1)  # every process makes the same data
    options = {
        "stages": {"num_stages": 3},
        "too_many_stages": {"num_stages": 4},
        "partition": {"num_stages": 2, "partition": [3, 2]},
        "small_batch": {"num_stages": 2, "num_micro_batches": 9},
        "killed_all_reduce": {"num_stages": 1, "sync": AllReduce()},
        "stopped": {"num_stages": 1, "sync": AllReduce(), "timeout": timedelta(seconds=15)},
        "parted": {"num_stages": 1, "sync": AllReduce()},
        "killed_het_pipe": {"num_stages": 1, "sync": HetPipe(sync_every=1)},
        "killed_ad_psgd": {"num_stages": 1, "sync": ADPSGD(asynchronous=True)},
    }.get(case, {"num_stages": 2})
    trainer = quiet_trainer(
        devices=4 if case in ("stages", "too_many_stages") else 2,
        strategy=SDPipeStrategy(start_method=start_method, data="sharded", **options),  # type: ignore[arg-type]
        max_epochs=-1 if case == "parted" else 1,
        enable_checkpointing=False,
    )
    model = torch.compile(Model(case), backend="eager") if case == "compiled" else Model(case)
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8))


if __name__ == "__main__":
    main(sys.argv[1])
