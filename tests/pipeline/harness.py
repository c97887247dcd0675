"""Runs one pipeline on real processes, and one process to compare it with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.utils._pytree import tree_leaves

from lightning_sdpipe.partition import plan, rehearsal
from lightning_sdpipe.partition.cut_step import CutModel
from lightning_sdpipe.partition.materialise import Initialisation
from lightning_sdpipe.partition.rehearsal import StepCalls
from lightning_sdpipe.partition.rehearsal_result import RehearsalResult
from lightning_sdpipe.pipeline.micro_batches import split
from lightning_sdpipe.pipeline.stage_runner import Step
from lightning_sdpipe.topology.groups import ProcessGroups
from lightning_sdpipe.topology.mesh import Mesh
from lightning_sdpipe.worker.assembly import assemble
from lightning_sdpipe.worker.options import Options
from tests.patience import limit

CPU = torch.device("cpu")
TRAIN = Step("training_step", (0,), nullcontext)
VALIDATE = Step("validation_step", (0,), nullcontext)
Make = Callable[[], L.LightningModule]
Outcome = tuple[Tensor, dict[str, Tensor]]  # the loss, and the gradients or the weights by name


_rehearsals: dict[Any, RehearsalResult] = {}


def planned(
    make: Make,
    model: L.LightningModule,
    num_stages: int,
    batch: Any,
    num_micro_batches: int,
    blocks: Sequence[str] | None,
) -> plan.Plan:
    """As the strategy plans it, where rank 0 rehearses for all: ranks take over what their parent has rehearsed."""
    parts = [part.batch for part in split(batch, num_micro_batches)]
    steps = [
        StepCalls("training_step", [(part, (0,)) for part in (parts[0], parts[-1])], True),
        StepCalls("validation_step", [(batch, (0,))] * 2, False),
    ]
    shapes = tuple(leaf.shape for leaf in tree_leaves(batch))

    def rehearse(chain: Sequence[str]) -> RehearsalResult:
        key = make, num_micro_batches, shapes, tuple(chain)
        if key not in _rehearsals:
            _rehearsals[key] = rehearsal.rehearse(make(), chain, steps, CPU)  # which leaves traces
        return _rehearsals[key]

    return plan.plan(model, num_stages, "uniform", blocks, _no_measure, rehearse)


def one_process(
    make: Make, batches: Sequence[Any], num_micro_batches: int, blocks: Sequence[str] | None = None, num_stages: int = 2
) -> tuple[list[Outcome], Any]:
    """Loss and gradients of every batch, accumulated over its micro-batches, with an SGD step after each; then what
    ``validation_step`` returns for the first batch."""
    model, outcomes = make(), []
    chain = planned(make, model, num_stages, batches[0], num_micro_batches, blocks).chain
    whole = range(len(chain))
    cut_model = CutModel(model, chain, [whole], CPU)  # for its random streams
    for iteration, batch in enumerate(batches):
        model.zero_grad()
        total = torch.zeros(())
        for number, part in enumerate(split(batch, num_micro_batches)):
            cut_model.streams.begin(iteration, number)
            loss = cut_model.run(whole, partial(model.training_step, part.batch, 0), None, None) * part.weight
            loss.backward()
            total += loss.detach()
        outcomes.append((total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
        _step(model)
    cut_model.restore()
    model.eval()
    with torch.no_grad():
        return outcomes, model.validation_step(batches[0], 0)


def pipeline(
    rank: int,
    make: Make,
    batches: Sequence[Any],
    schedule: str,
    num_stages: int,
    num_micro_batches: int,
    stages_per_worker: int = 1,
    blocks: Sequence[str] | None = None,
    dynamic_shapes: bool = False,
) -> tuple[list[Outcome], Any]:
    """This rank's share of what :func:`one_process` returns, and the losses."""
    groups = ProcessGroups.open(Mesh.build(num_stages, num_stages), limit())
    model = make()
    stages = planned(make, model, num_stages * stages_per_worker, batches[0], num_micro_batches, blocks)
    options = Options(
        num_stages,
        schedule=schedule,
        stages_per_worker=stages_per_worker,
        num_micro_batches=num_micro_batches,
        dynamic_shapes=dynamic_shapes,
        run_timeout=limit(),
    )
    parts = assemble(model, [stages], groups, options, Initialisation(), CPU)
    runtime, runners = parts.pipeline, parts.runners
    check_schedule(runtime, schedule)
    outcomes = []
    for iteration, batch in enumerate(batches):
        model.zero_grad()
        loss = runtime.train(batch, replace(TRAIN, stream=(iteration,)), iteration)
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if not p.is_meta and p.grad is not None}
        outcomes.append((loss.detach(), gradients))
        _step(model)
    model.eval()
    with torch.no_grad():
        evaluated = [runner.evaluate(batches[0], VALIDATE) for runner in runners][-1]
    runtime.settle()
    return outcomes, evaluated


def check_schedule(runtime: Any, schedule: str) -> None:
    """That this is the order in which it trains: losses and gradients are the same in every one."""
    assert runtime.flushes == (schedule != "pipedream")
    if runtime.flushes:
        order, _ = runtime._order_of(4)
        of_torch = {"interleaved_1f1b": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble}
        if schedule in of_torch:
            assert type(order.func.__self__) is of_torch[schedule]
        else:
            stage, parts, ahead = order.args
            assert ahead == (parts if schedule == "gpipe" else stage.num_stages - stage.stage_index)


def _step(model: L.LightningModule) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad


def _no_measure(_: Any) -> plan.Profile:
    raise AssertionError("a uniform cut measures nothing")


def assert_same(by_rank: Sequence[tuple[list[Outcome], Any]], expected: tuple[list[Outcome], Any]) -> None:
    """Every rank's gradients are those of the one process, together they are all, and so are losses and outputs."""
    for step, (loss, gradients) in enumerate(expected[0]):
        found = set()
        for outcomes, _ in by_rank:
            torch.testing.assert_close(outcomes[step][0], loss, rtol=1e-5, atol=1e-5)
            for name, gradient in outcomes[step][1].items():
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-5, atol=1e-5, msg=name)
                found.add(name)
        assert found == gradients.keys()
    torch.testing.assert_close(by_rank[0][1], expected[1], rtol=1e-5, atol=1e-5)
