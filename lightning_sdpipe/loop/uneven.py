"""Batches for a pipeline that may have fewer of them than others.

All pipelines count the same batches, so that validation, checkpoints, learning rates and the end of training come at
the same number everywhere. A pipeline that reaches its last batch keeps it, and waits. When the others meet somewhere,
it follows them there through absences: turns of Lightning's loop in which it trains nothing. When every pipeline
has one batch left, all train it, and the epoch ends for all of them at once.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Protocol

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.lightning_internals import DataFetcher, PrefetchDataFetcher

_Item = tuple[Any, int, int]  # batch, batch_idx, dataloader_idx


class Turns(Protocol):
    """What a worker does in turns of the loop for which it has no batch."""

    def begin_uneven(self) -> None:
        """An epoch begins, in which pipelines may have different numbers of batches."""

    def without_batch(self) -> bool:
        """This turn has none but the last batch. Returns whether it is to be trained now, like everybody's last."""


class UnevenFetcher(PrefetchDataFetcher):
    """Takes over from Lightning's fetcher, with what that has fetched already.

    Args:
        fetcher: Lightning's.
        turns: this worker's.
    """

    def __init__(self, fetcher: DataFetcher, turns: Turns) -> None:
        self.batches: list[_Item] = []
        self.__dict__.update(fetcher.__dict__)
        self._turns = turns
        self._start()

    def __iter__(self) -> UnevenFetcher:
        DataFetcher.__iter__(self)
        self._start()
        return self

    def _start(self) -> None:
        self.done = False  # it is when everybody is
        self._turns.begin_uneven()
        self._last: _Item | None = None
        if not self.batches:
            self._look_ahead()
        if not self.batches:
            raise ConfigurationError(
                "This pipeline was given no batches in this epoch. Every pipeline needs one at least: give it more "
                "data, or use fewer pipelines."
            )

    def __next__(self) -> _Item:
        if self._last is None:
            item = self.batches.pop(0)
            self._look_ahead()
            if self.batches:
                return item
            self._last = item
        self.done = self._turns.without_batch()
        return self._last

    def _look_ahead(self) -> None:
        if self.length is None or self.fetched < self.length:
            with suppress(StopIteration):
                self.batches.append(DataFetcher.__next__(self))
            self.done = False
