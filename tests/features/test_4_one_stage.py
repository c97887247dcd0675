"""Programs of one stage beside plain Lightning and its DDP."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sdpipe import PHDPSGD, AllReduce, DiLoCo, Exchange, LocalSGD, SDPipeStrategy
from lightning_sdpipe.errors import ConfigurationError, WorkerFailedError
from lightning_sdpipe.exchange.payloads import EightBit
from tests.features.programs import PROGRAMS, Adversarial, ByHand, Program
from tests.features.running import on_four_ranks, pipelines, quiet_trainer, train_loader, weights
from tests.features.table import supported

pytestmark = pytest.mark.distributed
Outcome = tuple[dict[str, Tensor], int]


def _train(directory: Path, program: Program, devices: int, strategy: Any, **options: Any) -> Outcome:
    torch.manual_seed(1)
    model = program.module()
    given = {"enable_checkpointing": False, **program.options(), **options, "devices": devices, "strategy": strategy}
    trainer = quiet_trainer(default_root_dir=directory, **given)
    trainer.fit(model, program.loader())
    return weights(model), trainer.global_step


def _same(found: Outcome, expected: Outcome, name: str, **tolerance: float) -> None:
    assert found[1] == expected[1] > 0, name
    assert found[0].keys() == expected[0].keys(), name
    for key, value in expected[0].items():
        torch.testing.assert_close(found[0][key], value, rtol=1e-5, atol=1e-6, msg=lambda m: f"{name} {key}: {m}")  # noqa: B023


def _both(directory: Path, devices: int) -> list[tuple[str, Outcome, Outcome]]:
    """What this rank has after each program, and what it has after the same under plain Lightning or DDP."""
    found = []
    for name, program in PROGRAMS.items():
        theirs: Any = "auto" if devices == 1 else program.ddp
        ours = SDPipeStrategy(sync=AllReduce(), data="sharded")
        if theirs is not None:
            options = {"use_distributed_sampler": devices > 1}
            compared = (_train(directory, program, devices, each, **options) for each in (ours, theirs))
            found.append((name, *compared))
    return found


@supported("One stage", "manual optimization, any number of optimizers and backwards", "as plain Lightning and DDP do")
@pytest.mark.parametrize("devices", [1, 2])
def test_whatever_trains_under_ddp_trains(tmp_path: Path, devices: int) -> None:
    for rank in on_four_ranks(_both, tmp_path, devices, count=devices):
        for name, ours, theirs in rank:
            _same(ours, theirs, name)


def _methods(directory: Path) -> list[Outcome]:
    ways: list[dict[str, Any]] = [
        {"sync": "semi_decentralized", "data": "dealt"},
        {"sync": "semi_decentralized", "exchange": Exchange(overlap="step"), "data": "sharded"},
        {"sync": LocalSGD(every=3), "exchange": Exchange(EightBit())},
        {"sync": DiLoCo(every=3)},
        {"sync": AllReduce(), "exchange": Exchange(EightBit(feedback=True))},
        {"sync": "semi_decentralized", "variance_correction": True},
    ]
    return [_train(directory, PROGRAMS["adversarial"], 2, SDPipeStrategy(**way), max_epochs=3) for way in ways]


@pytest.mark.distributed
def test_all_optimizers_are_averaged_together_by_every_method(tmp_path: Path) -> None:
    before, (one, other) = Adversarial().state_dict(), on_four_ranks(_methods, tmp_path, count=2)
    for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        assert mine[1] == theirs[1] == 2 * 3 * 4, number  # two optimizers, three epochs of four batches
        for name, value in mine[0].items():
            torch.testing.assert_close(value, theirs[0][name], msg=lambda m, n=name, i=number: f"{i}, {n}: {m}")
            assert value.isfinite().all()
        assert not torch.equal(mine[0]["net.0.weight"], before["net.0.weight"])


def _averages_as_gradients(directory: Path) -> tuple[Outcome, Outcome]:
    ours, ddp = SDPipeStrategy(sync=LocalSGD(every=1)), "ddp"
    first, second = (_train(directory, PROGRAMS["manual"], 2, each) for each in (ours, ddp))
    return first, second


def test_averaged_models_are_those_of_averaged_gradients_with_plain_sgd(tmp_path: Path) -> None:
    for ours, ddp in on_four_ranks(_averages_as_gradients, tmp_path, count=2):
        _same(ours, ddp, "LocalSGD(every=1)")


class OnceMore(ByHand):
    """One pipeline runs another backward on one batch."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if batch_idx == self.batch and self.trainer.global_rank == 1:
            self.manual_backward(self.loss(batch))


def _refused(directory: Path, batch: int) -> str:
    trainer = pipelines(directory, SDPipeStrategy(sync=AllReduce()), max_epochs=1)
    with pytest.raises((ConfigurationError, WorkerFailedError)) as refused:
        trainer.fit(OnceMore(batch), train_loader())
    return str(refused.value)


@pytest.mark.parametrize("batch", [1, 3], ids=["in between", "the last"])
def test_pipelines_that_run_other_backwards_are_named(tmp_path: Path, batch: int) -> None:
    for said in on_four_ranks(_refused, tmp_path, batch, count=2):
        assert "do not run the same backwards" in said
        assert "pipeline 0: " in said
        assert re.search(f"pipeline 1: (backward 2 of update {batch}|backward 1 of update {batch + 1})", said)


def _resumed(directory: Path, distributed: bool) -> tuple[Outcome, Outcome]:
    program, found = PROGRAMS["two schedules"], []
    for epochs, path in ((2, None), (1, None), (2, "half.ckpt")):
        strategy = SDPipeStrategy(sync=AllReduce(), save_distributed_checkpoint=distributed)
        model, trainer = program.module(), pipelines(directory, strategy, max_epochs=epochs, enable_checkpointing=False)
        trainer.fit(model, program.loader(), ckpt_path=path and directory / path)
        if epochs == 1:
            trainer.save_checkpoint(directory / "half.ckpt")
        found.append((weights(model), trainer.global_step))
    return found[0], found[2]


@pytest.mark.parametrize("distributed", [False, True])
def test_states_of_all_optimizers_are_in_checkpoints(tmp_path: Path, distributed: bool) -> None:
    for whole, resumed in on_four_ranks(_resumed, tmp_path, distributed, count=2):
        _same(resumed, whole, "resumed")


def _refused_options(directory: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"num_micro_batches": 2}, "num_micro_batches=2 does not go with the manual optimization of ByHand"),
        ({"sync": AllReduce(), "num_micro_batches": 2, "batch_by_speed": True}, "does not go with the manual"),
        ({"sync": PHDPSGD(group_size=2)}, "averages the gradients of one backward in each update"),
    ]
    for options, said in cases:
        with pytest.raises((ConfigurationError, WorkerFailedError), match=said):
            pipelines(directory, SDPipeStrategy(**options)).fit(ByHand(), train_loader())


def test_options_that_one_backward_needs_are_refused(tmp_path: Path) -> None:
    on_four_ranks(_refused_options, tmp_path, count=2)
