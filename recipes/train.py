"""The training app: ``python -m recipes.train experiment=digits num_stages=2 trainer.devices=4``.

Every value in ``conf/`` can be overridden on the command line. A run leaves its logs, its checkpoint and a
``summary.json`` in its output directory.
"""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import hydra
import lightning as L
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from recipes.throughput import ThroughputMeter
from recipes.training_curve import TrainingCurve


def train(config: DictConfig, output: Path) -> dict[str, Any]:
    """Trains what ``config`` describes and returns the figures that are written to ``output/summary.json``."""
    start = time.perf_counter()
    L.seed_everything(config.seed, workers=True)
    model = hydra.utils.instantiate(config.model)
    data = hydra.utils.instantiate(config.data)
    strategy = hydra.utils.instantiate(config.strategy)
    trainer: L.Trainer = hydra.utils.instantiate(config.trainer, strategy=strategy)
    meter = ThroughputMeter(trainer.world_size // strategy.num_stages)
    trainer.callbacks.append(meter)  # type: ignore[attr-defined]
    trainer.callbacks.append(TrainingCurve(output / "training_curve.png"))  # type: ignore[attr-defined]
    trainer.fit(model, datamodule=data)
    summary = {
        "samples_per_second": meter.samples_per_second,
        "mean_group_size": strategy.statistics.mean_group_size,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "seconds": time.perf_counter() - start,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    if trainer.is_global_zero:
        (output / "summary.json").write_text(json.dumps(summary, indent=2))
    return summary


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(config: DictConfig) -> None:
    train(config, Path(HydraConfig.get().runtime.output_dir))


if __name__ == "__main__":
    main()
