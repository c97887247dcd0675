"""Validation in an elastic run, shared among the pipelines that are present.

The pipelines meet as it begins, and each computes the same division of the batches from what all have said there. When
each has evaluated what it was given, they meet again: a pipeline that comes has evaluated all of it. What the missing
pipelines had is divided among those that came, until nothing is missing. Then they gather what each has logged, and
merge it in the order of the pipelines, so that all have the same values, to the last bit. What a lost pipeline has
logged is merged by all of the others; or by none, and then its batches are evaluated again. So each sample counts once.

Where results cannot be merged, each pipeline evaluates all of the data. Of most results that is known when the first
batches have been evaluated: each pipeline then evaluates the others' batches, too, and all of them in later
validations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_sdpipe import lightning_internals
from lightning_sdpipe.data.dealt import NumberedBatches
from lightning_sdpipe.data.shards import why_sharded
from lightning_sdpipe.dealing.proportional import divide, divide_again
from lightning_sdpipe.lightning_internals import DataFetcher, PrefetchDataFetcher, goes_one_by_one, profiled
from lightning_sdpipe.lightning_results import (
    merge_results,
    metric_counts,
    pack_results,
    updated_metrics,
    why_not_merged,
)
from lightning_sdpipe.loop.batch_source import Item
from lightning_sdpipe.loop.loop import batches as batches_begun
from lightning_sdpipe.loop.user_hooks import has_own_rule
from lightning_sdpipe.random_streams import mix
from lightning_sdpipe.sync.barriers import Barriers
from lightning_sdpipe.topology.groups import ProcessGroups


@dataclass(frozen=True)
class Evaluation:
    """One evaluation.

    Args:
        trainer: evaluates.
        seed: non-negative integers of this epoch, for draws of samplers and data sets, equal on all workers.
        prints: returns a summary of each value that the module keeps, by its name.
        first_failure: context for waits for others.
    """

    trainer: Trainer
    seed: Sequence[int]
    prints: Callable[[], Mapping[str, Any]]
    first_failure: AbstractContextManager[None]


class SharedEvaluations:
    """The part of one worker in the evaluations of a fit.

    Args:
        pipeline: that of this worker.
        barriers: those at which the first rank of each pipeline, which has the last stage and so the results, meets the
            others.
        groups: this worker's process groups.
    """

    def __init__(self, pipeline: int, barriers: Barriers, groups: ProcessGroups) -> None:
        self._pipeline, self._barriers, self._groups = pipeline, barriers, groups
        self._loaders: list[NumberedBatches] = []
        self._paces: dict[int, float] = {}  # seconds for a batch, of each pipeline that takes part
        self._seconds, self._number = 0.0, 0  # of the batches of this evaluation or, as it begins, of the one before
        self._refused: str | None = None  # why results cannot be merged, once that is known
        self._told: str | None = None

    def begin(self, evaluation: Evaluation) -> None:
        """Divide the batches of ``evaluation``, and make its Trainer evaluate those of this pipeline, unless no other
        is there. Every stage must call it when the evaluation begins."""
        loop = lightning_internals.evaluation_loop(evaluation.trainer)
        fetcher = lightning_internals.fetcher(loop)
        loaders = [getattr(loader, "given", loader) for loader in lightning_internals.loaders(loop)]
        refused = self._refused or _why_not_divided(fetcher, loaders)
        sizes: list[int] = []
        sums: list[int] = []
        if refused is None:
            known = {id(batches.loader): batches for batches in self._loaders}
            self._loaders = [known.get(id(loader)) or NumberedBatches(loader) for loader in loaders]
            sizes = [int(limit) for limit in loop.max_batches]
            seed = mix(*evaluation.seed, batches_begun(evaluation.trainer))
            sums = [batches.begin(seed, size) for batches, size in zip(self._loaders, sizes, strict=True)]
        met = self._meet([refused, sums, self._seconds / self._number if self._number else None])
        if len(met) == 1:
            return
        refused = _first([said[0] for said in met.values()])
        if refused is None and any(said[1] != sums for said in met.values()):
            refused = "the sampler gives other batches in other pipelines"
        if refused is not None:
            self._tell(refused)
        elif min(sizes) >= len(met):  # else Lightning would pass over a dataloader of which a pipeline has no batch
            assert fetcher is not None
            known_paces = [said[2] for said in met.values() if said[2] is not None]
            usual = sum(known_paces) / len(known_paces) if known_paces else 1.0
            self._paces = {pipeline: said[2] or usual for pipeline, said in met.items()}
            fetcher = _Fetcher(fetcher, self._evaluate(evaluation, sizes), evaluation.first_failure)
            lightning_internals.set_fetcher(loop, fetcher)

    def _evaluate(self, evaluation: Evaluation, sizes: Sequence[int]) -> Iterator[Item]:
        """Yield the batches of this pipeline. The one before is evaluated when the next is asked for."""
        self._seconds, self._number = 0.0, 0
        for loader, size in enumerate(sizes):
            if self._refused is None:
                yield from self._share(evaluation, loader, size)
            else:
                yield from self._load(loader, range(size))

    def _share(self, evaluation: Evaluation, loader: int, size: int) -> Iterator[Item]:
        """Yield this pipeline's batches of one dataloader, and merge the results when all are evaluated."""
        before, counts = evaluation.prints(), metric_counts(evaluation.trainer.lightning_module)
        given = held = divide(range(size), self._paces)
        while True:
            yield from self._load(loader, given[self._pipeline])
            refused, data = self._results(evaluation, before, counts)
            met = self._meet([refused, len(data)])
            self._refused = _first([said[0] for said in met.values()])
            if self._refused is not None:
                self._tell(self._refused)
                mine = {*held[self._pipeline]}
                yield from self._load(loader, [number for number in range(size) if number not in mine])
                return
            self._paces = {pipeline: self._paces[pipeline] for pipeline in met}
            given = divide_again(size, held, self._paces)
            held = {pipeline: held[pipeline] + given[pipeline] for pipeline in met}
            if any(given.values()):
                continue
            each = None
            if self._groups.rank == 0:
                each = self._barriers.gather(data, {i: said[1] for i, said in met.items()})
            if all(self._meet(each is not None).values()):  # also if one that gave its own is lost now
                if each is not None:
                    merge_results(evaluation.trainer, each)
                return

    def _load(self, loader: int, numbers: Sequence[int]) -> Iterator[Item]:
        since, counted = time.monotonic(), len(numbers)
        for batch, number in self._loaders[loader].take(numbers):
            yield batch, number, loader
            if counted == len(numbers) > 1:  # the first of several, with which the loader starts
                since, counted = time.monotonic(), counted - 1
        self._seconds, self._number = self._seconds + time.monotonic() - since, self._number + counted

    def _results(
        self, evaluation: Evaluation, before: Mapping[str, Any], counts: Mapping[str, int]
    ) -> tuple[str | None, bytes]:
        """Return why results cannot be merged, or the packed results of this pipeline, on its last stage.

        Args:
            evaluation: the one in which they were logged.
            before: the summaries of the module's values before it.
            counts: how often its metrics were updated before it.
        """
        if self._groups.rank != 0:
            return None, b""
        metrics = updated_metrics(evaluation.trainer.lightning_module, counts)
        refused = why_not_merged(metrics, has_own_rule)
        changed = [name for name, value in evaluation.prints().items() if before.get(name) != value]
        if refused is None and changed:
            refused = f"the validation step changes {changed[0]!r}, which the module keeps by itself"
        elif refused is None and metrics and len(self._loaders) > 1:
            refused = f"there are several dataloaders, all of which may update the metric {next(iter(metrics))!r}"
        return refused, b"" if refused is not None else pack_results(evaluation.trainer, metrics)

    def _meet(self, mine: Any) -> dict[int, Any]:
        """Return what each pipeline that comes has said, in the order of the pipelines; equal on all workers."""
        return dict(self._barriers.agree(self._groups, mine, lambda each: [*each.items()]))

    def _tell(self, refused: str) -> None:
        if refused != self._told:
            self._told = refused
            rank_zero_info(f"Each pipeline evaluates all of the data: {refused}.")


class _Fetcher(DataFetcher):
    """A fetcher of ``batches``, in the place of Lightning's ``fetcher``."""

    def __init__(
        self, fetcher: DataFetcher, batches: Iterator[Item], first_failure: AbstractContextManager[None]
    ) -> None:
        self.__dict__.update(fetcher.__dict__)
        self._batches, self._first_failure = batches, first_failure
        self.done = False

    def __next__(self) -> Item:
        with self._first_failure, profiled(self):
            item = next(self._batches, None)
        if item is None:
            self.done = True
            raise StopIteration
        self.fetched += 1
        return item


def _why_not_divided(fetcher: DataFetcher | None, loaders: Sequence[Any]) -> str | None:
    """Return the reason why the batches of ``loaders`` cannot be divided; None if they can."""
    if not isinstance(fetcher, PrefetchDataFetcher):
        return "the validation step takes the dataloader's iterator"
    if not goes_one_by_one(fetcher.combined_loader):
        return "a batch is made of those of several dataloaders"
    return _first([why_sharded(loader, 0, 1) for loader in loaders])


def _first(reasons: Sequence[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)
