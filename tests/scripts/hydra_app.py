"""A user's own Hydra application, which knows nothing of sweeps; started by test_sweep.py."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import hydra
import lightning as L
import torch
import torch.distributed as dist
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdpipe import SDPipeStrategy
from tests.features.running import quiet_trainer
from tests.scripts.run_case import Model


@dataclass
class Config:
    case: str = "none"
    devices: int = 2
    when: str = "${now:%f}"
    job: int = "${hydra:job.num}"  # type: ignore[assignment]


ConfigStore.instance().store("app", Config)


@hydra.main(version_base="1.3", config_path=None, config_name="app")
def main(config: Config) -> None:
    L.seed_everything(1)
    trainer = quiet_trainer(
        devices=3 if config.case == "three" else config.devices,
        strategy=SDPipeStrategy(data="sharded"),  # so that a rank that is gone is missed at once
        max_epochs=1,
        enable_checkpointing=False,
    )
    trainer.fit(Model(config.case), DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4))
    hydra_config = HydraConfig.get()
    seen = {
        "world_size": dist.get_world_size(),
        "case": config.case,
        "job": [config.job, hydra_config.job.num, hydra_config.job.name],
        "when": config.when,
        "directory": os.getcwd(),
    }
    (Path(hydra_config.runtime.output_dir) / f"rank{trainer.global_rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
