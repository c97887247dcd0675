"""What a pipeline tells an exchange of gradients, and when; and when it announces its last backward."""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sdpipe.partition import plan
from lightning_sdpipe.partition.materialise import Initialisation
from lightning_sdpipe.pipeline.gradients import ReadySignal, reported_to
from lightning_sdpipe.pipeline.pipedream import PipeDreamPipeline
from lightning_sdpipe.topology.groups import ProcessGroups
from lightning_sdpipe.topology.mesh import Mesh
from lightning_sdpipe.worker.assembly import Assembled, assemble
from lightning_sdpipe.worker.options import Options
from tests.patience import limit
from tests.pipeline.harness import CPU, TRAIN, check_schedule
from tests.workers import run_workers


class Recorder:
    """Notes what it is told, and halves every gradient; of so many it can make use before the backward ends."""

    def __init__(self, early: int = 2) -> None:
        self.early = range(early)
        self.told: dict[int, Tensor] = {}
        self.events: list[str] = []

    def gradient_ready(self, number: int, gradient: Tensor) -> None:
        assert number in self.early
        assert number not in self.told
        self.told[number] = gradient.clone()
        self.events.append("ready")

    @property
    def signal(self) -> ReadySignal:
        """Of an update that begins."""
        signal = ReadySignal("backward", lambda: self.events.append("announced"))
        signal.expect()
        return signal

    def complete(self, gradients: Sequence[Tensor | None]) -> None:
        self.all = [None if g is None else g.clone() for g in gradients]
        self.events.append("complete")

    def finish(self) -> list[Tensor | None]:
        self.events.append("finish")
        return [None if g is None else g / 2 for g in self.all]


def test_parameters_are_reported_as_the_backward_reaches_them() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    parameters, recorder = list(net.parameters()), Recorder(early=6)
    with reported_to(recorder, parameters, [0, 2, 4]):
        net(torch.ones(1, 2)).sum().backward()
    assert list(recorder.told) == [4, 2, 0]
    assert all(torch.equal(recorder.told[n], parameters[n].grad) for n in (0, 2, 4))
    net(torch.ones(1, 2)).sum().backward()
    assert len(recorder.events) == 3  # no longer


class Tied(L.LightningModule):
    """The first and the last of four blocks share a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(4)))
        self.net[3].weight = self.net[0].weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()


class Chain(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.net[3] = nn.Linear(3, 3, bias=False)


def assembled(module: L.LightningModule, schedule: str) -> Assembled:
    groups = ProcessGroups.open(Mesh.build(2, 2), limit())
    each = 2 if schedule in ("interleaved_1f1b", "zero_bubble") else 1
    stages = plan.plan(module, 2 * each, "uniform", None, lambda _: pytest.fail("a uniform cut measures nothing"))
    options = Options(2, schedule=schedule, stages_per_worker=each, num_micro_batches=4, run_timeout=limit())
    parts = assemble(module, [stages], groups, options, Initialisation(), CPU)
    check_schedule(parts.pipeline, schedule)
    return parts


def train(schedule: str, tied: bool, accumulated: bool, early: int) -> tuple[list[str], int]:
    """What the exchange was told about the second mini-batch; the first has filled PipeDream's pipeline."""
    parts = assembled(Tied() if tied else Chain(), schedule)
    batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    first = Recorder()
    parts.pipeline.train(batch, TRAIN, 0, None if accumulated else first, False, first.signal).backward()
    filling = schedule == "pipedream" and not parts.runners[0].is_last
    assert first.events.count("announced") == (0 if filling else 1)
    before = [None if p.grad is None else p.grad.clone() for p in parts.freezing.trained]
    if not accumulated:
        for p in parts.freezing.trained:
            p.grad = None
    recorder = Recorder(early)
    loss = parts.pipeline.train(batch, TRAIN, 1, recorder, accumulated, recorder.signal)
    told_in_training_step = len(recorder.events)
    loss.backward()
    for n, (p, told) in enumerate(zip(parts.freezing.trained, recorder.all, strict=True)):
        assert p.grad is not None
        assert told is not None
        torch.testing.assert_close(p.grad, told / 2)
        if n in recorder.told:
            torch.testing.assert_close(recorder.told[n], told)
        if accumulated:
            torch.testing.assert_close(told, before[n] * 2)
    last = Recorder()
    while isinstance(parts.pipeline, PipeDreamPipeline) and parts.pipeline.draining:
        parts.pipeline.drain(None, last.signal)
        assert last.events == ["announced"]
    if isinstance(parts.pipeline, PipeDreamPipeline):
        parts.pipeline.finish()
    dist.barrier()  # else this process could end before others have what it sent
    return recorder.events, told_in_training_step


TOLD = [
    # schedule, whether a weight is shared, whether gradients accumulate, how many are of use early:
    # what is told before all are complete, and how much of it before the module's own backward
    (("1f1b", False, False, 2), ["announced", "ready", "ready"], 4),
    (("gpipe", False, False, 2), ["announced", "ready", "ready"], 4),
    (("pipedream", False, False, 2), ["ready", "announced", "ready"], 4),  # by its backward of a whole mini-batch
    (("interleaved_1f1b", False, False, 2), ["announced"], 2),
    (("zero_bubble", False, False, 2), ["announced"], 2),
    (("1f1b", True, False, 2), ["ready", "announced"], 3),  # a shared weight is summed over its stages first
    (("pipedream", True, False, 2), ["ready", "announced"], 3),
    (("1f1b", False, False, 1), ["announced", "ready"], 3),
    (("pipedream", False, False, 1), ["ready", "announced"], 3),
    (("1f1b", False, True, 2), ["announced"], 1),  # gradients that accumulate are exchanged as a sum
]


def train_all(rank: int) -> list[tuple[list[str], int]]:
    return [train(*case) for case, _, _ in TOLD]


@pytest.mark.distributed
def test_gradients_are_reported_once_during_the_last_backward() -> None:
    for told in run_workers(2, train_all):
        for (case, events, in_training_step), found in zip(TOLD, told, strict=True):
            assert found == ([*events, "complete", "finish"], in_training_step), case
