"""PHD-PSGD on real pipelines, compared with an emulation in one process that follows the same decisions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.heterogeneity import Delays
from lightning_sdpipe.sync import PHDPSGD
from tests.sync.hybrid_emulation import Emulation, Job
from tests.sync.test_methods import EqualReplicas
from tests.test_strategy import Regression, fit

LR, MOMENTUM = 0.05, 0.9
BATCH = 4


def batch(pipeline: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * pipeline + number)
    x = torch.randn(BATCH, 6, generator=generator)
    return x, x.sum(1, keepdim=True) + 0.1 * pipeline


class Rows(IterableDataset[tuple[Tensor, Tensor]]):
    """Mini-batches without a length, so that pipelines may have different numbers of them."""

    def __init__(self, pipeline: int, count: int) -> None:
        self._pipeline, self._count = pipeline, count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(self._count):
            yield from zip(*batch(self._pipeline, number), strict=True)


class OwnData(Regression):
    def __init__(self, rows: list[int], uneven: bool) -> None:
        super().__init__()
        self.rows, self.uneven = rows, uneven

    def train_dataloader(self) -> DataLoader[Any]:
        pipeline = self.trainer.strategy.distributed_sampler_kwargs["rank"]  # type: ignore[attr-defined]
        count = self.rows[pipeline]
        if self.uneven:
            return DataLoader(Rows(pipeline, count), BATCH)
        x, y = (torch.cat(parts) for parts in zip(*(batch(pipeline, n) for n in range(count)), strict=True))
        return DataLoader(TensorDataset(x, y), BATCH)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR, momentum=MOMENTUM)


def loss(module: nn.Module, pipeline: int, number: int) -> Tensor:
    x, y = (tensor.to(torch.float64) for tensor in batch(pipeline, number))
    return nn.functional.mse_loss(module.net(x), y)  # type: ignore[operator]


def stages_of(count: int) -> list[list[str]]:
    blocks = {1: [[0, 1, 2, 3]], 2: [[0, 1], [2, 3]], 4: [[0], [1], [2], [3]]}[count]
    has = (0, 2, 3)
    return [[f"net.{b}.{n}" for b in own if b in has for n in ("weight", "bias")] for own in blocks]


def compare(directory: Path, stages: int, groups: list[list[int]], **options: Any) -> Emulation:
    """Trains, and emulates the same decisions."""
    own = {name: options.pop(name) for name in ("rows", "uneven", "schedule", "delays") if name in options}
    values = {name: options.pop(name) for name in ("asynchronous", "staleness", "every", "sharded") if name in options}
    rows, uneven = own.get("rows", [8] * sum(map(len, groups))), own.get("uneven", False)
    strategy = SDPipeStrategy(
        stages,
        sync=PHDPSGD(groups=groups, **values),  # type: ignore[arg-type]
        schedule=own.get("schedule", "1f1b"),
        delays=own.get("delays"),
        start_method="fork",
        log_dir=directory,
    )
    module, started = OwnData(rows, uneven), OwnData(rows, uneven).double()
    fit(
        directory,
        strategy,
        stages * len(rows),
        BATCH,
        module,
        max_epochs=1,
        precision="64-true",
        callbacks=[EqualReplicas()],
        use_distributed_sampler=False,
        **options,
    )
    job = Job(
        stages_of(stages),
        groups,
        rows,
        loss,
        LR,
        MOMENTUM,
        clip=options.get("gradient_clip_val"),
        uneven=uneven,
        accumulate=options.get("accumulate_grad_batches", 1),
    )
    emulation = Emulation(started, job, directory / "scheduler.jsonl")
    for name, expected in emulation.outcome().items():
        torch.testing.assert_close(module.state_dict()[name], expected.float(), rtol=1e-6, atol=2e-7)  # as float32
    return emulation


SLOW = Delays(0.4, 0.03)


@pytest.mark.distributed
def test_two_groups_of_two(tmp_path: Path) -> None:
    emulation = compare(tmp_path, 2, [[0, 3], [1, 2]])
    assert any(len(group.members) == 4 for group in emulation.groups)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("stages", "groups", "options"),
    [
        (1, [[0], [1], [2], [3]], {"delays": SLOW}),
        (1, [[0, 2], [1]], {"sharded": False, "delays": SLOW, "staleness": 1}),
        (1, [[0, 1], [2, 3], [4, 5]], {"staleness": 2, "every": 3, "delays": SLOW}),
        (1, [[0, 1], [2, 3], [4, 5]], {"asynchronous": True, "staleness": 2, "delays": SLOW}),
        (2, [[0, 1], [2], [3]], {"asynchronous": True, "sharded": False, "delays": SLOW, "staleness": 3}),
        (2, [[0], [1], [2], [3]], {"staleness": 1, "every": 2, "delays": SLOW, "gradient_clip_val": 0.3}),
        (2, [[0, 1], [2, 3]], {"rows": [5, 3, 4, 7], "uneven": True, "delays": SLOW}),
        (2, [[0, 1], [2, 3]], {"rows": [5, 3, 4, 7], "uneven": True, "delays": SLOW, "asynchronous": True}),
        (4, [[0, 1], [2]], {"sharded": False, "staleness": 2, "delays": SLOW, "schedule": "gpipe"}),
        (2, [[0, 1], [2, 3]], {"schedule": "zero_bubble", "accumulate_grad_batches": 2}),
        (2, [[0, 1], [2, 3]], {"schedule": "interleaved_1f1b", "gradient_clip_val": 0.3}),
    ],
    ids=str,
)
def test_it(tmp_path: Path, stages: int, groups: list[list[int]], options: dict[str, Any]) -> None:
    emulation = compare(tmp_path, stages, groups, **options)
    print([(len(g.members), len(g.passive), len(g.standing), g.reason) for g in emulation.groups])
