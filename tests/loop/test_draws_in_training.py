"""Random numbers in the step, around it and in the blocks: the same wherever the model is cut."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdpipe import AllReduce, NoSync, SDPipeStrategy
from tests.features.running import Regression, eval_loader, on_four_ranks, pipelines, quiet_trainer, train_loader


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)) * random.random())


class Noisy(L.LightningModule):
    """Draws before the step, in the step between blocks, within blocks, and in recomputed ones."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.file, self.losses = file, list[Tensor]()
        self.layers = nn.ModuleList([Layer() for _ in range(4)])

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + torch.randn(4)]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * float(np.random.rand())]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] + 0.1 * torch.randn_like(batch[0])
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if number % 2 else layer(x)
            x = nn.functional.dropout(x, 0.1)
        return (x * torch.rand(())).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"])

    def on_train_end(self) -> None:
        if self.global_rank == 0:
            torch.save(torch.stack(self.losses), self.file)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.distributed
@pytest.mark.parametrize("pipelines", [1, 2])
def test_losses_are_the_same_wherever_the_model_is_cut(tmp_path: Path, pipelines: int) -> None:
    losses = []
    for stages in (1, 2, 4) if pipelines == 1 else (1, 2):
        L.seed_everything(3, verbose=False)
        strategy = SDPipeStrategy(stages, sync=NoSync(), data="sharded", num_micro_batches=4, start_method="fork")
        trainer = quiet_trainer(devices=stages * pipelines, strategy=strategy, default_root_dir=tmp_path)
        data = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)))
        trainer.fit(Noisy(tmp_path / f"{stages}.pt"), DataLoader(data, 8, shuffle=True))
        losses.append(torch.load(tmp_path / f"{stages}.pt"))
    assert len(losses[0]) == 8 // pipelines
    assert len(set(losses[0].tolist())) > 1
    assert all(torch.equal(found, losses[0]) for found in losses[1:])


class Langevin(torch.optim.SGD):
    """Adds noise, of all generators."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p) * random.random() * np.random.rand(), alpha=0.1)
        return loss


class Deciding(Regression):
    """Draws in hooks between steps: decisions, and new values of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.decided: list[float] = []
        self.noise: list[float] = []
        self.held: list[Tensor] = []

    def draw(self, *_: Any) -> None:
        self.decided += [self.reset(), np.random.rand(), random.random()]

    on_fit_start = on_train_start = on_train_epoch_start = on_train_batch_start = draw
    on_train_batch_end = on_validation_start = on_validation_end = on_train_epoch_end = draw

    def reset(self, *_: Any) -> float:
        value = random.random()
        if value < 0.3:
            self.net[0].reset_parameters()
            self.net[2].reset_parameters()
        return value

    on_before_zero_grad = on_before_optimizer_step = reset  # without a flush some stages run them earlier

    def on_validation_epoch_end(self) -> None:
        torch.rand(3), random.random()  # on last stages only

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.noise.append(float(torch.rand(())))
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self.held = [p.detach().clone() for p in self.parameters() if not p.is_meta]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Langevin(self.parameters(), lr=0.01)


def drawing(directory: Path, schedule: str, accumulate: int) -> tuple[list[Tensor], list[float], list[float]]:
    module = Deciding()
    random.seed(int(os.environ["RANK"]))  # as processes are that nobody has seeded
    np.random.seed(int(os.environ["RANK"]))
    trainer = pipelines(
        directory,
        SDPipeStrategy(2, sync=AllReduce(), schedule=schedule, num_micro_batches=1),
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(module, train_loader(), eval_loader())
    assert trainer.strategy.training.parts.pipeline.flushes == (schedule == "1f1b")  # type: ignore[attr-defined]
    return module.held, module.decided, module.noise


@pytest.mark.distributed
@pytest.mark.parametrize(("schedule", "accumulate"), [("1f1b", 1), ("pipedream", 2)])
def test_replicas_stay_equal_where_optimizers_and_hooks_draw(tmp_path: Path, schedule: str, accumulate: int) -> None:
    """As with Lightning's DDP, whose ranks draw alike if they are seeded alike."""
    ranks = on_four_ranks(drawing, tmp_path, schedule, accumulate)
    for ours, theirs in ((0, 1), (2, 3)) if _same_stage(ranks, 0, 1) else ((0, 2), (1, 3)):
        assert all(torch.equal(a, b) for a, b in zip(ranks[ours][0], ranks[theirs][0], strict=True))
    assert all(decided == ranks[0][1] for _, decided, _ in ranks)
    assert len(ranks[0][1]) > 50
    assert len(set(ranks[0][1])) == len(ranks[0][1])
    assert len({tuple(noise) for _, _, noise in ranks}) == 2, "steps of the two pipelines draw different numbers"


def _same_stage(ranks: list[Any], one: int, other: int) -> bool:
    return [p.shape for p in ranks[one][0]] == [p.shape for p in ranks[other][0]]
