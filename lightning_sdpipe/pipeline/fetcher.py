"""Batches for a pipeline that may have fewer of them than others.

All pipelines count the same batches, so that validation, checkpoints, learning rates and the end of training come at
the same number everywhere. A pipeline that reaches its last batch keeps it, and waits. When the others meet somewhere,
it follows them there through absences: turns of Lightning's loop in which it trains nothing. When every pipeline
has one batch left, all train it, and the epoch ends for all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.sync.meeting import Meeting

_Item = tuple[Any, int, int]  # batch, batch_idx, dataloader_idx


class MeetingFetcher(_PrefetchDataFetcher):
    """Takes over from Lightning's fetcher, with what that has fetched already.

    Args:
        fetcher: Lightning's.
        sit_out: waits for where the others meet; see :meth:`ModelAveraging.sit_out`.
        position: the batches that were begun in this epoch.
    """

    def __init__(self, fetcher: _DataFetcher, sit_out: Callable[[int], Meeting], position: Callable[[], int]) -> None:
        self.batches: list[_Item] = []
        self.__dict__.update(fetcher.__dict__)
        self._sit_out = sit_out
        self._position = position
        self._start()

    def __iter__(self) -> MeetingFetcher:
        _DataFetcher.__iter__(self)
        self._start()
        return self

    def _start(self) -> None:
        self.done = False  # it is when everybody is
        self.absent = False
        """Is there nothing to train in this turn? The batch that the hooks see is the one that is kept."""
        self._last: _Item | None = None
        self._agreed: Meeting | None = None
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
        self.absent = True
        position = self._position()
        if self._agreed is None or (position == self._agreed.position and not self._agreed.closing):
            self._agreed = self._sit_out(position)
        if self._agreed.closing and position == self._agreed.position - 1:
            self.absent, self.done = False, True
        return self._last

    def _look_ahead(self) -> None:
        if self.length is None or self.fetched < self.length:
            with suppress(StopIteration):
                self.batches.append(_DataFetcher.__next__(self))
            self.done = False
