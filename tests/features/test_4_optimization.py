"""Precision, gradients, optimizers and learning-rate schedules."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_sdpipe import AllReduce, Exchange, SDPipeStrategy
from lightning_sdpipe.exchange.payloads import OneBit
from lightning_sdpipe.worker.training import Training
from tests.features.programs import Quasi, Sharp, UnfreezingWithin
from tests.features.running import (
    Outcome,
    Regression,
    assert_same,
    both,
    compare,
    fitted,
    on_four_ranks,
    on_pipelines,
    pipelines,
    refuse_each,
    train_loader,
    trainer_of_this_process,
    weights,
)
from tests.features.table import refused, supported

pytestmark = pytest.mark.distributed


Precisions = dict[str, tuple[list[Any], Any]]
"""What each of four ranks has after each of :data:`PRECISIONS`, and what one process has."""


@pytest.fixture(scope="module")
def precisions(tmp_path_factory: pytest.TempPathFactory) -> Precisions:
    return both(tmp_path_factory.mktemp("precisions"), PRECISIONS)


def _half_precision(directory: Path, precision: str) -> tuple[dict[str, Tensor], set[torch.dtype]]:
    seen: set[torch.dtype] = set()
    trainer, model = trainer_of_this_process(directory, precision=precision), Regression()
    if not on_pipelines() or trainer.global_rank % 2:  # whoever holds the first block
        model.net[0].register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    trainer.fit(model, train_loader())
    return weights(model), seen


@supported("Precision", "`32-true`, `bf16-mixed`", "the same as in one process, up to rounding")
def test_bf16_mixed(precisions: Precisions) -> None:
    ranks, (expected, seen) = precisions["bf16-mixed"]
    assert seen == {torch.bfloat16}
    assert set().union(*(dtypes for _, dtypes in ranks)) == seen
    assert_same([parts for parts, _ in ranks], expected, rtol=0.05, atol=0.01)


class Losses(Regression):
    """Keeps what hooks get as the loss."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.__dict__.setdefault("losses", []).append(outputs["loss"].detach().clone())


class Doubled(Losses):
    """Its loss has another type than its weights."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).double()


def _true_precision(
    directory: Path, precision: Any, model: Regression | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    trainer, model = trainer_of_this_process(directory, precision=precision), model or Losses()
    trainer.fit(model, train_loader())
    return weights(model), torch.stack(model.__dict__["losses"])


@supported("Precision", "`bf16-true`, `64-true`", "the loss reaches the hooks of all stages in its own type")
@supported("Precision", "losses of any floating-point type", "hooks see the same loss on all stages")
def test_true_precision(precisions: Precisions) -> None:
    kinds = ("bf16-true", torch.bfloat16, 0.1), ("64-true", torch.float64, 1e-9), ("doubled", torch.float64, 1e-5)
    for precision, dtype, tolerance in kinds:
        ranks, (expected, _) = precisions[precision]
        of_weights = torch.float32 if precision == "doubled" else dtype
        assert {value.dtype for parts, _ in ranks for value in parts.values()} == {of_weights}
        assert_same([parts for parts, _ in ranks], expected, rtol=tolerance, atol=tolerance / 2)
        for one, other in ((0, 1), (2, 3)):  # stages of a pipeline
            assert ranks[one][1].dtype == ranks[other][1].dtype == dtype
            assert torch.equal(ranks[one][1], ranks[other][1])


def _scaled(directory: Path, frozen: int) -> tuple[dict[str, Tensor], float, int]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    trainer, model = trainer_of_this_process(directory, plugins=[plugin], max_epochs=1), Regression()
    model.net[:frozen].requires_grad_(False)
    held = model.net[3].weight
    held.register_hook(lambda gradient: gradient * (float("inf") if trainer.global_step == 1 else 1.0))
    trainer.fit(model, train_loader())
    assert plugin.scaler is not None
    return weights(model), plugin.scaler.get_scale(), trainer.global_step


@supported("Precision", "`16-mixed`", "with a loss scale; a step that overflows on one stage is skipped on all; with "
           "`schedule=\"pipedream\"`, on those that overflow")  # fmt: skip
@pytest.mark.parametrize("trained", ["all", "last stage"])
def test_16_mixed(precisions: Precisions, trained: str) -> None:
    """Where the first stage has no gradients, it votes on an overflow all the same."""
    ranks, expected = precisions[trained]
    assert expected[1] == 512.0
    assert {scale for _, scale, _ in ranks} == {expected[1]}
    assert_same([parts for parts, _, _ in ranks], expected[0], rtol=0.02, atol=0.005)


def _left_out(directory: Path) -> list[tuple[dict[str, Tensor], float]]:
    """With a loss scale that grows, and one that stays."""
    found = []
    for interval in (2, 1000) if on_pipelines() else ():
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 64.0, growth_interval=interval))
        strategy = SDPipeStrategy(2, AllReduce(), exchange=Exchange(OneBit(block=8)), schedule="pipedream")
        model = Regression(lr=0.02)
        pipelines(directory, strategy, plugins=[plugin]).fit(model, train_loader())
        assert plugin.scaler is not None
        found.append((weights(model), plugin.scaler.get_scale()))
    return found


def test_what_messages_leave_out_has_no_loss_scale_without_a_flush(precisions: Precisions) -> None:
    ranks, _ = precisions["left out"]
    assert [large > small == 64.0 for (_, large), (_, small) in ranks] == [True, False] * 2, "the last stages' grow"
    for (growing, _), (staying, _) in ranks:
        for name, value in growing.items():
            torch.testing.assert_close(value, staying[name], rtol=0.02, atol=0.002)


PRECISIONS: dict[str, Callable[[Path], Any]] = {
    "bf16-mixed": lambda path: _half_precision(path, "bf16-mixed"),
    "bf16-true": lambda path: _true_precision(path, "bf16-true"),
    "64-true": lambda path: _true_precision(path, "64-true"),
    "doubled": lambda path: _true_precision(path, "32-true", Doubled()),
    "all": lambda path: _scaled(path, 0),
    "last stage": lambda path: _scaled(path, 2),
    "left out": _left_out,
}


class Fused(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=True)


class Tied(Regression):
    """The first and the last stage share a parameter, which counts once in the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 1))
        self.net[2].weight = self.net[0].weight


class ClippingElsewhere(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")


class ClippingTwice(Regression):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        for _ in range(2):
            self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")


class Overriding(Regression):
    """Uses the hooks that users override around an optimizer step."""

    norms: list[float]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.2 / (1 + self.global_step)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class Scheduled(Regression):
    kind = "step"

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.net[0].parameters(), "lr": 0.02}, {"params": [*self.net[2:].parameters()]}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        total = int(self.trainer.estimated_stepping_batches)
        assert total == 8
        schedule: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Epochs(Scheduled):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)]


class Plateau(Scheduled):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class ByStep(Plateau):
    """After each validation in mid-epoch, as Lightning's documentation shows it."""

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        found["lr_scheduler"] |= {"interval": "step", "frequency": 2}
        return found


class ByLoss(Plateau):
    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        found["lr_scheduler"] |= {"interval": "step", "monitor": "loss"}
        return found


class Manual(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Several(Regression):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[:2].parameters(), 0.1), torch.optim.SGD(self.net[2:].parameters(), 0.1)]


class TwiceOrNever(Regression):
    """Steps twice on every other batch; Lightning wants the closure to be called on the others, too."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class Unsynchronised(Regression):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step()


RUNS: dict[str, Callable[[Path], Outcome]] = {
    "clipped by norm": lambda path: fitted(path, Tied(), gradient_clip_val=0.05),
    "accumulated and clipped by value": lambda path: fitted(
        path, accumulate_grad_batches=2, gradient_clip_val=0.02, gradient_clip_algorithm="value"
    ),
    "overridden": lambda path: fitted(path, Overriding()),
    "scheduled by step": lambda path: fitted(path, Scheduled()),
    "scheduled by epoch": lambda path: fitted(path, Epochs()),
    "plateau": lambda path: fitted(path, Plateau(), max_epochs=3),
    "plateau in mid-epoch": lambda path: fitted(path, ByStep(), max_epochs=3, val_check_interval=2),
    "twice or never": lambda path: fitted(path, TwiceOrNever()),
}


@supported(
    "Gradients",
    "`gradient_clip_val` by norm",
    'the norm over all stages of a pipeline; with `schedule="pipedream"`, as far as a stage knows it',
)
@supported("Gradients", "`gradient_clip_val` by value")
@supported("Gradients", "`accumulate_grad_batches`", "beside micro-batches")
@supported("Gradients", "`configure_gradient_clipping`, `optimizer_step`, `optimizer_zero_grad`, "
           "`on_before_optimizer_step` overridden")  # fmt: skip
@supported("Optimizers", "learning-rate schedules by step, by epoch and `ReduceLROnPlateau`; "
           "`estimated_stepping_batches`; several parameter groups")  # fmt: skip
@supported("Gradients", "`optimizer_step` that steps twice on a batch, or skips some")
def test_steps_are_those_of_one_process(tmp_path: Path) -> None:
    compare(tmp_path, RUNS)


_BY_ITSELF = "decides by itself whether to skip a step that overflowed"
_CLIP = "no stage was told the norms of the others"
_TWICE = "Gradients were clipped by norm twice in one update"
_AMIDST = "Layers were frozen or unfrozen between two mini-batches of one update"
_BY_LOSS = "steps with interval='step' and monitors 'loss', which is not the same on all workers"
_MANUAL = "uses manual optimization"
_SEVERAL = "configure_optimizers returned several optimizers; a pipeline steps exactly one"
_SEVERAL_TIMES = "evaluates its closure several times in a step"
_WITHOUT = "was called without the closure that optimizer_step was given"


@refused("Precision", "`16-mixed` with a fused optimizer", _BY_ITSELF)
@refused("Gradients", '`clip_gradients` by norm outside of `configure_gradient_clipping`, with `schedule="pipedream"`',
         _CLIP)  # fmt: skip
@refused("Gradients", 'clipping by norm twice in an update, with `schedule="pipedream"`', _TWICE)
@refused(
    "Gradients", 'layers frozen or unfrozen in the middle of an accumulation, with `schedule="pipedream"`', _AMIDST
)
@refused("Optimizers", "`ReduceLROnPlateau` by step on what the training step logs", _BY_LOSS,
         "replicas would get learning rates of their own; `interval=\"epoch\"`, or a metric of validation")  # fmt: skip
@refused("Optimizers", "manual optimization", _MANUAL, "a schedule decides when which backward runs; with "
         "`num_stages=1` it works")  # fmt: skip
@refused("Optimizers", "several optimizers", _SEVERAL, "with `num_stages=1` they work, by manual optimization")
@refused(
    "Optimizers",
    "optimizers that evaluate their closure several times (`LBFGS`, SAM)",
    _SEVERAL_TIMES,
    "with `num_stages=1` it works",
)
@refused("Gradients", "`optimizer_step` that does not pass its closure on", _WITHOUT, "with `num_stages=1` it works")
def test_what_a_pipeline_cannot_step_is_refused(tmp_path: Path) -> None:
    cases: list[tuple[type[Regression], str, dict[str, Any], dict[str, Any]]] = [
        (Fused, _BY_ITSELF, {}, {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}),
        (ClippingElsewhere, _CLIP, {"schedule": "pipedream"}, {}),
        (ClippingTwice, _TWICE, {"schedule": "pipedream"}, {}),
        (UnfreezingWithin, _AMIDST, {"schedule": "pipedream"}, {"accumulate_grad_batches": 2}),
        (ByLoss, _BY_LOSS, {"num_stages": 1, "sync": AllReduce()}, {}),
        (ByLoss, _BY_LOSS, {"sync": AllReduce()}, {}),
        (Manual, _MANUAL, {}, {}),
        (Several, _SEVERAL, {}, {}),
        (Sharp, _SEVERAL_TIMES, {}, {}),
        (Quasi, "LBFGS evaluates the loss several times in a step", {}, {}),
        (Unsynchronised, _WITHOUT, {}, {}),
    ]
    for _, _, ways, options in cases:
        options["strategy"] = SDPipeStrategy(**{"num_stages": 2, **ways})
    refuse_each(tmp_path, [(module(), error, options) for module, error, _, options in cases])


class LateFirstStage(Regression):
    """Writes down when the last gradient of each update was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[float] = []

    def on_train_start(self) -> None:
        def late(gradient: Tensor) -> None:
            time.sleep(0.05)
            self.computed.append(time.monotonic())

        self.net[0].weight.register_hook(late)


def _announced(directory: Path, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    """When this rank computed its gradients, and when it was announced."""
    strategy, model = SDPipeStrategy(2, num_micro_batches=1), LateFirstStage()
    trainer = pipelines(directory, strategy, max_epochs=1, **options)
    announced: list[float] = []

    def note(training: Training) -> None:
        announced.append(time.monotonic())
        announce(training)

    announce = Training.announce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "announce", note)
        trainer.fit(model, train_loader(16))
    return model.computed, announced


def _announced_with_each(directory: Path) -> list[tuple[list[float], list[float]]]:
    half = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
    return [_announced(directory, options) for options in ({}, {"gradient_clip_val": 0.05}, {"plugins": [half]})]


def test_a_worker_is_ready_when_it_has_waited_for_a_late_stage(tmp_path: Path) -> None:
    """After clipping by norm, and after the vote on an overflow; without them before its last backward."""
    last, first = on_four_ranks(_announced_with_each, tmp_path, count=2)
    for number, waits in enumerate([False, True, True]):
        announced, late = last[number][1], first[number][0]
        assert len(announced) == len(late) == 4
        assert [ready > computed for ready, computed in zip(announced, late, strict=True)] == [waits] * 4
