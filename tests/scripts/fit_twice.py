"""A user's script that trains, validates and trains on in one process per worker; started by test_strategy.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from lightning_sdpipe import SDPipeStrategy
from tests.features.running import Regression, quiet_trainer, samples


def main(directory: str) -> None:
    trainer = quiet_trainer(
        devices=2,
        strategy=SDPipeStrategy(num_stages=2),
        max_epochs=1,
        logger=CSVLogger(directory),
        log_every_n_steps=1,
        enable_checkpointing=False,
    )
    model = Regression()
    train, val = DataLoader(samples(48), 4), DataLoader(samples(20), 5)
    trainer.fit(model, train, val)
    fitted = trainer.callback_metrics["val_loss"].item()
    x, y = samples(20).tensors
    alone = nn.functional.mse_loss(model.net(x), y).item()  # on every rank
    torch.save(model.state_dict(), f"{directory}/{trainer.global_rank}.pt")
    trainer.save_checkpoint(f"{directory}/after.ckpt")
    trainer.validate(model, val, verbose=False)
    validated = trainer.callback_metrics["val_loss"].item()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, train, val)
    again = trainer.callback_metrics["val_loss"].item()
    if trainer.is_global_zero:
        seen = {"fitted": fitted, "alone": alone, "validated": validated, "fitted_again": again}
        Path(directory, "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
