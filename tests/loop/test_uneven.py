"""Pipelines with different amounts of data, and what is decided by the clock: nobody waits for ever, and all workers
count the same batches."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightning_sdpipe import ADPSGD, AllReduce, SDPipeStrategy, SemiDecentralized
from tests.features.running import Regression, quiet_trainer, samples
from tests.features.table import refused, supported
from tests.loop.numbered import records_of
from tests.patience import limit

PIPELINES = 2
X, Y = samples(64).tensors


def pipeline_of(trainer: L.Trainer) -> int:
    assert isinstance(trainer.strategy, SDPipeStrategy)
    return trainer.strategy.mesh.locate(trainer.global_rank)[1]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """As many batches of 4 as ``batches`` says for the pipeline, without telling beforehand."""

    def __init__(self, batches: tuple[int, ...]) -> None:
        self.batches = batches
        self.trainer: L.Trainer | None = None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        assert self.trainer is not None
        for number in range(4 * self.batches[pipeline_of(self.trainer)]):
            yield X[number], Y[number]


class SizedStream(Stream):
    def __len__(self) -> int:
        return 4 * 7


class Own(Sampler[int]):
    """A sampler of the user's, with shards of different lengths."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        assert self.stream.trainer is not None
        return 4 * self.stream.batches[pipeline_of(self.stream.trainer)]


class Diary(Callback):
    """Writes down, on every rank, what Lightning did when."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.trained = 0
        self.batches = 0
        self.events: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.batches += 1
        self.trained = trainer.strategy.training.mini_batches

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.events.append(["validation", trainer.global_step])

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.events.append(["epoch", trainer.global_step])

    def on_save_checkpoint(self, trainer: L.Trainer, *_: Any) -> None:
        self.events.append(["checkpoint", trainer.global_step])

    def on_fit_end(self, trainer: L.Trainer, *_: Any) -> None:
        record = {"steps": trainer.global_step, "trained": self.trained, "batches": self.batches, "events": self.events}
        record["flushes"] = trainer.strategy.training.parts.pipeline.flushes  # type: ignore[attr-defined]
        (self.directory / f"{trainer.global_rank}.json").write_text(json.dumps(record))


def sdpipe(sync: Any = None, **options: Any) -> SDPipeStrategy:
    sync = sync or SemiDecentralized(window=0.002, connectivity=2)  # waits for others every other step
    options = {"data": "sharded", **options}
    return SDPipeStrategy(2, sync, start_method="fork", timeout=limit(30), **options)


def fit(
    directory: Path,
    loader: Any = None,
    stream: Stream | None = None,
    module: L.LightningModule | None = None,
    callbacks: list[Callback] | None = None,
    strategy: SDPipeStrategy | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """What each rank wrote down of a training run of 2 stages × 2 pipelines."""
    trainer = quiet_trainer(
        devices=2 * PIPELINES,
        strategy=strategy or sdpipe(),
        default_root_dir=directory,
        callbacks=[*(callbacks or []), Diary(directory)],
        num_sanity_val_steps=0,
        **{"enable_checkpointing": bool(callbacks), **options},
    )
    if stream is not None:
        stream.trainer = trainer
    validation = None if isinstance(loader, L.LightningDataModule) else DataLoader(samples(20), 5)
    trainer.fit(module or Regression(), loader or DataLoader(stream, 4), validation)
    return records_of(directory, 2 * PIPELINES)


def same_for_all(records: list[dict[str, Any]], trained: list[int]) -> list[Any]:
    """The events, which must be equal everywhere; ``trained`` is what each pipeline must have trained."""
    assert [records[rank]["trained"] for rank in (0, 2)] == trained
    assert [records[rank]["trained"] for rank in (1, 3)] == trained
    assert all(record["events"] == records[0]["events"] for record in records)
    assert all(record["steps"] == records[0]["steps"] for record in records)
    events: list[Any] = records[0]["events"]
    return events


class Module(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(41), 4, drop_last=True, shuffle=True)  # 5 batches of each shard of 21

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(20), 5)


@supported("Data", "`DataLoader`, `LightningDataModule`, `drop_last`", "with Lightning's own sampler: equal shards")
@pytest.mark.distributed
def test_a_data_module_that_drops_the_last_batch(tmp_path: Path) -> None:
    records = fit(tmp_path, Module())
    assert same_for_all(records, [10, 10]) == [[name, steps] for steps in (5, 10) for name in ("validation", "epoch")]


@supported(
    "Data",
    "`IterableDataset`, samplers of your own, shards of different lengths",
    "also with `val_check_interval`; all ranks count the same batches",
)
@pytest.mark.distributed
@pytest.mark.parametrize("kind", [Stream, *(pytest.param(each, marks=pytest.mark.slow) for each in (SizedStream, Own))])
def test_validation_within_the_epoch_and_uneven_shards(tmp_path: Path, kind: Any) -> None:
    stream = (Stream if kind is Own else kind)((5, 7))
    loader = DataLoader(samples(64), 4, sampler=Own(stream)) if kind is Own else None
    records = fit(tmp_path, loader, stream, val_check_interval=2, use_distributed_sampler=kind is not Own)
    one_epoch = [["validation", 2], ["validation", 4], ["validation", 6], ["epoch", 7]]
    expected = one_epoch + [[name, step + 7] for name, step in one_epoch]
    assert same_for_all(records, [10, 14]) == expected
    assert all(record["batches"] == 14 for record in records)


@pytest.mark.distributed
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_gradients_of_uneven_shards_are_averaged(tmp_path: Path, schedule: str) -> None:
    records = fit(
        tmp_path, stream=Stream((5, 3)), strategy=sdpipe(AllReduce(), schedule=schedule), val_check_interval=2
    )
    assert all(record["flushes"] == (schedule == "1f1b") for record in records)
    one_epoch = ["validation", "validation", "epoch"]
    assert [name for name, _ in same_for_all(records, [10, 6])] == 2 * one_epoch


@supported("Data", "an epoch of unknown length", "with every synchronisation method")
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("batches", "sync"),
    [
        *(((1, 4), None), ((6, 1), None)),  # the leader's is the long one
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in itertools.product([(1, 4), (6, 1)], [AllReduce(), ADPSGD(asynchronous=True)])
        ),
    ],
    ids=repr,
)
def test_one_validation_at_the_end_of_an_epoch_of_unknown_length(
    tmp_path: Path, batches: tuple[int, int], sync: Any
) -> None:
    records = fit(tmp_path, stream=Stream(batches), strategy=sdpipe(sync), accumulate_grad_batches=2)
    longest = max(batches)
    steps = (longest + 1) // 2
    expected = [["validation", steps], ["epoch", steps], ["validation", 2 * steps], ["epoch", 2 * steps]]
    assert same_for_all(records, [2 * n for n in batches]) == expected


@pytest.mark.distributed
def test_max_steps_ends_training_of_all_pipelines_at_once(tmp_path: Path) -> None:
    records = fit(tmp_path, stream=Stream((2, 9)), max_steps=6, max_epochs=-1)
    assert same_for_all(records, [1, 6])[-1] == ["epoch", 6]


@pytest.mark.distributed
def test_checkpoints_by_steps_are_of_all_pipelines(tmp_path: Path) -> None:
    class Logging(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("now", loss, on_step=True)
            return loss

    checkpoint = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1, monitor="now", mode="max")
    records = fit(tmp_path, stream=Stream((4, 8)), module=Logging(), callbacks=[checkpoint], max_epochs=1)
    events = same_for_all(records, [4, 8])
    assert [step for name, step in events if name == "checkpoint"] == [3, 6]
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=3.ckpt", "step=6.ckpt"]


@pytest.mark.distributed
def test_pipedream_drains_with_uneven_shards(tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    records = fit(
        tmp_path, stream=Stream((3, 7)), strategy=sdpipe(schedule="pipedream"), val_check_interval=3, **options
    )
    assert [name for name, _ in same_for_all(records, [6, 14])] == ["validation", "validation", "epoch"] * 2


class SmallSteps(Regression):
    """Stays finite for however many batches of two samples there is time."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@supported(
    "Data", "`max_time`, `ModelCheckpoint(train_time_interval=…)`", "by rank 0's clock, at the same batch on all ranks"
)
@pytest.mark.distributed
def test_the_clock_ends_training_on_all_workers_at_the_same_batch(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, train_time_interval=timedelta(seconds=0.5), save_top_k=-1)
    loader = DataLoader(samples(4000), 2)
    options = {"callbacks": [checkpoint], "max_time": {"seconds": 2.0}, "max_epochs": -1, "limit_val_batches": 0}
    records = fit(tmp_path, loader, module=SmallSteps(), **options)
    steps = records[0]["steps"]
    events = same_for_all(records, [steps, steps])
    assert 2 <= len([name for name, _ in events if name == "checkpoint"]) <= 4
    assert len(list(tmp_path.glob("*.ckpt"))) >= 2


@supported("Data", "`val_check_interval` by time", "Lightning 2.6 and later")
@pytest.mark.distributed
def test_validation_by_the_clock(tmp_path: Path) -> None:
    pytest.importorskip("lightning", minversion="2.6")
    records = fit(
        tmp_path,
        DataLoader(samples(4000), 2),
        module=SmallSteps(),
        val_check_interval={"seconds": 0.2},
        max_time={"seconds": 1.5},
        max_epochs=-1,
    )
    steps = records[0]["steps"]
    assert [name for name, _ in same_for_all(records, [steps, steps])].count("validation") >= 2


class Stopping(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)  # the last stage only comes to the end of this
        if self.global_rank == 2 and batch_idx == 3:
            self.trainer.should_stop = True
        return loss


@supported(
    "Data",
    "`trainer.should_stop` on any rank",
    "within a few seconds where batches are dealt, else at the next validation, checkpoint or end of an epoch",
)
@pytest.mark.distributed
def test_one_rank_that_asks_to_stop_stops_all_where_they_meet_next(tmp_path: Path) -> None:
    records = fit(tmp_path, DataLoader(samples(64), 4), module=Stopping(), val_check_interval=6)
    assert same_for_all(records, [6, 6]) == [["validation", 6], ["epoch", 6]]


class Gathering(Regression):
    """Communicates everywhere a user may."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert self.all_gather(loss).shape == (PIPELINES,)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("rate", optimizer.param_groups[0]["lr"], sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.strategy.barrier()
        assert self.trainer.strategy.broadcast(self.global_rank) == 0


@supported(
    "Data", "`barrier`, `broadcast`, `self.all_gather` in hooks", "`all_gather` gives one value from each pipeline"
)
@pytest.mark.distributed
def test_users_may_communicate_between_pipelines(tmp_path: Path) -> None:
    """Where they do, batches are not dealt."""
    loader, strategy = DataLoader(samples(40), 4), sdpipe(data="auto")
    same_for_all(fit(tmp_path, loader, module=Gathering(), strategy=strategy, max_epochs=1), [5, 5])


class Unfreezing(Regression):
    """Unfreezes the first stage where one pipeline has run out of data."""

    def on_train_epoch_start(self) -> None:
        self.net[:2].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            self.net[:2].requires_grad_(True)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "sync", [AllReduce(), *(pytest.param(sync, marks=pytest.mark.slow) for sync in (None, ADPSGD(asynchronous=True)))]
)
def test_layers_are_unfrozen_by_all_pipelines_also_by_one_without_data(tmp_path: Path, sync: Any) -> None:
    records = fit(tmp_path, stream=Stream((3, 7)), module=Unfreezing(), strategy=sdpipe(sync), val_check_interval=5)
    assert [name for name, _ in same_for_all(records, [6, 14])] == 2 * ["validation", "epoch"]


class Fetching(Regression):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        raise AssertionError("refused before")


_NONE = "This pipeline was given no batches in this epoch"
_FEWER = "a pipeline that has fewer batches than they would not take part"
_FETCHES = "takes a dataloader_iter"


@refused("Data", "a pipeline without any batch", _NONE)
@refused("Data", "communication within a step when shards may differ", _FEWER)
@refused("Data", "`training_step(dataloader_iter)`", _FETCHES)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("stream", "module", "error"),
    [
        (Stream((0, 3)), Regression, _NONE),
        (Stream((3, 3)), Gathering, _FEWER),
        (None, Fetching, _FETCHES),
    ],
)
def test_what_is_refused(tmp_path: Path, stream: Stream | None, module: type[Regression], error: str) -> None:
    loader = None if stream else DataLoader(samples(64), 4)
    with pytest.raises(Exception, match=error):
        fit(tmp_path, loader, stream, module=module())
