"""All-reduce over micro-batches that are divided by speed, on real processes: exact, whoever trains what."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_sdpipe import AllReduce, ConfigurationError, SDPipeStrategy
from lightning_sdpipe.heterogeneity.slowdowns import Static
from lightning_sdpipe.loop.joint import JointBatchSource, refuse_small_last_batch
from tests.features.running import quiet_trainer
from tests.loop.numbered import Diary, Numbered, Slow, records_of
from tests.patience import limit

SECONDS = 0.001
BATCH = 6
SAMPLES = 12 * 2 * BATCH + 8  # of two pipelines; their last batch is smaller


def weekday(index: int) -> float:
    return (index % 7) / 7


class Model(L.LightningModule):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(
            nn.Linear(2, 6), Slow(SECONDS), nn.Dropout(dropout), nn.Linear(6, 6), Slow(SECONDS), nn.Linear(6, 1)
        )
        self.seen: list[Any] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, indices = batch
        self.seen.append((self.current_epoch, batch_idx, indices.tolist()))
        loss = nn.functional.mse_loss(self.net(x), x.sum(1, keepdim=True))
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[0].sum(1, keepdim=True)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.5)


def fit(
    directory: Path,
    factors: tuple[float, ...],
    *,
    by_speed: bool = True,
    stages: int = 1,
    dropout: float = 0.0,
    workers: int = 0,
    strategy: dict[str, Any] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """What each rank wrote down; one rank is one process that trains the batches of two pipelines."""
    directory.mkdir(exist_ok=True)
    if len(factors) > 1:
        given: dict[str, Any] = {"sync": AllReduce(), "num_micro_batches": 4, "batch_by_speed": by_speed}
        chosen: Any = SDPipeStrategy(
            stages,
            delays=Static(factors),
            start_method="fork",
            timeout=limit(30),
            **{**given, **(strategy or {})},
        )
        loader = DataLoader(Numbered(SAMPLES, weekday), BATCH, shuffle=True, num_workers=workers)
    else:
        chosen, data = "auto", Numbered(SAMPLES, weekday)
        loader = DataLoader(data, 2 * BATCH, sampler=DistributedSampler(data, 1, 0))
    trainer = quiet_trainer(
        devices=len(factors),
        strategy=chosen,
        default_root_dir=directory,
        callbacks=[Diary(directory)],
        **options,
    )
    trainer.fit(Model(dropout), loader, DataLoader(Numbered(8, weekday), 2))
    return records_of(directory, len(factors))


def assert_same_weights(records: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    expected = {name: value for record in whole for name, value in record["weights"].items()}
    for record in records:
        for name, value in record["weights"].items():
            torch.testing.assert_close(torch.tensor(value), torch.tensor(expected[name]), rtol=1e-5, atol=1e-6)


def once_each(records: list[dict[str, Any]], epochs: list[int]) -> None:
    for epoch in epochs:
        trained = [indices for record in records for e, _, indices in record["seen"] if e == epoch]
        assert sorted(chain.from_iterable(trained)) == list(range(SAMPLES))


@pytest.fixture
def changing_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """First one pipeline is said to be faster, then the other, whatever this machine has to do meanwhile."""
    said = cycle([[9.0, 1.0], [1.0, 3.0], [4.0, 1.0], [1.0, 9.0], [1.0, 1.0]])
    monkeypatch.setattr(JointBatchSource, "_measured", lambda _: next(said))


@pytest.mark.distributed
@pytest.mark.usefixtures("changing_speeds")
@pytest.mark.parametrize(("stages", "workers"), [(1, 1), (2, 0)])
def test_it_computes_what_one_process_computes(tmp_path: Path, stages: int, workers: int) -> None:
    """With accumulation that the epoch cuts short, micro-batches of unlike sizes and a smaller last batch."""
    factors = (1.0,) * 2 * stages
    options = {"accumulate_grad_batches": 2}
    records = fit(tmp_path / "ours", factors, stages=stages, workers=workers, **options)
    (whole,) = fit(tmp_path / "whole", (1.0,), **options)
    assert_same_weights(records, [whole])
    for record in records:
        assert record["metrics"]["loss"] == pytest.approx(whole["metrics"]["loss"], rel=1e-5)
    for stage in range(stages):
        once_each(records[stage::stages], [0, 1])
    counts = [max(record["sizes"]) for record in records[::stages]]
    assert min(counts) > BATCH


@pytest.mark.distributed
def test_who_trains_a_micro_batch_does_not_change_what_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with equal speeds everybody trains its own shard."""
    shards = fit(tmp_path / "shards", (1.0, 1.0), by_speed=False, dropout=0.3)
    monkeypatch.setattr(JointBatchSource, "_measured", lambda _: [1.0, 1.02])
    equal = fit(tmp_path / "equal", (1.0, 1.0), dropout=0.3)
    monkeypatch.setattr(JointBatchSource, "_measured", lambda _: [1.0, 3.0])
    unequal = fit(tmp_path / "unequal", (1.0, 1.0), dropout=0.3)
    assert_same_weights(equal, shards)
    assert_same_weights(unequal, shards)
    assert [record["seen"] for record in equal] == [record["seen"] for record in shards]
    assert [max(record["sizes"]) for record in unequal] == [10, BATCH]  # the last two of eight are of one sample each
    assert [min(record["sizes"][3:12]) for record in unequal] == [10, 2]


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.zeros(2)])


class Weighs(Model):
    def weigh_batch(self, batch: Any) -> float:
        return 1.0


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("module", "loader", "message"),
    [
        (Model(), DataLoader(Endless(), BATCH), "an IterableDataset is read in order"),
        (Model(), DataLoader(Numbered(8), None), "a loader with batch_size=None gives whole batches"),
        (Model(), [DataLoader(Numbered(8), 4)] * 2, "there are several train dataloaders"),
        (Weighs(), DataLoader(Numbered(8), 4), "Weighs has a weigh_batch, and here each sample counts alike"),
        (Model(), DataLoader(Numbered(6), 4), "A batch of 2 samples cannot be split into num_micro_batches=4"),
    ],
    ids=["iterable", "unbatched", "several", "weighs", "small"],
)
def test_what_cannot_be_divided_is_refused(tmp_path: Path, module: Any, loader: Any, message: str) -> None:
    strategy = SDPipeStrategy(sync=AllReduce(), num_micro_batches=4, batch_by_speed=True, start_method="fork")
    begins = LambdaCallback(on_train_batch_start=lambda *_: (tmp_path / "begun").touch())
    trainer = quiet_trainer(devices=1, strategy=strategy, default_root_dir=tmp_path, callbacks=[begins], max_epochs=1)
    with pytest.raises(Exception, match=message):
        trainer.fit(module, loader)
    assert not (tmp_path / "begun").exists()


def test_a_small_last_batch_to_which_no_epoch_comes_is_not_refused() -> None:
    loader = DataLoader(Numbered(6), 4)
    for trained in (1, 0.5):
        refuse_small_last_batch(SimpleNamespace(limit_train_batches=trained), loader, 4)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="A batch of 2 samples cannot be split"):
        refuse_small_last_batch(SimpleNamespace(limit_train_batches=1.0), loader, 4)  # type: ignore[arg-type]
