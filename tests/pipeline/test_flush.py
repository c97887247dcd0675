"""Two stages of one pipeline compute what one process computes."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe.groups import ProcessGroups
from lightning_sdpipe.heterogeneity.delays import DelayInjector, Delays
from lightning_sdpipe.mesh import Mesh
from lightning_sdpipe.partition.chain import find_chain
from lightning_sdpipe.partition.cut import cut
from lightning_sdpipe.partition.cut_step import CutModel
from lightning_sdpipe.partition.ownership import assign_owners, keep_only
from lightning_sdpipe.pipeline.flush import FlushPipeline
from lightning_sdpipe.pipeline.link import StageLink
from lightning_sdpipe.pipeline.shared_parameters import SharedParameters
from lightning_sdpipe.pipeline.stage_runner import StageRunner, Step
from tests.workers import run_workers

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=20)
STEP = Step("training_step", (0,), nullcontext)


class TiedModel(L.LightningModule):
    """Embedding and decoder share their weight; a parameter of its own lies outside of every block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            [nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 11)]
        )
        self.layers[-1].weight = self.layers[0].weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        for layer in self.layers:
            x = layer(x) * self.scale
        return nn.functional.cross_entropy(x, y)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)


def batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return tuple(torch.randint(0, 11, (size,), generator=generator) for _ in range(2))  # type: ignore[return-value]


def one_process(sizes: list[int]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    model, outcomes = TiedModel(), []
    for size in sizes:
        model.zero_grad()
        loss = model.training_step(batch(size), 0)
        loss.backward()
        outcomes.append((loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    return outcomes


def pipeline(rank: int, schedule: str, num_stages: int, num_micro_batches: int, sizes: list[int]) -> list[Any]:
    groups = ProcessGroups.open(Mesh.build(num_stages, num_stages), TIMEOUT)
    stage, _ = groups.mesh.locate(rank)
    model = TiedModel()
    chain = find_chain(model)
    spans = cut(len(chain), num_stages)
    ownership = assign_owners(model, chain, spans)
    shared = SharedParameters(model, ownership, groups, TIMEOUT)
    keep_only(model, ownership, stage, CPU)
    link = StageLink(groups.pipeline, groups.mesh.pipeline_ranks(0), stage, CPU)
    runner = StageRunner(model, CutModel(model, chain, [spans[stage]], CPU), spans[stage], link)
    parameters = [p for p in model.parameters() if p.device.type != "meta"]
    delays = DelayInjector(Delays(), stage, 0)
    runtime = FlushPipeline(runner, parameters, shared, delays, schedule, num_micro_batches)
    outcomes = []
    for iteration, size in enumerate(sizes):
        model.zero_grad()
        loss = runtime.train(batch(size), STEP, iteration)
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        outcomes.append((loss.detach(), gradients))
    with torch.no_grad():
        evaluated = runner.evaluate(batch(5), Step("validation_step", (0,), nullcontext))
    link.settle()
    return [outcomes, evaluated]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("schedule", "num_stages", "num_micro_batches"),
    [("1f1b", 2, 1), ("1f1b", 2, 2), ("1f1b", 2, 4), ("1f1b", 4, 4), ("1f1b", 1, 2), ("gpipe", 2, 4)],
)
def test_loss_and_gradients_are_those_of_one_process(schedule: str, num_stages: int, num_micro_batches: int) -> None:
    sizes = [8, 8, 7, 8]  # the third does not divide evenly
    expected = one_process(sizes)
    by_rank = run_workers(num_stages, pipeline, schedule, num_stages, num_micro_batches, sizes)
    for step, (loss, gradients) in enumerate(expected):
        torch.testing.assert_close(by_rank[0][0][step][0], loss, rtol=1e-5, atol=1e-6)  # rank 0 has the last stage
        found = set()
        for outcomes, _ in by_rank:
            for name, gradient in outcomes[step][1].items():
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-5, atol=1e-6)
                found.add(name)
        assert found == gradients.keys()
    torch.testing.assert_close(by_rank[0][1], TiedModel().validation_step(batch(5), 0).detach())
