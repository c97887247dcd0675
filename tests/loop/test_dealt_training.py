"""Whole runs over batches that are dealt by speed, on real processes: what is trained, and what hooks see of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.dealing.leases import Lease, Segment
from lightning_sdpipe.heterogeneity.slowdowns import Static
from lightning_sdpipe.scheduler.client.client import SchedulerClient
from lightning_sdpipe.sync import (
    ADPSGD,
    PHDPSGD,
    AllReduce,
    Decentralized,
    DiLoCo,
    LocalSGD,
    NoSync,
    PartialReduce,
    SemiDecentralized,
)
from lightning_sdpipe.sync.rendezvous import Rendezvous
from tests.features.running import on_four_ranks, quiet_trainer
from tests.loop.numbered import Diary, Numbered, Slow, records_of
from tests.patience import limit

SECONDS = 0.02
BATCH = 2


class Model(L.LightningModule):
    """Takes about as long for each batch, notes those that it trains, and follows OneCycleLR."""

    def __init__(self, seconds: float = SECONDS) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(2, 4), Slow(seconds), nn.Linear(4, 1))
        self.seen: list[Any] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, indices = batch
        self.seen.append((self.current_epoch, indices.tolist(), x[:, 1].tolist(), torch.rand(()).item()))
        return nn.functional.mse_loss(self.net(x), x[:, :1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[0][:, :1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(directory: Path, sync: Any, factors: tuple[float, ...], batches: int, **options: Any) -> list[dict[str, Any]]:
    """What each rank wrote down of :func:`train`."""
    train(directory, sync, factors, batches, **options)
    return records_of(directory, len(factors))


def train(
    directory: Path,
    sync: Any,
    factors: tuple[float, ...],
    batches: int,
    *,
    data: Any = "dealt",
    stages: int = 1,
    schedule: Any = "1f1b",
    workers: int = 0,
    draws: bool = True,
    callbacks: tuple[Callback, ...] = (),
    ckpt_path: Path | None = None,
    by_speed: dict[str, Any] | None = None,
    seconds: float = SECONDS,
    start_method: Any = "fork",
    **options: Any,
) -> None:
    """``factors`` are those of the ranks, ``batches`` those of each pipeline."""
    directory.mkdir(exist_ok=True)
    strategy = SDPipeStrategy(
        stages,
        sync,
        schedule=schedule,
        data=data,
        **(by_speed or {}),
        delays=Static(factors),
        start_method=start_method,
        timeout=limit(30),
    )
    trainer = quiet_trainer(
        devices=len(factors),
        strategy=strategy,
        default_root_dir=directory,
        callbacks=[*callbacks, Diary(directory)],
        **{"enable_checkpointing": bool(callbacks), **options},
    )
    size = batches * BATCH * len(factors) // stages
    loader = DataLoader(Numbered(size, drawn if draws else 0.5), BATCH, shuffle=True, num_workers=workers)
    trainer.fit(Model(seconds), loader, DataLoader(Numbered(8, drawn), BATCH), ckpt_path=ckpt_path)


def drawn(index: int) -> float:
    return torch.rand(()).item()


def once_each(records: list[dict[str, Any]], epochs: list[int], samples: int) -> list[int]:
    """Checks that every sample was trained once in each epoch; returns how many batches each pipeline trained."""
    for epoch in epochs:
        batches = [indices for record in records for e, indices, _, _ in record["seen"] if e == epoch]
        assert sorted(chain.from_iterable(batches)) == list(range(samples))
    return [len(record["seen"]) for record in records]


def agreed(records: list[dict[str, Any]]) -> list[Any]:
    """The events, equal for all; and the counters never fell."""
    for record in records:
        assert record["events"] == records[0]["events"]
        assert record["steps"] == sorted(record["steps"])
        assert record["steps"][-1] == records[0]["steps"][-1]
        assert record["schedule"] == records[0]["schedule"]
        for name, value in record["weights"].items():
            assert value == records[0]["weights"].get(name, value)
    events: list[Any] = records[0]["events"]
    return events


def one_cycle(steps: int, total: int) -> float:
    """The rate after so many steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], 0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total)
    for _ in range(steps):
        optimizer.step()
        schedule.step()
    return float(schedule.get_last_lr()[0])


METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SemiDecentralized": (SemiDecentralized(window=0.002), {}),
    "NoSync": (NoSync(), {}),
    "PartialReduce": (PartialReduce(group_size=2), {}),
    "ADPSGD": (ADPSGD(asynchronous=True), {}),
    "in step: SemiDecentralized": (SemiDecentralized(window="inf"), {}),
    "in step: AllReduce": (AllReduce(), {}),
    "in step: AllReduce by speed": (AllReduce(), {"by_speed": {"batch_by_speed": True, "num_micro_batches": 2}}),
    "in step: LocalSGD": (LocalSGD(2), {}),
    "in step: ADPSGD": (ADPSGD(asynchronous=False), {}),
    "in step: DiLoCo": (DiLoCo(every=2, momentum=0.0), {}),
    "in step: Decentralized": (Decentralized(), {}),
    "in step: PHDPSGD": (PHDPSGD(group_size=2), {}),
}
GENERATIONS = (1.0, 1.0, 2.0, 4.0)


IN_MAKE_TEST_ALL = {
    *("NoSync", "PartialReduce", "in step: SemiDecentralized", "in step: AllReduce", "in step: LocalSGD"),
    *("in step: ADPSGD", "in step: Decentralized"),
}
"""Others come as near: one whose pipelines leave, one in pairs, and in step one by speed, one by rounds, one of groups
that average gradients."""


def every_method(directory: Path, names: Collection[str]) -> None:
    for name in sorted(names):
        sync, options = METHODS[name]
        place = directory / name
        saver = ModelCheckpoint(place, every_n_train_steps=6, save_top_k=-1)
        options = {"callbacks": (saver,), "val_check_interval": 4, "data": "auto", **options}
        options["seconds"] = SECONDS / 4 if name.startswith("in step") else SECONDS
        train(place, sync, GENERATIONS, 8, start_method="popen", **options)  # by whoever has called this


@pytest.fixture(scope="module")
def generations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of most methods in turn, on the same processes."""
    directory = tmp_path_factory.mktemp("generations")
    on_four_ranks(every_method, directory, METHODS.keys() - IN_MAKE_TEST_ALL)
    return directory


@pytest.mark.distributed
@pytest.mark.parametrize("name", sorted(METHODS.keys() - IN_MAKE_TEST_ALL))
def test_two_epochs_on_devices_of_several_generations(generations: Path, name: str) -> None:
    """By default, with every method: the schedule ends exactly, and validation and checkpoints come at the same
    progress everywhere."""
    check_two_epochs(generations, name)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", sorted(IN_MAKE_TEST_ALL))
def test_two_epochs_of_methods_that_others_come_near(tmp_path: Path, name: str) -> None:
    on_four_ranks(every_method, tmp_path, [name])
    check_two_epochs(tmp_path, name)


def check_two_epochs(directory: Path, name: str) -> None:
    records = records_of(directory / name, 4)
    counts = once_each(records, [0, 1], 8 * BATCH * 4)
    if name.startswith("in step") and not name.endswith("by speed"):
        assert counts == [16] * 4
    events = agreed(records)
    assert [event[1] for event in events if event[0] == "validation"] == [4, 8, 12, 16]
    assert [event[1] for event in events if event[0] == "epoch"] == [8, 16]
    assert [event[1] for event in events if event[0] == "checkpoint"] == [6, 12]
    ((last, (rate,)),) = records[0]["schedule"]
    assert last == 16
    assert rate == one_cycle(16, 16)


@pytest.mark.distributed
def test_equal_devices_are_told_of_the_progress_that_a_sharded_run_makes(tmp_path: Path) -> None:
    """With accumulation that the epoch cuts short. Who trains what depends on when devices ask; the order in which
    equal ones are dealt batches is that of their shards (tests/dealing/test_dealer.py)."""
    sync, options = SemiDecentralized(window="inf"), {"accumulate_grad_batches": 2, "val_check_interval": 4}
    sharded, dealt = (
        fit(tmp_path / data, sync, (1.0, 1.0), 7, data=data, draws=False, **options) for data in ("sharded", "dealt")
    )
    for records in (sharded, dealt):
        assert sum(once_each(records, [0, 1], 7 * BATCH * 2)) == 28
    assert agreed(dealt) == agreed(sharded)
    assert dealt[0]["schedule"] == sharded[0]["schedule"]


@pytest.mark.distributed
@pytest.mark.filterwarnings("error:.*dataloader is not resumable")  # Lightning's, which would be wrong here
@pytest.mark.parametrize("data", ["dealt", "sharded"])
def test_resuming_in_mid_epoch_neither_repeats_nor_skips(tmp_path: Path, data: str) -> None:
    """Whoever has written the checkpoint."""
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=5, save_top_k=-1)
    first = fit(tmp_path / "first", NoSync(), (1.0, 3.0), 8, data=data, callbacks=(saver,), max_epochs=1)
    assert data == "dealt" or [len(record["seen"]) for record in first] == [8, 8]
    for record in first:
        record["seen"] = record["seen"][: record["saved"][0]]
    path = tmp_path / "step=5.ckpt"
    rest = fit(tmp_path / "rest", NoSync(), (3.0, 1.0), 8, ckpt_path=path, max_epochs=1)
    assert sum(once_each([*first, *rest], [0], 8 * BATCH * 2)) == 16
    assert sum(len(record["seen"]) for record in first) == 10
    assert agreed(rest) == [["validation", 8, 7], ["epoch", 8]]


@pytest.mark.distributed
@pytest.mark.filterwarnings("error:.*dataloader is not resumable")
@pytest.mark.parametrize("how", ["dealt", "by speed"])
def test_other_pipelines_go_on_in_mid_epoch(tmp_path: Path, how: str) -> None:
    sync: Any = NoSync() if how == "dealt" else AllReduce()
    options: dict[str, Any] = {"max_epochs": 1}
    if how == "by speed":
        options |= {"data": "auto", "by_speed": {"batch_by_speed": True, "num_micro_batches": 2}}
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=8, save_top_k=-1)
    first = fit(tmp_path / "first", sync, (1.0, 2.0), 12, callbacks=(saver,), **options)
    for record in first:
        record["seen"] = record["seen"][: record["saved"][0]]
    rest = fit(tmp_path / "rest", sync, (1.0, 1.0, 2.0, 1.0), 6, ckpt_path=tmp_path / "step=8.ckpt", **options)
    assert all(("one batch of all" in record["source"]) == (how == "by speed") for record in [*first, *rest])
    once_each([*first, *rest], [0], 12 * BATCH * 2)
    assert sum(len(indices) for record in first for _, indices, *_ in record["seen"]) == 8 * BATCH * 2
    assert agreed(rest) == [["validation", 10, 5], ["epoch", 10]]


@pytest.mark.distributed
def test_resuming_on_other_pipelines(tmp_path: Path) -> None:
    """At the end of an epoch nothing is in the way. In the middle of one, batches are dealt by default from the next
    epoch on."""
    savers = (
        ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=6, save_top_k=-1),
        ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1),
    )
    fit(tmp_path / "first", NoSync(), (1.0, 1.0), 9, callbacks=savers)
    factors = (1.0, 1.0, 3.0)
    middle, end = tmp_path / "step=6.ckpt", tmp_path / "epoch=0.ckpt"
    records = fit(tmp_path / "end", NoSync(), factors, 6, ckpt_path=end)
    once_each(records, [1], 6 * BATCH * 3)
    assert agreed(records)[-1] == ["epoch", 9 + 6]
    with pytest.raises(Exception, match="it is not known which samples remain"):
        fit(tmp_path / "dealt", NoSync(), factors, 8, ckpt_path=middle)
    records = fit(tmp_path / "auto", NoSync(), factors, 8, data="auto", ckpt_path=middle)
    once_each(records, [1], 8 * BATCH * 3)
    assert [len([e for e, *_ in record["seen"] if e == 0]) for record in records] == [2, 2, 2]


@pytest.mark.distributed
def test_a_pipeline_that_is_dealt_nothing_is_met_all_the_same(tmp_path: Path) -> None:
    """With workers of the loader, accumulation, and a validation after each two batches of an equal split."""
    options = {"val_check_interval": 2, "accumulate_grad_batches": 3, "max_epochs": 2}
    records = fit(tmp_path, SemiDecentralized(window=0.002), (1.0, 8.0), 6, workers=1, **options)
    counts = once_each(records, [0, 1], 6 * BATCH * 2)
    assert counts[0] > counts[1]
    validations = [event for event in agreed(records) if event[0] == "validation"]
    assert [step for _, step, _ in validations] == [0, 1, 2, 2, 3, 4]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("sync", "stages", "schedule"),
    [
        pytest.param(SemiDecentralized(window=0.002), 2, "1f1b", marks=pytest.mark.slow),
        (ADPSGD(asynchronous=True), 1, "1f1b"),
        pytest.param(PartialReduce(group_size=2), 1, "1f1b", marks=pytest.mark.slow),
        pytest.param(PartialReduce(group_size=2), 2, "1f1b", marks=pytest.mark.slow),
        (SemiDecentralized(window=0.002), 2, "pipedream"),
        pytest.param(NoSync(), 2, "pipedream", marks=pytest.mark.slow),
    ],
)
def test_who_is_told_to_wait_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: Any, stages: int, schedule: str
) -> None:
    """Everybody hears once per segment that there is nothing now, while others may train."""
    lease, rejoin = SchedulerClient.lease, Rendezvous.rejoin

    def with_an_empty_one(client: SchedulerClient, segment: Segment, ordinal: int, *seconds: float) -> Lease | None:
        if ordinal == 1:
            mine, stop = client.worker.pipeline, segment.stop
            return Lease(segment, mine, ordinal, mine, stop, stop, 0.0, 0.0)
        return lease(client, segment, ordinal - (ordinal > 1), *seconds)

    def counted(rendezvous: Any) -> None:
        rendezvous.rejoined = getattr(rendezvous, "rejoined", 0) + 1
        rejoin(rendezvous)

    monkeypatch.setattr(SchedulerClient, "lease", with_an_empty_one)
    monkeypatch.setattr(Rendezvous, "rejoin", counted)
    factors = (1.0, 1.5) if stages == 1 else (1.0, 1.0, 1.5, 1.5)
    options = {"accumulate_grad_batches": 2, "val_check_interval": 5}
    records = fit(tmp_path, sync, factors, 10, stages=stages, schedule=schedule, **options)
    for stage in range(stages):
        once_each(records[stage::stages], [0, 1], 10 * BATCH * 2)
    assert [event[1] for event in agreed(records) if event[0] == "epoch"] == [5, 10]
    assert all(record["rejoined"] for record in records)
    for pipeline in range(2):
        assert len({record["updates"] for record in records[pipeline * stages :][:stages]}) == 1


@pytest.mark.distributed
def test_without_a_flush_all_stages_of_a_pipeline_count_alike(tmp_path: Path) -> None:
    records = fit(tmp_path, NoSync(), (1.0, 1.0, 3.0, 3.0), 10, stages=2, schedule="pipedream", val_check_interval=5)
    for stage in (records[::2], records[1::2]):
        once_each(stage, [0, 1], 10 * BATCH * 2)
    for pipeline in (records[:2], records[2:]):
        assert pipeline[0]["steps"] == pipeline[1]["steps"]
        assert pipeline[0]["rates"] == pipeline[1]["rates"]
    events = agreed(records)
    assert [event[1] for event in events if event[0] == "validation"] == [5, 10, 15, 20]
    assert records[0]["schedule"][0][0] == 20


class Stops(Callback):
    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_rank == 1 and len(module.seen) == 10:
            trainer.should_stop = True


@pytest.mark.distributed
@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stop_on_any_rank_ends_training_soon(tmp_path: Path, stages: int) -> None:
    factors = (1.0, 2.0) if stages == 1 else (1.0, 1.0, 2.0, 2.0)
    records = fit(tmp_path, SemiDecentralized(window=0.002), factors, 2000, stages=stages, callbacks=(Stops(),))
    (_, step, _), (_, end) = [event for event in agreed(records) if event[0] != "checkpoint"]
    trained = [index for record in records[::stages] for _, indices, *_ in record["seen"] for index in indices]
    assert len(trained) == len({*trained})
    assert 10 <= len(trained) / (2 * BATCH) <= step == end <= 1000


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (Numbered(4, drawn)[0] for _ in range(4))


class Saves(Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "now.ckpt")


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("loaders", "callbacks", "message"),
    [
        (DataLoader(Endless(), BATCH), [], "an IterableDataset is read in order"),
        ([DataLoader(Numbered(8)), DataLoader(Numbered(8))], [], "there are several train dataloaders"),
        (DataLoader(Numbered(8)), [Saves()], "saves a checkpoint, or ends the epoch between two sync points"),
    ],
    ids=["iterable", "several", "between"],
)
def test_what_cannot_be_dealt_is_refused(tmp_path: Path, loaders: Any, callbacks: list[Callback], message: str) -> None:
    strategy = SDPipeStrategy(sync=NoSync(), data="dealt", start_method="fork")
    trainer = quiet_trainer(devices=1, strategy=strategy, default_root_dir=tmp_path, callbacks=callbacks, max_epochs=1)
    with pytest.raises(Exception, match=message):
        trainer.fit(Model(), loaders)
