"""Small programs that train under plain Lightning and under DDP, to be trained by one-stage pipelines too."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.features.running import BATCH, Regression, samples

Batch = tuple[Tensor, Tensor]


class ByHand(Regression):
    """Manual optimization with one optimizer."""

    def __init__(self, **hyperparameters: Any) -> None:
        super().__init__(**hyperparameters)
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Adversarial(ByHand):
    """Two optimizers in turn, one of them clipped; each has its own half of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.other = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), nn.Linear(6, 1)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc, attr-defined]
        x, _ = batch
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(nn.functional.softplus(-self.other(self.net(x))).mean())
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        second.zero_grad()
        self.manual_backward(nn.functional.softplus(self.other(self.net(x).detach()) - self.other(x)).mean())
        self.clip_gradients(second, 0.05, "norm")
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), 0.02), torch.optim.SGD(self.other.parameters(), 0.1)


class Penalised(Adversarial):
    """Several steps of one for each step of the other, with a penalty on the gradient by the input."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc, attr-defined]
        x = batch[0].detach().requires_grad_()
        with second.toggle_model():
            score = self.other(x) + self.other(self.net(x).detach()).square()
            (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            second.zero_grad()
            self.manual_backward(score.mean() + slope.square().mean())
            second.step()
        if batch_idx % 3 == 2:
            with first.toggle_model():
                first.zero_grad()
                self.manual_backward(-self.other(self.net(x)).mean())
                first.step()


class ActorCritic(ByHand):
    """Two losses over shared layers, each with its own backward, and one optimizer for each head and the body."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(8, 3), nn.Linear(8, 1)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        actor, critic = self.optimizers()  # type: ignore[misc, attr-defined]
        seen = self.net(x)
        advantage = y - self.critic(seen)
        policy = -(self.actor(seen).log_softmax(1)[:, :1] * advantage.detach()).mean()
        actor.zero_grad()
        critic.zero_grad()
        self.manual_backward(policy, retain_graph=True)
        self.manual_backward(advantage.square().mean())
        actor.step()
        critic.step()
        return policy.detach()

    def configure_optimizers(self) -> Any:
        both = [*self.net.parameters(), *self.actor.parameters()]
        return torch.optim.SGD(both, 0.05), torch.optim.Adam(self.critic.parameters(), 0.01)


class TwoSchedules(Adversarial):
    """Each optimizer with a schedule that the step and the end of an epoch call."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.lr_schedulers()[0].step()  # type: ignore[index, call-arg, union-attr]

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers()[1].step()  # type: ignore[index, call-arg, union-attr]

    def configure_optimizers(self) -> Any:
        both = super().configure_optimizers()
        return list(both), [torch.optim.lr_scheduler.StepLR(each, 1, 0.8) for each in both]


class Accumulating(ByHand):
    """Gradients of two batches, of which only the last backward is averaged."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        with optimizer.toggle_model(sync_grad=batch_idx % 2 == 1):
            self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class AccumulatingMeans(ByHand):
    """Gradients of two batches, each of which is averaged."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class WithClosure(ByHand):
    """A closure that the optimizer evaluates, by hand."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class Unused(ByHand):
    """A branch by turns, so that some parameters have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)])

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        x, y = batch
        optimizer.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self.net(x) + self.branches[batch_idx % 2](x), y))
        optimizer.step()


def train_loader() -> Any:
    """The last batch is smaller."""
    return DataLoader(samples(30), BATCH)


def unlike_last_batches() -> Any:
    """The last batch of each rank has its own size, which no sampler makes equal."""
    return map(tuple, list(DataLoader(samples(9 + int(os.environ["RANK"])), BATCH)))


@dataclass(frozen=True)
class Program:
    """A module, its data, and the options of its Trainer; ``ddp`` is the name of the strategy that trains it with
    several devices, None if DDP does not."""

    module: Callable[[], Regression]
    loader: Callable[[], Any] = train_loader
    options: Callable[[], dict[str, Any]] = dict
    ddp: str | None = "ddp"


def half() -> dict[str, Any]:
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 1024.0, growth_interval=3))]}


class Quasi(Regression):
    """Evaluates its closure several times in a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)


class SharpnessAware(torch.optim.SGD):
    """Takes the gradient for its step at parameters that are higher up (SAM)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        moves = [0.05 * p.grad / p.grad.norm() for p in parameters]
        for p, move in zip(parameters, moves, strict=True):
            p.add_(move)
        with torch.enable_grad():
            closure()
        for p, move in zip(parameters, moves, strict=True):
            p.sub_(move)
        super().step()
        return loss


class Sharp(Regression):
    def configure_optimizers(self) -> Any:
        return SharpnessAware(self.parameters(), lr=0.1)


class Skipping(Regression):
    """Skips some batches."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return None if batch_idx in (1, 2) else self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.02)


class Beforehand(Regression):
    """Calls the closure before the optimizer steps, and sometimes does not step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        if batch_idx != 1:
            optimizer.step()


class Fetching(Regression):
    """Takes its batches itself."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


class Bare(Regression):
    """Has no modules."""

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.weight = nn.Parameter(torch.linspace(0, 1, 6)[:, None])

    def loss(self, batch: Batch) -> Tensor:
        return (batch[0] @ self.weight - batch[1]).square().mean()


class UnfreezingWithin(Regression):
    """In an epoch, and between two steps whose gradients may be accumulated."""

    def __init__(self) -> None:
        super().__init__()
        self.net[:3].requires_grad_(False)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if batch_idx == 3:
            self.net[:3].requires_grad_(True)


class Normalised(Regression):
    """With statistics that DDP takes from one process, and that are averaged here."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def callbacks(*made: Callable[[], Any], **options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"callbacks": [make() for make in made], **options}


def pruning() -> ModelPruning:
    """Without lottery tickets, which plain Lightning never sets back: its copy shares their memory."""
    return ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False)


UNUSED = "ddp_find_unused_parameters_true"
PROGRAMS: dict[str, Program] = {
    "manual": Program(ByHand),
    "adversarial": Program(Adversarial, ddp=UNUSED),
    "penalised": Program(Penalised, ddp=UNUSED),
    "actor and critic": Program(ActorCritic, ddp=UNUSED),
    "two schedules": Program(TwoSchedules, ddp=UNUSED),
    "accumulating": Program(Accumulating),
    "accumulating means": Program(AccumulatingMeans),
    "with a closure": Program(WithClosure),
    "unused": Program(Unused, ddp=UNUSED),
    "LBFGS": Program(Quasi),
    "a closure called beforehand": Program(Beforehand, options=lambda: {"gradient_clip_val": 0.5}),
    "SAM": Program(Sharp),
    "None": Program(Skipping, ddp=None),
    "dataloader_iter": Program(Fetching),
    "no modules": Program(Bare),
    "a generator": Program(Regression, lambda: (batch for batch in list(train_loader())), lambda: {"max_epochs": 1}),
    "unlike last batches": Program(Adversarial, unlike_last_batches, lambda: {"max_epochs": 1}, UNUSED),
    "a map": Program(Regression, lambda: map(tuple, list(train_loader())), lambda: {"max_epochs": 1}),
    "weights averaged": Program(Regression, options=callbacks(WeightAveraging)),
    "moving average": Program(Regression, options=callbacks(lambda: EMAWeightAveraging(decay=0.8))),
    "SWA": Program(Normalised, options=callbacks(lambda: StochasticWeightAveraging(0.05, 1), max_epochs=4), ddp=None),
    "pruned": Program(Regression, options=callbacks(pruning)),
    "learning rate found": Program(
        Regression, options=callbacks(lambda: LearningRateFinder(num_training_steps=6, early_stop_threshold=None))
    ),
    "accumulated by Lightning": Program(Regression, options=lambda: {"accumulate_grad_batches": 2}),
    "half precision": Program(Adversarial, options=half, ddp=UNUSED),
}
