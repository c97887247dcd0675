"""Hooks that deal with what steps return, which exists on the last stage of each pipeline."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from tests.features.running import (
    Regression,
    eval_loader,
    on_four_ranks,
    refuse,
    trainer_of_this_process,
)
from tests.features.table import refused, supported

pytestmark = pytest.mark.distributed


class Returning(Regression):
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "batch": batch_idx}


class Collecting(L.Callback):
    """Keeps what the steps return, and looks at it later or at once."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.all: list[Any] = []
        self.begun: list[int] = []
        self.mean: float | None = None

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.begun.append(batch_idx)
        self.all.append(outputs)
        self.losses.append(outputs["loss"])

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert [output["batch"] for output in self.all] == self.begun
        self.mean = float(torch.stack(self.losses).mean())


class Stacking(L.Callback):
    """Uses the outputs in torch only."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.mean: float | None = None

    def on_test_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.outputs.append(outputs)

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.mean = float(torch.stack(self.outputs).mean())


class Testing(Returning):
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self.loss(batch)


def _collect(directory: Path) -> tuple[list[int], float | None, float | None]:
    collecting, stacking = Collecting(), Stacking()
    trainer = trainer_of_this_process(directory, callbacks=[collecting, stacking])
    trainer.validate(Testing(), eval_loader(), verbose=False)
    trainer.test(Testing(), eval_loader(), verbose=False)
    return collecting.begun, collecting.mean, stacking.mean


@supported(
    "Callbacks",
    "hooks that use what steps return: `on_validation_batch_end`, `on_test_batch_end`, …",
    "on other stages, where there are no results, they end at their first use",
)
def test_callbacks_use_outputs(tmp_path: Path) -> None:
    ranks = on_four_ranks(_collect, tmp_path)
    begun, *means = _collect(tmp_path)
    assert all(rank[0] == begun for rank in ranks)
    assert [rank[1:] for rank in (ranks[1], ranks[3])] == [(None, None)] * 2
    both = torch.tensor([ranks[0][1:], ranks[2][1:]]).mean(0)
    torch.testing.assert_close(both, torch.tensor(means))


class Communicating(Regression):
    def __init__(self, hook: str, call: str) -> None:
        super().__init__()
        self.call = call
        original = getattr(self, hook)
        setattr(self, hook, lambda *arguments: (original(*arguments), self.communicate())[0])

    def communicate(self) -> None:
        strategy = self.trainer.strategy
        if self.call == "barrier":
            strategy.barrier()
        elif self.call == "broadcast":
            strategy.broadcast(1)
        elif self.call == "save_checkpoint":
            self.trainer.save_checkpoint("never.ckpt")
        else:
            with torch.no_grad():
                self.net[3].weight.mul_(0.5)


class Uncollected(L.Callback):
    """Relies on what the module collects in its steps."""

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.strategy.has_results:  # type: ignore[attr-defined]
            torch.stack([])


class CollectingLosses(Regression):
    """As modules do that were written before there were hooks with outputs: each stage runs this at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.losses.append(super().training_step(batch, batch_idx))
        return self.losses[-1]

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.losses).mean())


class Growing(Regression):
    def on_fit_start(self) -> None:
        self.more = torch.nn.Linear(2, 2)


class Replacing(Regression):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[3] = torch.nn.Linear(8, 1)


_IN_VAIN = "so other ranks would be waited for in vain"


@refused(
    "Data",
    "`barrier`, `broadcast`, `trainer.save_checkpoint` in a step or a hook that runs on last stages only",
    _IN_VAIN,
    "names the hook, and the one to use instead",
)
@pytest.mark.parametrize(
    ("hook", "call", "error"),
    [
        ("on_validation_epoch_end", "barrier", "barrier was called in on_validation_epoch_end, which runs on last"),
        ("on_validation_batch_end", "save_checkpoint", "save_checkpoint was called in on_validation_batch_end"),
        ("training_step", "broadcast", f"which ends where its stage ends, {_IN_VAIN}. Call it in on_train_batch_end"),
        ("on_validation_epoch_end", "change", "on_validation_epoch_end changed parameters, and it runs on last"),
    ],
)
def test_waiting_in_vain(tmp_path: Path, hook: str, call: str, error: str) -> None:
    on_four_ranks(refuse, tmp_path, Communicating(hook, call), error, count=2)


_NO_RESULTS = "failed on a stage where the results of steps do not exist"


@refused(
    "Data",
    "hooks that need what the steps of the module have collected, on stages where it is not",
    _NO_RESULTS,
    "`on_train_epoch_end`, and callbacks: return at once unless `trainer.strategy.has_results`",
)
@pytest.mark.parametrize(
    ("module", "callbacks", "error"),
    [
        (Regression, [Uncollected()], f"Uncollected.on_validation_epoch_end {_NO_RESULTS}"),
        (CollectingLosses, [], f"CollectingLosses.on_train_epoch_end {_NO_RESULTS}"),
        (Growing, [], "'more.weight' was added to Growing after it had been cut"),
        (Replacing, [], "'net.3.weight' was added to Replacing after it had been cut"),
    ],
)
def test_what_a_stage_does_not_have(tmp_path: Path, module: Any, callbacks: list[L.Callback], error: str) -> None:
    on_four_ranks(partial(refuse, callbacks=callbacks), tmp_path, module(), error, count=2)
