"""Turns over a pipeline's own shard, when others have more batches than it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.lightning_internals import DataFetcher, PrefetchDataFetcher
from lightning_sdpipe.loop.batch_source import Fetcher, ShardBatchSource
from lightning_sdpipe.sync.rendezvous import SyncPoint


class Shard:
    """Batches without a length."""

    def __init__(self, batches: int, even: bool = False) -> None:
        self.batches, self.even = batches, even

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.batches))


class Said:
    """What the source says, and where the others meet."""

    underway, unfinished, loose, first_failure = False, 0, 0, nullcontext()

    def __init__(self, sync_points: list[SyncPoint]) -> None:
        self.sync_points, self.calls = sync_points, []  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> Any:
        return lambda **more: self.calls.append(name if not more.get("uneven") else f"{name} uneven")

    def begin_turn(self, has_batch: bool) -> None:
        self.calls.append("a batch" if has_batch else "none")

    def wait_for_others(self) -> SyncPoint:
        self.calls.append("waits")
        return self.sync_points.pop(0)


def fetched_by(shard: Shard, sync_points: list[SyncPoint]) -> tuple[DataFetcher, Said, Any]:
    """The fetcher of an epoch, what is said meanwhile, and the trainer."""
    combined = CombinedLoader(shard, "max_size_cycle")
    fetcher = PrefetchDataFetcher()
    fetcher.setup(combined)
    iter(fetcher)
    progress = SimpleNamespace(current=SimpleNamespace(ready=0))
    epoch_loop = SimpleNamespace(batch_progress=progress)
    fit_loop = SimpleNamespace(_combined_loader=combined, epoch_loop=epoch_loop, restarted_mid_epoch=False)
    trainer: Any = SimpleNamespace(fit_loop=fit_loop, accumulate_grad_batches=1)
    said = Said(sync_points)
    source = ShardBatchSource(trainer, said, lambda: None)
    taken = source.take_over(fetcher)
    assert source.take_over(taken) is taken, "once"
    return taken, said, trainer


def turns(fetcher: DataFetcher, trainer: Any, most: int = 20) -> list[int]:
    """The batches of so many turns of Lightning's loop, or until it is told that one was the last."""
    found: list[int] = []
    while len(found) < most and not (found and fetcher.done):
        batch, _, _ = next(fetcher)
        found.append(batch)
        trainer.fit_loop.epoch_loop.batch_progress.current.ready += 1
    return found


def test_even_shards_stay_with_lightnings_fetcher() -> None:
    fetcher, said, _ = fetched_by(Shard(3, even=True), [])
    assert not isinstance(fetcher, Fetcher)
    assert set(said.calls) == {"begin_shards"}


def test_a_short_shard_keeps_its_last_batch_and_is_absent_until_the_others_have_one() -> None:
    """All validate after 4 batches, and the others have 6."""
    fetcher, said, trainer = fetched_by(Shard(2), [SyncPoint(4, closing=False), SyncPoint(6, closing=True)])
    assert turns(fetcher, trainer) == [0, 1, 1, 1, 1, 1]
    assert said.calls == ["begin_shards uneven", "waits", *3 * ["none"], "waits", "none", "a batch"]


def test_the_next_epoch_begins_anew() -> None:
    closing = SyncPoint(2, closing=True)
    fetcher, said, trainer = fetched_by(Shard(2), [closing, closing])
    assert turns(fetcher, trainer) == [0, 1]
    trainer.fit_loop.epoch_loop.batch_progress.current.ready = 0
    iter(fetcher)
    assert turns(fetcher, trainer, 2) == [0, 1]
    assert said.calls == 2 * ["begin_shards uneven", "waits", "a batch"]


def test_a_shard_without_batches_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="This pipeline was given no batches in this epoch"):
        fetched_by(Shard(0), [])
