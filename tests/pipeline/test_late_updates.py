"""Shared weights, accumulation, clipping by norm and a loss scale without a flush, against one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_sdpipe import AllReduce, SDPipeStrategy
from tests.features.running import Regression, assert_same, on_four_ranks, pipelines, samples, weights
from tests.pipeline.test_side_channels import Notes
from tests.pipeline.without_flush import LossScale, WithoutFlush

pytestmark = pytest.mark.distributed

BATCH = 4
EPOCHS = 2


class Chain(Regression):
    """Two blocks on each of three stages."""

    adam = False

    def __init__(self) -> None:
        super().__init__()
        linear = [nn.Linear(6, 6) for _ in range(3)]
        self.net = nn.Sequential(linear[0], nn.Tanh(), linear[1], nn.Tanh(), linear[2], nn.Linear(6, 1))

    def configure_optimizers(self) -> Any:
        if self.adam:
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)
        else:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.03, momentum=0.5)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Counting(nn.Module):
    def forward(self, x: Tensor, passed: Notes) -> Tensor:
        passed.calls += 1
        passed.values.append(x)
        return torch.tanh(passed.values[0]) / passed.calls + x


class Shared(Chain):
    """The weight of the first block is that of a block on the last stage, and its bias that of one on the second; there
    is a parameter outside of all blocks, and an object that blocks of two stages change."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1], self.net[3] = Counting(), Counting()
        self.net[4].weight, self.net[2].bias = self.net[0].weight, self.net[0].bias
        self.scale = nn.Parameter(torch.tensor(1.5))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        passed = Notes()
        for block in self.net:
            x = block(x, passed) if isinstance(block, Counting) else block(x)
        return nn.functional.mse_loss(x * self.scale, y)


class SharedAdam(Shared):
    adam = True


class ChainAdam(Chain):
    adam = True


@dataclass(frozen=True)
class Run:
    module: type[Chain]
    options: dict[str, Any] = field(default_factory=dict)
    count: int = 40  # samples
    pauses: tuple[int, ...] = ()
    initial_scale: float | None = None
    num_stages: int = 3
    num_pipelines: int = 1


def clipped(by: float) -> dict[str, Any]:
    return {"gradient_clip_val": by}


def accumulated(over: int) -> dict[str, Any]:
    return {"accumulate_grad_batches": over}


RUNS = {
    "shared, pauses": Run(SharedAdam, {"val_check_interval": 3}, pauses=(3, 6, 9)),
    "clipped, pauses": Run(Chain, {**clipped(0.3), "val_check_interval": 4}, pauses=(4, 8)),
    "accumulated 3": Run(ChainAdam, accumulated(3)),  # ten batches: the last window is short
    "accumulated 4, clipped, shared, pauses": Run(  # windows are longer than the pipeline, and pauses within them
        SharedAdam, {**accumulated(4), **clipped(0.2), "val_check_interval": 3}, pauses=(3, 6, 9)
    ),
    "half, shared, accumulated, clipped, overflowing": Run(
        SharedAdam, {**accumulated(2), **clipped(0.2)}, initial_scale=2.0**19, count=80
    ),
}
TWO_PIPELINES = Run(Shared, {**accumulated(3), **clipped(0.2)}, num_stages=2, num_pipelines=2)
GROWTH = 5


def _fit(directory: Path, run: Run) -> tuple[dict[str, Tensor], float]:
    options, plugins = dict(run.options), []
    if run.initial_scale is not None:
        scaler = torch.amp.GradScaler("cpu", init_scale=run.initial_scale, growth_interval=GROWTH)
        plugins.append(MixedPrecision("16-mixed", "cpu", scaler))
    strategy = SDPipeStrategy(run.num_stages, AllReduce(), "pipedream")
    trainer = pipelines(directory, strategy, max_epochs=EPOCHS, plugins=plugins, **options)
    model = run.module()
    loader = DataLoader(samples(run.count), BATCH)
    trainer.fit(model, loader, DataLoader(samples(4), BATCH) if run.pauses else None)
    scale = trainer.precision_plugin.scaler.get_scale() if plugins else 1.0
    return weights(model), scale


def _fit_all(directory: Path, names: list[str]) -> dict[str, tuple[dict[str, Tensor], float]]:
    return {name: _fit(directory / str(number), RUNS[name]) for number, name in enumerate(names)}


def owners(model: Chain, num_stages: int) -> dict[str, list[int]]:
    """The stages that hold each parameter, of six blocks in ``net``."""
    stages: dict[int, set[int]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        block = name.startswith("net.") and int(name.split(".")[1])
        here = range(num_stages) if name == "scale" else [block * num_stages // 6]
        stages.setdefault(id(p), set()).update(here)
    return {name: sorted(stages[id(p)]) for name, p in model.named_parameters()}


def emulate(run: Run) -> tuple[dict[str, Tensor], WithoutFlush]:
    model: Any = run.module()
    configured = model.configure_optimizers()
    emulation = WithoutFlush(
        model,
        model.loss,
        configured["optimizer"],
        owners(model, run.num_stages),
        run.num_stages,
        run.options.get("accumulate_grad_batches", 1),
        run.options.get("gradient_clip_val"),
        None if run.initial_scale is None else LossScale(run.initial_scale, GROWTH),
        configured["lr_scheduler"]["scheduler"].step,
    )
    data, size = samples(run.count), BATCH * run.num_pipelines
    sampler = DistributedSampler(data, num_replicas=1, rank=0)  # which deals samples out to the pipelines in turn
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        order = list(sampler)
        emulation.epoch([data[order[start : start + size]] for start in range(0, run.count, size)], run.pauses)
    return weights(model), emulation


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[dict[str, Tensor], float]]]:
    """What each rank holds after each run, and its loss scale."""
    ranks = on_four_ranks(_fit_all, tmp_path_factory.mktemp("late"), list(RUNS), count=3)
    return {name: [rank[name] for rank in ranks] for name in RUNS}


@pytest.mark.parametrize("name", RUNS)
def test_the_weights_are_those_of_the_emulation(found: Any, name: str) -> None:
    run = RUNS[name]
    parts = [part for part, _ in found[name]]
    half = run.initial_scale is not None
    expected, emulation = emulate(run)
    assert_same(parts, expected, **({"rtol": 2e-3, "atol": 2e-4} if half else {"rtol": 1e-4, "atol": 1e-5}))
    if emulation.loss_scale is not None:
        assert found[name][0][1] == emulation.loss_scale.value  # rank 0 holds the last stage
        assert ("overflowing" in name) == (emulation.loss_scale.skipped > 0)


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if issubclass(run.module, Shared)])
def test_copies_of_a_shared_weight_stay_equal_to_the_bit(found: Any, name: str) -> None:
    parts = [part for part, _ in found[name]]
    for parameter in Shared().state_dict():
        copies = [part[parameter] for part in parts if parameter in part]
        assert all(torch.equal(copy, copies[0]) for copy in copies)


def test_two_pipelines_apply_mean_gradients(tmp_path: Path) -> None:
    """Their norms are those of the means."""
    ranks = on_four_ranks(_fit, tmp_path, TWO_PIPELINES)
    assert_same([part for part, _ in ranks], emulate(TWO_PIPELINES)[0], rtol=1e-4, atol=1e-5)
