"""Pipelines with different amounts of data, and what is decided by the clock: nobody waits for ever, and all workers
count the same batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning_utilities.core.imports import RequirementCache
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightning_sdpipe import ADPSGD, AllReduce, SDPipeStrategy, SemiDecentralized
from tests.features.running import Regression, on_four_ranks, on_pipelines, quiet_trainer, samples
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
    options = {"data": "sharded", "start_method": "popen" if on_pipelines() else "fork", **options}
    return SDPipeStrategy(2, sync, timeout=limit(30), **options)


def fit(
    directory: Path,
    *,
    loader: Any = None,
    stream: Stream | None = None,
    module: L.LightningModule | None = None,
    callbacks: list[Callback] | None = None,
    strategy: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> None:
    """Train 2 stages × 2 pipelines; each rank writes down what happens."""
    trainer = quiet_trainer(
        devices=2 * PIPELINES,
        strategy=sdpipe(**strategy),
        default_root_dir=directory,
        callbacks=[*(callbacks or []), Diary(directory)],
        **{"enable_checkpointing": bool(callbacks), **options},
    )
    if stream is not None:
        stream.trainer = trainer
    validation = None if isinstance(loader, L.LightningDataModule) else DataLoader(samples(20), 5)
    trainer.fit(module or Regression(), loader or DataLoader(stream, 4), validation)


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


class Logging(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("now", loss, on_step=True)
        return loss


class Stopping(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)  # the last stage only comes to the end of this
        if self.global_rank == 2 and batch_idx == 3:
            self.trainer.should_stop = True
        return loss


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


class Unfreezing(Regression):
    """Unfreezes the first stage where one pipeline has run out of data."""

    def on_train_epoch_start(self) -> None:
        self.net[:2].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            self.net[:2].requires_grad_(True)


def _by_steps(path: Path) -> None:
    saver = ModelCheckpoint(path, "{step}", every_n_train_steps=3, save_top_k=-1, monitor="now", mode="max")
    fit(path, stream=Stream((4, 8)), module=Logging(), callbacks=[saver], max_epochs=1)
    assert sorted(file.name for file in path.glob("*.ckpt")) == ["step=3.ckpt", "step=6.ckpt"]


def _by_the_clock(path: Path, **options: Any) -> None:
    fit(path, loader=DataLoader(samples(4000), 2), module=Regression(0.01), max_epochs=-1, **options)


def _max_time(path: Path) -> None:
    saver = ModelCheckpoint(path, train_time_interval=timedelta(seconds=0.5), save_top_k=-1)
    _by_the_clock(path, callbacks=[saver], max_time={"seconds": 2.0}, limit_val_batches=0)
    assert len(list(path.glob("*.ckpt"))) >= 2


def _twice(*events: tuple[str, int]) -> list[list[Any]]:
    """The same events in both epochs; the last one says how many steps there are."""
    return [[name, step + begun] for begun in (0, events[-1][1]) for name, step in events]


def _names(events: list[Any]) -> list[str]:
    return [name for name, _ in events]


class Case(NamedTuple):
    """What to fit; how many batches each pipeline trains, None if the clock decides; and the events: all of them, their
    names, or whether they are those that are expected."""

    fit: Callable[..., None]
    trained: list[int] | None
    events: list[Any] | Callable[[list[Any]], bool]
    slow: bool = False


def _case(trained: list[int] | None, events: Any, *, slow: bool = False, **options: Any) -> Case:
    return Case(partial(fit, **options), trained, events, slow)


METHODS: dict[str, Any] = {"": None, "all_reduce": AllReduce(), "ad_psgd": ADPSGD(asynchronous=True)}
WITHIN = Stream((5, 7)), SizedStream((5, 7)), Own(Stream((5, 7)))
TWICE = ["validation", "validation", "epoch"] * 2
CASES: dict[str, Case] = {
    "drop_last": _case([10, 10], _twice(("validation", 5), ("epoch", 5)), loader=Module()),
    "max_steps": _case([1, 6], lambda e: e[-1] == ["epoch", 6], stream=Stream((2, 9)), max_steps=6, max_epochs=-1),
    "checkpoints": Case(_by_steps, [4, 8], lambda e: [s for name, s in e if name == "checkpoint"] == [3, 6]),
    "max_time": Case(_max_time, None, lambda e: 2 <= _names(e).count("checkpoint") <= 4),
    "should_stop": _case(
        [6, 6], [["validation", 6], ["epoch", 6]], loader=DataLoader(samples(64), 4), module=Stopping(),
        val_check_interval=6,
    ),
    "communication": _case(  # where there is any, batches are not dealt
        [5, 5], ["validation", "epoch"], loader=DataLoader(samples(40), 4), module=Gathering(),
        strategy={"data": "auto"}, max_epochs=1,
    ),
    "pipedream drains": _case(
        [6, 14], TWICE, stream=Stream((3, 7)), strategy={"schedule": "pipedream"}, val_check_interval=3,
        accumulate_grad_batches=2, gradient_clip_val=0.5,
    ),
}  # fmt: skip
if RequirementCache("lightning>=2.6"):
    options: Any = {"val_check_interval": {"seconds": 0.2}, "max_time": {"seconds": 1.5}}
    CASES["validation by time"] = Case(
        partial(_by_the_clock, **options), None, lambda e: _names(e).count("validation") >= 2
    )
for number, each in enumerate(WITHIN):
    own = {"loader": DataLoader(samples(64), 4, sampler=each)} if isinstance(each, Own) else {}
    CASES[f"within the epoch {number}"] = _case(
        [10, 14], _twice(("validation", 2), ("validation", 4), ("validation", 6), ("epoch", 7)), slow=number > 0,
        stream=each.stream if isinstance(each, Own) else each, val_check_interval=2,
        use_distributed_sampler=not own, **own,
    )  # fmt: skip
for schedule in ("1f1b", "pipedream"):
    ways = {"sync": AllReduce(), "schedule": schedule}
    CASES[f"gradients, {schedule}"] = _case([10, 6], TWICE, stream=Stream((5, 3)), strategy=ways, val_check_interval=2)
for name, sync in METHODS.items():
    for batches in ((1, 4), (6, 1)):  # the leader's is the long one
        steps = (max(batches) + 1) // 2
        CASES[f"of unknown length {batches} {name}"] = _case(
            [2 * n for n in batches], _twice(("validation", steps), ("epoch", steps)), slow=bool(name),
            stream=Stream(batches), strategy={"sync": sync}, accumulate_grad_batches=2,
        )  # fmt: skip
    CASES[f"unfrozen {name}"] = _case(
        [6, 14], ["validation", "epoch"] * 2, slow=name != "all_reduce",
        stream=Stream((3, 7)), module=Unfreezing(), strategy={"sync": sync}, val_check_interval=5,
    )  # fmt: skip


def _fit_all(directory: Path, names: list[str]) -> None:
    for name in names:
        (directory / name).mkdir(exist_ok=True)
        CASES[name].fit(directory / name)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """What each rank wrote down of a case. All that are not slow share the ranks."""
    directory = tmp_path_factory.mktemp("uneven")

    def of(name: str) -> list[dict[str, Any]]:
        if not (directory / name).exists():
            names = [name] if CASES[name].slow else [each for each, case in CASES.items() if not case.slow]
            on_four_ranks(_fit_all, directory, names)
        return records_of(directory / name, 2 * PIPELINES)

    return of


@supported("Data", "`DataLoader`, `LightningDataModule`, `drop_last`", "with Lightning's own sampler: equal shards")
@supported(
    "Data",
    "`IterableDataset`, samplers of your own, shards of different lengths",
    "also with `val_check_interval`; all ranks count the same batches",
)
@supported("Data", "an epoch of unknown length", "with every synchronisation method")
@supported(
    "Data", "`max_time`, `ModelCheckpoint(train_time_interval=…)`", "by rank 0's clock, at the same batch on all ranks"
)
@supported("Data", "`val_check_interval` by time")
@supported(
    "Data",
    "`trainer.should_stop` on any rank",
    "within a few seconds where batches are dealt, else at the next validation, checkpoint or end of an epoch",
)
@supported(
    "Data", "`barrier`, `broadcast`, `self.all_gather` in hooks", "`all_gather` gives one value from each pipeline"
)
@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * case.slow) for name, case in CASES.items()]
)
def test_all_workers_count_alike(records: Callable[[str], list[dict[str, Any]]], name: str) -> None:
    case, found = CASES[name], records(name)
    events = same_for_all(found, case.trained or [found[0]["steps"]] * 2)
    if callable(case.events):
        assert case.events(events), events
    else:
        assert case.events in (events, _names(events))
    assert all(record["flushes"] == ("pipedream" not in name) for record in found)
    assert "within" not in name or all(record["batches"] == 14 for record in found)


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
    [(Stream((0, 3)), Regression, _NONE), (Stream((3, 3)), Gathering, _FEWER), (None, Fetching, _FETCHES)],
)
def test_what_is_refused(tmp_path: Path, stream: Stream | None, module: type[Regression], error: str) -> None:
    loader = None if stream else DataLoader(samples(64), 4)
    with pytest.raises(Exception, match=error):
        fit(tmp_path, loader=loader, stream=stream, module=module())
