"""What must be equal in all pipelines of an elastic run is compared before any of them trains."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Timer
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdpipe import EightBit, Exchange, SDPipeStrategy, SDPipeWeightAveraging
from lightning_sdpipe.partition.ownership import Ownership
from lightning_sdpipe.worker.elastic.joining import fingerprint, training_loader


class Model(L.LightningModule):
    def __init__(self, samples: int = 8, batch_size: int = 2) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
        self.samples, self.batch_size = samples, batch_size

    def train_dataloader(self) -> Any:
        torch.rand(1)  # what makes a loader may draw
        return DataLoader(TensorDataset(torch.zeros(self.samples, 2)), self.batch_size)


def of(model: Model, precision: Any = "32-true", callbacks: Any = None, **options: Any) -> dict[str, str]:
    strategy = SDPipeStrategy(**options)
    given = {"precision": precision, "callbacks": callbacks}
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **given)
    trainer.strategy._lightning_module = model
    model.trainer = trainer
    trainer.fit_loop._data_source.instance = model
    state = torch.get_rng_state()
    found = fingerprint(trainer, strategy.options, Ownership({}), training_loader(trainer))
    assert torch.equal(torch.get_rng_state(), state)
    return found


@pytest.mark.parametrize(
    ("other", "name", "value"),
    [
        (lambda: of(Model(samples=9)), "data", "9 samples, batch size 2"),
        (lambda: of(Model(batch_size=4)), "data", "8 samples, batch size 4"),
        (lambda: of(Model(), num_micro_batches=3), "schedule", "1f1b, 3 micro-batches"),
        (lambda: of(Model(), exchange=Exchange(EightBit())), "exchange", "EightBit"),
        (lambda: of(Model(), precision="bf16-mixed"), "precision", "bf16-mixed"),
        (lambda: of(Model(), callbacks=[SDPipeWeightAveraging(decay=0.5)]), "averaging", "decay=0.5"),
        (lambda: of(Model(), callbacks=[Timer({"minutes": 2})]), "clocks", "Timer every 120 s"),
    ],
)
def test_what_differs_is_named(other: Any, name: str, value: str) -> None:
    mine, theirs = of(Model()), other()
    assert {key for key in mine if mine[key] != theirs[key]} == {name}
    assert value in theirs[name]
