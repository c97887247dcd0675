"""What hooks compute from weights and gradients of all stages, and what of a loss arrives on all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sdpipe import ConfigurationError
from lightning_sdpipe.errors import WorkerFailedError
from tests.features.running import (
    Regression,
    assert_same,
    on_four_ranks,
    samples,
    train_loader,
    trainer_of_this_process,
    weights,
)
from tests.features.table import refused, supported

pytestmark = pytest.mark.distributed


class OwnClipping(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class OwnClippingOfGroups(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)


class OwnConfiguredClipping(Regression):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)


class Norms(Regression):
    def on_train_batch_end(self, *_: Any) -> None:
        self.norm = float(sum(p.norm() for p in self.parameters()))


class Teacher(Regression):
    """Follows what it trains by a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        output = self.net(x)
        with torch.no_grad():
            target = self.teacher(x)
        return (output - y).square().mean() + (output - target).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for mine, followed in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                mine.mul_(0.9).add_(followed, alpha=0.1)


def _refuse(directory: Path, make: Callable[[], Regression]) -> None:
    with pytest.raises((ConfigurationError, WorkerFailedError), match="Another stage holds"):
        trainer_of_this_process(directory, max_epochs=1).fit(make(), train_loader())


@refused("Gradients", "norms of all gradients or weights in hooks (`clip_grad_norm_`), moving averages of weights that "
         "other stages hold", "Another stage holds",
         "`Trainer(gradient_clip_val=…)` and `self.clip_gradients` know the norm; what each stage does to its own "
         "weights works")  # fmt: skip
def test_hooks_compute_nothing_from_weights_that_are_not_there(tmp_path: Path) -> None:
    for module in (
        OwnClipping,
        OwnClippingOfGroups,
        OwnConfiguredClipping,
        Norms,
        Teacher,
    ):  # connections do not survive a failure
        on_four_ranks(_refuse, tmp_path, module, count=2)


class Partly(Regression):
    """Its optimizer leaves out a weight that has a gradient; hooks go through the optimizer's groups."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.net[2].parameters(), *self.net[0].parameters()], lr=0.1, momentum=0.9)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        (group,) = optimizer.param_groups
        assert len(group["params"]) == 4
        for parameter in group["params"]:
            parameter.grad.clamp_(-0.2, 0.2)
            parameter.grad.add_(parameter.detach(), alpha=0.1)


def _partly(directory: Path) -> list[dict[str, Tensor]]:
    found = []
    for model, clip in ((Partly(), 0.1), (PartlyByValue(), None)):
        trainer = trainer_of_this_process(directory, gradient_clip_val=clip, use_distributed_sampler=False)
        trainer.fit(model, DataLoader(samples(), 8))
        found.append(weights(model))
    return found


def test_hooks_see_the_groups_of_all_stages_and_clipping_those_of_the_optimizer(tmp_path: Path) -> None:
    for *parts, whole in zip(*on_four_ranks(_partly, tmp_path, count=2), _partly(tmp_path), strict=True):
        assert_same(parts, whole)


class PartlyByValue(Partly):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, 0.05, "value")


class Doubled(Regression):
    """Its loss has another type than its weights."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).double()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = outputs["loss"]


def _seen(directory: Path) -> list[tuple[torch.dtype, float]]:
    seen = []
    for module, precision in ((Doubled(), "32-true"), (Doubled(), "64-true"), (Same(), "bf16-true"), (Same(), None)):
        trainer_of_this_process(directory, precision=precision, max_epochs=1).fit(module, train_loader())
        seen.append((module.seen.dtype, float(module.seen)))
    return seen


class Same(Doubled):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return Regression.training_step(self, batch, batch_idx)


@supported("Precision", "`64-true`, and losses of any floating-point type", "hooks see the same loss on all stages")
def test_the_loss_is_the_same_on_all_stages_whatever_its_type(tmp_path: Path) -> None:
    last, first = on_four_ranks(_seen, tmp_path, count=2)
    assert first == last
    assert [dtype for dtype, _ in first] == [torch.float64, torch.float64, torch.bfloat16, torch.float32]
    (_, single), (_, double), *_ = first
    assert single == pytest.approx(double, rel=1e-5)
