"""Draws that belong to a batch, whoever loads it, in whichever process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from lightning_sdpipe.data.shards import seed_generators


class Drawn(NamedTuple):
    """What to load (indices, or one index if the loader does not batch), and the seed of what that draws."""

    seed: int
    indices: Any


class DrawingDataset:
    """``dataset``, asked for :class:`Drawn`: transforms and the collate function draw from the batch's own stream.

    The generators are those of the process that loads: a worker's, or the caller's, who restores them.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, drawn: Drawn | Sequence[Drawn]) -> Any:
        if not isinstance(drawn, Drawn):
            return [sample for each in drawn for sample in self.__getitems__(each)]
        seed_generators(drawn.seed)
        together = getattr(self.dataset, "__getitems__", None)
        return together(drawn.indices) if together else [self.dataset[index] for index in drawn.indices]

    def __getitem__(self, drawn: Drawn) -> Any:
        seed_generators(drawn.seed)
        return self.dataset[drawn.indices]


class WorkerStart:
    """A loader's ``worker_init_fn``, which sees the user's own dataset."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None  # this runs in a worker
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
        if self._init is not None:
            self._init(worker)
