"""What hooks compute from weights and gradients of all stages, and what of a loss arrives on all of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sdpipe import AllReduce, SDPipeStrategy
from tests.features.running import (
    Regression,
    assert_same,
    on_four_ranks,
    on_pipelines,
    refuse,
    refuse_each,
    samples,
    trainer_of_this_process,
    weights,
)
from tests.features.table import refused

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


@refused("Gradients", "norms of all gradients or weights in hooks (`clip_grad_norm_`), moving averages of weights that "
         "other stages hold", "Another stage holds",
         "`Trainer(gradient_clip_val=…)` and `self.clip_gradients` know the norm; what each stage does to its own "
         "weights works")  # fmt: skip
def test_hooks_compute_nothing_from_weights_that_are_not_there(tmp_path: Path) -> None:
    modules = OwnClipping(), OwnClippingOfGroups(), OwnConfiguredClipping(), Norms(), Teacher()
    refuse_each(tmp_path, [(module, "Another stage holds", {}) for module in modules], max_epochs=1)


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


class Sorted(Regression):
    """Sorts its weights by the classes of modules, by attributes of parameters and by sets, and holds some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [*self.net[0].parameters(), *self.net[3].parameters()]
        self.starts = {parameter: parameter.detach().clone() for parameter in self.parameters()}
        for parameter in self.parameters():
            parameter.is_flat = parameter.ndim == 1  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        linear = {module.weight for module in self.modules() if type(module) is nn.Linear}
        flat = {parameter for parameter in self.parameters() if getattr(parameter, "is_flat", False)}
        self.found = len(linear), len(flat)
        groups = [{"params": list(linear), "weight_decay": 0.3}, {"params": list(flat), "lr": 0.03}]
        return torch.optim.AdamW(groups, lr=0.01)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter, start in self.starts.items():
                parameter.lerp_(start, 0.01)


def _sorted(directory: Path) -> dict[str, Any]:
    model = Sorted()
    trainer = trainer_of_this_process(directory, use_distributed_sampler=False)
    trainer.fit(model, DataLoader(samples(), 8))
    path = directory / "one.ckpt"
    trainer.save_checkpoint(path)
    now = [*model.net[0].parameters(), *model.net[3].parameters()]
    kept = [before is each for before, each in zip(model.held, now, strict=True)]
    saved = torch.load(path, weights_only=False)["optimizer_states"][0] if trainer.global_rank == 0 else {}
    return {"weights": weights(model), "found": model.found, "kept": kept, "held": model.held, "saved": saved}


def test_weights_are_what_they_are_to_who_sorts_and_holds_them(tmp_path: Path) -> None:
    ranks, one = on_four_ranks(_sorted, tmp_path, count=2), _sorted(tmp_path)
    assert_same([rank["weights"] for rank in ranks], one["weights"])
    for rank in ranks:
        assert rank["found"] == (3, 3)
        assert all(rank["kept"])
        torch.testing.assert_close(rank["held"], one["held"], rtol=1e-5, atol=1e-6)
    (saved, _), expected = (rank["saved"] for rank in ranks), one["saved"]
    for group, of_one in zip(saved["param_groups"], expected["param_groups"], strict=True):
        squares = [
            {float(each["exp_avg_sq"].sum()) for place, each in state.items() if place in those["params"]}
            for state, those in ((saved["state"], group), (expected["state"], of_one))
        ]
        assert sorted(squares[0]) == pytest.approx(sorted(squares[1]), rel=1e-4)


class Evaluating(Regression):
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.loss(batch)


class LoweringByResults(Callback):
    """Changes a learning rate where the results of validation are."""

    losses = 0.0

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses += float(outputs)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if self.losses > 0:
            trainer.optimizers[0].param_groups[0]["lr"] *= 0.5


class LoweringByOwnBatches(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] *= 1 - 0.01 * float(outputs["loss"].tanh())


def test_learning_rates_that_come_apart_are_refused(tmp_path: Path) -> None:
    cases: list[tuple[int, Callback, str]] = [
        (2, LoweringByResults(), "The optimizer's options are not on stage 0 what they are here"),
        (1, LoweringByOwnBatches(), "The options of the optimizer are not the same in all pipelines"),
    ]
    for num_stages, callback, message in cases:
        strategy = SDPipeStrategy(num_stages, AllReduce(), data="sharded")
        refuse_each(tmp_path, [(Evaluating(), message, {"strategy": strategy, "callbacks": [callback]})])


class Clamping(Regression):
    """Bounds gradients by hooks on weights, which see those of a mini-batch of an update as in one process."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))


class Doubling(Clamping):
    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        (2 * loss).backward()  # type: ignore[no-untyped-call]


def _clamp(directory: Path) -> dict[str, Tensor]:
    options: dict[str, Any] = {"use_distributed_sampler": False, "accumulate_grad_batches": 3}
    if on_pipelines():
        options["strategy"] = SDPipeStrategy(2, AllReduce(), num_micro_batches=1)
    model = Clamping()
    trainer_of_this_process(directory, **options).fit(model, DataLoader(samples(), 4))
    if on_pipelines():
        refuse(directory, Doubling(), "The loss was multiplied by 2 after")
    return weights(model)


def test_hooks_on_gradients_see_the_share_of_an_accumulation(tmp_path: Path) -> None:
    assert_same(on_four_ranks(_clamp, tmp_path, count=2), _clamp(tmp_path))
