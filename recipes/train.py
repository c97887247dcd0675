"""The training app: ``python -m recipes.train experiment=digits num_stages=2 trainer.devices=4``.

You can override every value in ``conf/`` on the command line, and ``-m`` runs a job for each combination of values. A
run writes its logs, its checkpoint and a ``summary.json`` to its output directory, a sweep a ``summary.csv``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import lightning as L
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from recipes import command_line
from recipes.callbacks import Summary, TrainingCurve


def train(config: DictConfig, output: Path) -> dict[str, Any]:
    """Train what ``config`` describes; on rank 0, return the figures in ``output/summary.json``."""
    L.seed_everything(config.seed, workers=True)
    model = hydra.utils.instantiate(config.model)
    data = hydra.utils.instantiate(config.data)
    strategy = hydra.utils.instantiate(config.strategy)
    trainer: L.Trainer = hydra.utils.instantiate(config.trainer, strategy=strategy)
    summary = Summary(output / "summary.json")
    trainer.callbacks += [summary, TrainingCurve(output / "training_curve.png")]  # type: ignore[attr-defined]
    trainer.fit(model, datamodule=data, ckpt_path=config.ckpt_path)
    return summary.read() if trainer.is_global_zero else {}


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def run(config: DictConfig) -> float | None:
    """Run one job; return the value that a sweeper minimises."""
    figures = train(config, Path(HydraConfig.get().runtime.output_dir))
    return figures.get("metrics", {}).get(config.objective)  # type: ignore[no-any-return]


def main() -> None:
    command_line.prepare()
    run()


if __name__ == "__main__":
    main()
