"""Plans and initial values inside a real Trainer, on two processes."""

from __future__ import annotations

import itertools
import queue
import random
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_sdpipe import AllReduce, Balanced, SDPipeStrategy
from lightning_sdpipe.heterogeneity.emulate import EmulatedBlock
from lightning_sdpipe.loop import planning
from lightning_sdpipe.partition.apart import apart
from lightning_sdpipe.partition.profile import profile
from tests.features.running import quiet_trainer


class Model(L.LightningModule):
    """Four blocks, of which the first is slow, built in ``configure_model``."""

    def __init__(self, directory: Path, device: str = "cpu", slow: float = 0.0) -> None:
        super().__init__()
        self.directory, self.build_on, self.slow = directory, device, slow
        self.net: nn.Sequential | None = None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        L.seed_everything(11, verbose=False)
        with torch.device(self.build_on):
            first = EmulatedBlock(self.slow, self.slow) if self.slow else nn.BatchNorm1d(4)
            self.net = nn.Sequential(first, nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        assert self.net is not None
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def on_fit_start(self) -> None:  # later, one process has drawn the seed of its data loader
        assert self.net is not None
        here = {name: t.clone() for name, t in self.state_dict().items() if not t.is_meta}
        torch.save((here, torch.get_rng_state()), self.directory / f"{self.global_rank}.pt")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(
    directory: Path, strategy: Any, devices: int, model: Any = Model, data: Any = None, **options: Any
) -> list[Any]:
    """What each rank has saved of its module: when training starts, for ``Model``."""
    directory.mkdir()
    trainer = quiet_trainer(devices=devices, strategy=strategy, max_epochs=1, enable_checkpointing=False)
    generator = torch.Generator().manual_seed(2)
    data = data or TensorDataset(torch.randn(16, 4, generator=generator), torch.randn(16, 1, generator=generator))
    trainer.fit(model(directory, **options), DataLoader(data, 8))
    return [torch.load(directory / f"{rank}.pt") for rank in range(devices)]


def strategy(**options: Any) -> SDPipeStrategy:
    return SDPipeStrategy(num_stages=2, sync=AllReduce(), start_method="fork", **options)


@pytest.mark.distributed
def test_a_model_built_on_meta_starts_like_one_process(tmp_path: Path) -> None:
    ((expected, _),) = fit(tmp_path / "one", "auto", 1)
    ranks = fit(tmp_path / "two", strategy(), 2, device="meta")
    found: dict[str, Tensor] = {}
    for here, state in ranks:
        assert torch.equal(state, ranks[0][1]), "hooks draw alike on all ranks"
        assert not found.keys() & here.keys()
        found |= here
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.distributed
def test_the_blocks_are_measured_and_cut_by_their_times(tmp_path: Path) -> None:
    first = ["net.0.weight"]
    for partition in ("balanced", Balanced([1.0, 2.0])):
        ranks = fit(tmp_path / f"{partition}"[:8], strategy(partition=partition), 2, slow=0.02)
        assert sorted(list(here) for here, _ in ranks)[0] == first
        assert torch.equal(ranks[0][1], ranks[1][1])


TICKS = itertools.count()


@cache
def cached() -> int:
    return next(TICKS)


class Count:
    number = 0


class NoisyData(Dataset[Tensor]):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(4, generator=self.generator)


class Denoising(L.LightningModule):
    """Keeps what no module attribute shows: the noise is needed before and after the cut."""

    calls = 0

    def __init__(self, directory: Path) -> None:
        super().__init__()
        global TICKS
        TICKS, Denoising.calls = itertools.count(), 0
        cached.cache_clear()
        torch.manual_seed(0)
        self.directory = directory
        self.net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        self.draws = torch.Generator().manual_seed(1), np.random.default_rng(1), random.Random(1)
        self.cycle, self.count, self.array = itertools.cycle([0.1, 0.2, 0.3]), Count(), np.zeros(2)
        self.queues: list[Any] = [queue.Queue(), queue.SimpleQueue()]
        for each in self.queues:
            each.put(0.5)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        generator, numpy, python = self.draws
        noise = torch.randn(x.shape, generator=generator) + 0.1 * self.level()
        noise = noise + float(numpy.random()) + python.random()
        return nn.functional.mse_loss(self.net(x + noise), noise)

    def level(self) -> float:
        Denoising.calls += 1
        self.count.number += 1
        self.array += 1
        values = [each.get() for each in self.queues]
        for each, value in zip(self.queues, values, strict=True):
            each.put(value + 0.1)
        return sum(values) + next(self.cycle) + self.count.number + Denoising.calls + self.array[0] + cached()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_start(self) -> None:
        """What the first draws would be, drawn in a child, so that they are drawn again."""

        def first() -> bytes:
            generator, numpy, python = self.draws
            drawn = [float(torch.rand((), generator=generator)), numpy.random(), python.random(), self.level()]
            return repr(drawn).encode()

        (self.directory / f"first_{self.global_rank}").write_bytes(apart(first, 20))

    def on_train_end(self) -> None:
        here = {name: p for name, p in self.state_dict().items() if not p.is_meta}
        torch.save((here, torch.get_rng_state()), self.directory / f"{self.global_rank}.pt")


@pytest.mark.distributed
@pytest.mark.parametrize("partition", ["uniform", "balanced"])
def test_trying_the_steps_changes_nothing(partition: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = tmp_path / "measured"
    monkeypatch.setattr(planning, "profile", lambda *given: measured.touch() or profile(*given))
    ((expected, _),) = fit(tmp_path / "one", "auto", 1, Denoising, NoisyData())
    ranks = fit(tmp_path / "two", strategy(num_micro_batches=1, partition=partition), 2, Denoising, NoisyData())
    assert measured.exists() == (partition == "balanced")
    firsts = {path.read_text() for path in tmp_path.rglob("first_*")}
    assert len(firsts) == 1
    torch.testing.assert_close(ranks[0][0] | ranks[1][0], expected)
