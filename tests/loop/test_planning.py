"""What rank 0 finds out before training."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.loop import planning
from lightning_sdpipe.partition.pipeline_cut import PipelineCut
from lightning_sdpipe.partition.rehearsal import StepCalls


def to_plan(partition: Any) -> Any:
    module = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
    trainer = SimpleNamespace(
        lightning_module=module, state=SimpleNamespace(fn=TrainerFn.FITTING), fit_loop=None, precision_plugin=None
    )
    return SimpleNamespace(
        trainer=trainer, cuts=[PipelineCut(2, partition)], names=None, memory=1e9, notes=[], device=torch.device("cpu")
    )


def made(given: Any, *steps: StepCalls) -> Any:
    """The plan that is made in this process, with these steps."""
    module, cpu = given.trainer.lightning_module, torch.device("cpu")

    def measure(blocks: Any) -> Any:
        return planning._measure(given, module, blocks, *planning._calls_to_measure(given)[0])

    def count(step: StepCalls) -> Any:
        return planning.rehearsal.count(module, step, planning.rates_of(cpu), cpu)

    trial = planning._Trial(lambda: module, cpu, measure, count, lambda _: None, operator.call, None)
    (plan,) = planning._made(given, steps, trial)
    return plan


def test_a_loader_that_gives_no_batch_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_batch(*_: Any) -> Any:
        raise TypeError("cannot pickle 'generator' object")

    monkeypatch.setattr(planning, "_calls", no_batch)
    said = r"measures the blocks with a batch, and none could be had before training \(TypeError: cannot pickle"
    with pytest.raises(ConfigurationError, match=said):
        made(to_plan("balanced"))
    assert [len(span) for span in made(to_plan("auto")).spans] == [2, 2]


def test_work_that_cannot_be_counted_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(*_: Any) -> Any:
        raise RuntimeError("no formula for an operation")

    monkeypatch.setattr(planning.rehearsal, "count", count)
    monkeypatch.setattr(planning.rehearsal, "rehearse", lambda *_: None)
    given = to_plan("auto")
    plan = made(given, StepCalls("forward", [(torch.ones(1, 2), ())], True))
    assert [len(span) for span in plan.spans] == [2, 2], "by bytes"
    (said,) = given.notes
    assert said.startswith("The work of a step could not be counted (RuntimeError: no formula for an operation), so")


def test_memory_is_the_devices_or_a_part_of_the_machines() -> None:
    machine = planning.memory_of(torch.device("cpu"), 1)
    assert planning.memory_of(torch.device("cpu"), 4) == machine / 4
    assert 2**28 < machine < 2**50


@pytest.mark.parametrize(
    ("initialised", "forked", "count"), [(True, False, 1), (False, True, 1), (False, False, 1), (False, True, 0)]
)
def test_a_child_knows_that_its_parent_has_opened_the_accelerator(
    monkeypatch: pytest.MonkeyPatch, initialised: bool, forked: bool, count: int
) -> None:
    """CUDA tells the child of a process that has initialised it that it is not initialised, only badly forked. It says
    so too where the parent has looked for devices in vain, as each Trainer does."""
    module = SimpleNamespace(
        is_initialized=lambda: initialised, _is_in_bad_fork=lambda: forked, device_count=lambda: count
    )
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    assert planning._has_opened_an_accelerator() == (initialised or (forked and count > 0))
