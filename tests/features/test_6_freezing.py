"""Layers that are unfrozen, or frozen again, while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sdpipe import AllReduce, SDPipeStrategy, SemiDecentralized
from lightning_sdpipe.loop import finetuning
from tests.features.programs import UnfreezingWithin
from tests.features.running import (
    Regression,
    assert_same,
    fitted,
    on_four_ranks,
    pipelines,
    refuse,
    refuse_each,
    samples,
    train_loader,
    trainer_of_this_process,
    weights,
)
from tests.features.table import refused, supported

pytestmark = pytest.mark.distributed


class Unfreezing(Regression):
    """The first three blocks, on both stages, train from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.net[:3].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[:3].requires_grad_(True)


class Adding(Unfreezing):
    """The optimizer gets what trains later from the wrapper that Lightning shows to the module."""

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 1:
            optimizer: Any = self.optimizers()
            optimizer.add_param_group({"params": list(self.net[:3].parameters())})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[3].parameters(), lr=0.1)


class Freezing(Regression):
    """The second stage stops training; its parameters had gradients before."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[2:].requires_grad_(False)


class Finetuning(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = self.net[:3], self.net[3]
        del self.net

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(filter(lambda p: p.requires_grad, self.parameters()), lr=0.05)


def _loader() -> DataLoader[Any]:
    return DataLoader(samples(), 8)


def _fit(directory: Path, module: type[Regression], **ways: Any) -> dict[str, Tensor]:
    return fitted(directory, module(), **({"strategy": SDPipeStrategy(2, **ways)} if ways else {}))[0]


def _finetune(
    directory: Path, strategy: SDPipeStrategy | None, epochs: int, resume: Path | None = None
) -> dict[str, Tensor]:
    """Saves ``directory/last.ckpt``. One pipeline, which does what one process does, with Adam too."""
    options: dict[str, Any] = {"strategy": strategy} if strategy else {}
    callbacks = [BackboneFinetuning(1), ModelCheckpoint(directory, save_last=True)]
    trainer = trainer_of_this_process(
        directory, callbacks=callbacks, max_epochs=epochs, use_distributed_sampler=False, **options
    )
    model = Finetuning()
    trainer.fit(model, _loader(), ckpt_path=resume)
    return weights(model)


def _pipedream(directory: Path, in_one_run: bool) -> dict[str, Tensor]:
    strategy = SDPipeStrategy(2, AllReduce(), schedule="pipedream")
    trainer, model = pipelines(directory, strategy, max_epochs=2 if in_one_run else 1), Unfreezing()
    trainer.fit(model, train_loader())
    assert not trainer.strategy.training.parts.pipeline.flushes  # type: ignore[attr-defined]
    if not in_one_run:
        trainer.fit_loop.max_epochs = 2
        model.requires_grad_(True)
        trainer.fit(model, train_loader())
    return weights(model)


def _all(directory: Path) -> dict[str, dict[str, Tensor]]:
    """Many runs in the same processes."""
    all_at_once = SemiDecentralized(window=float("inf"))
    runs: dict[str, Callable[[Path], dict[str, Tensor]]] = {
        "later, zero_bubble": lambda path: _fit(path, Unfreezing, sync=AllReduce(), schedule="zero_bubble"),
        "within": lambda path: _fit(path, UnfreezingWithin, sync=AllReduce()),
        "within, interleaved": lambda path: _fit(path, UnfreezingWithin, sync=all_at_once, schedule="interleaved_1f1b"),
        "added": lambda path: _fit(path, Adding, sync=AllReduce()),
        "frozen": lambda path: _fit(path, Freezing, sync=AllReduce()),
        "pipedream": lambda path: _pipedream(path, True),
        "pipedream, two runs": lambda path: _pipedream(path, False),
        "finetuning": lambda path: _finetune(path, SDPipeStrategy(4, variance_correction=True), 2),
        "resumed": lambda path: _finetune(path, SDPipeStrategy(4), 3, directory / "finetuning" / "last.ckpt"),
    }
    return {name: run(directory / name) for name, run in runs.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, Tensor]]]]:
    """What each rank holds after each run."""
    directory = tmp_path_factory.mktemp("freezing")
    ranks = on_four_ranks(_all, directory)
    return directory, {name: [rank[name] for rank in ranks] for name in ranks[0]}


Runs = tuple[Path, dict[str, list[dict[str, Tensor]]]]


@supported("Optimizers", "layers that are frozen, unfrozen or frozen again in `on_train_epoch_start` or "
           "`on_train_batch_start`", "with every schedule; `requires_grad` must be set on all stages")  # fmt: skip
@pytest.mark.parametrize(
    ("module", "names"),
    [
        (Unfreezing, ["later, zero_bubble"]),
        (UnfreezingWithin, ["within", "within, interleaved"]),
        (Freezing, ["frozen"]),
        (Adding, ["added"]),
    ],
)
def test_what_trains_changes(tmp_path: Path, runs: Runs, module: type[Regression], names: list[str]) -> None:
    expected = _fit(tmp_path, module)
    assert not torch.equal(expected["net.0.weight"], module().net[0].weight)
    for name in names:
        assert_same(runs[1][name], expected)


def test_pipedream_trains_what_is_unfrozen_as_a_new_run_does(runs: Runs) -> None:
    for in_one, in_two in zip(runs[1]["pipedream"], runs[1]["pipedream, two runs"], strict=True):
        assert_same([in_one], in_two)
        for name in set(in_one) & {"net.0.weight", "net.2.weight"}:
            assert not torch.equal(in_one[name], Unfreezing().state_dict()[name])


@supported("Callbacks", "`BackboneFinetuning` and others of `BaseFinetuning`")
def test_finetuning(tmp_path: Path, runs: Runs) -> None:
    """Groups that are added to the optimizer are divided among the stages, and come back from a checkpoint."""
    directory, ranks = runs
    assert_same(ranks["finetuning"], _finetune(tmp_path, None, 2))
    here, there = (torch.load(path / "last.ckpt", weights_only=True) for path in (tmp_path, directory / "finetuning"))
    name = next(name for name in here["callbacks"] if name.startswith("Backbone"))
    assert there["callbacks"][name] == here["callbacks"][name]
    (mine,), (theirs,) = there["optimizer_states"], here["optimizer_states"]
    assert [group["params"] for group in mine["param_groups"]] == [[0, 1], [2, 3, 4, 5]]
    assert mine["param_groups"] == theirs["param_groups"]
    for place, state in theirs["state"].items():
        torch.testing.assert_close(mine["state"][place]["exp_avg"], state["exp_avg"])
    assert_same(ranks["resumed"], _finetune(tmp_path / "resumed", None, 3, directory / "finetuning" / "last.ckpt"))


def test_parameters_that_the_optimizer_has_already_are_named_as_by_lightning() -> None:
    old, new = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.warns(match="are in a group of the optimizer already"):
        found = finetuning._new_to(torch.optim.SGD(old.parameters(), 0.1), [*old.parameters(), *new.parameters()])
    assert [id(p) for p in found] == [id(p) for p in new.parameters()]


class OnItsStageOnly(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.requires_grad_(not parameter.is_meta)


class OnOneStage(Regression):
    """In the middle of an epoch, where the other stage changes nothing."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.net[0].weight.is_meta == (self.stage == 1):
            self.net[0].requires_grad_(False)


class FromTheBeginning(Regression):
    def configure_model(self) -> None:
        if self.global_rank == 1:
            self.net[0].requires_grad_(False)


class Evaluating(Regression):
    def configure_model(self) -> None:
        self.net[1].train(self.global_rank == 0)


class InTheStep(Regression):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.net[0].requires_grad_(batch_idx < 2)
        return super().training_step(batch, batch_idx)


_SOME_RANKS = "was set on some ranks only"


@refused("Optimizers", "`requires_grad` set on some ranks only, or `train()` and `eval()` in `configure_model`",
         _SOME_RANKS)  # fmt: skip
def test_stages_that_disagree(tmp_path: Path) -> None:
    evaluating = "Module 'net.1' is in training mode on some ranks only"
    cases = (FromTheBeginning(), _SOME_RANKS), (Evaluating(), evaluating), (OnItsStageOnly(), _SOME_RANKS)
    refuse_each(tmp_path, [(*case, {}) for case in cases])


_IN_THE_STEP = "requires_grad was changed within training_step"


@refused("Optimizers", "`requires_grad` changed within `training_step`", _IN_THE_STEP)
@pytest.mark.parametrize(
    ("module", "schedule", "error"),
    [
        (OnOneStage(0), "pipedream", f"{_SOME_RANKS}: it has changed on stage 0"),
        (OnOneStage(1), "1f1b", f"{_SOME_RANKS}: it has changed on stage 1"),
        (InTheStep(), "1f1b", _IN_THE_STEP),
    ],
)
def test_a_change_at_a_wrong_time(tmp_path: Path, module: Regression, schedule: Any, error: str) -> None:
    strategy = SDPipeStrategy(2, AllReduce(), schedule=schedule)
    on_four_ranks(refuse, tmp_path, module, error, strategy, count=2)
