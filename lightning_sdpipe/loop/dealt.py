"""Turns of Lightning's loop over batches that are dealt by speed.

Between two sync points lies a segment of the epoch, whose batches all pipelines train together, each as many as it can.
A turn is one batch of this pipeline. When there is none, the pipeline leaves the others alone, and waits for more or
for the end of the segment, within the turn of its last batch. So hooks at the end of that turn find all workers there,
at the numbers of an equal split. A pipeline that was dealt nothing is absent for one turn.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.utils.data import Dataset

from lightning_sdpipe import lightning_internals
from lightning_sdpipe.data.dealt import DealtBatch, DealtBatches
from lightning_sdpipe.data.shards import refuse_to_deal, why_sharded
from lightning_sdpipe.dealing.leases import Segment
from lightning_sdpipe.lightning_internals import (
    DataFetcher,
    Method,
    as_combined,
    current,
    of_its_class,
    profiled,
    replace,
)
from lightning_sdpipe.loop.batch_source import (
    Fetcher,
    Item,
    ShardBatchSource,
    Split,
    Turns,
    find_place,
    gives,
    refuse_other_split,
)
from lightning_sdpipe.loop.equal_split import EqualSplit, next_sync_point, save_at_sync_points
from lightning_sdpipe.loop.loop import ClockChecks
from lightning_sdpipe.partition.python_values import tensors_within
from lightning_sdpipe.partition.sample import sample_batch
from lightning_sdpipe.scheduler.client.client import SchedulerClient
from lightning_sdpipe.topology.groups import ProcessGroups

_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_sdpipe")


@dataclass(frozen=True)
class SourceInputs:
    """The inputs of a source of batches that are dealt.

    Args:
        trainer: about to fit.
        turns: those of this worker.
        client: deals batches.
        groups: this worker's process groups.
        checks: says when all look at the clock.
        run: a number of this fit, the same on all workers and different from any other fit's.
        seed: that of the data.
        origin: the split of the data that a checkpoint counts by, if one was loaded.
        required: the user asked for dealing; otherwise what cannot be dealt is trained as shards.
        on_any_worker: returns whether its argument is true on any worker; every worker must call it.
        reason: why this run should not deal, whatever its loader; None if it may.
    """

    trainer: Trainer
    turns: Turns
    client: SchedulerClient
    groups: ProcessGroups
    checks: ClockChecks
    run: int
    seed: Callable[[], int]
    origin: Callable[[], Split | None]
    required: bool
    on_any_worker: Callable[[bool], bool]
    reason: str | None


class DealtBatchSource:
    """A source that deals batches to pipelines by their speed; each trains its own shard where they cannot be dealt."""

    description = "dealt by speed if the loader allows it"
    portion = None

    def __init__(self, inputs: SourceInputs) -> None:
        self._inputs, self._run = inputs, inputs.run
        trainer = self._trainer = inputs.trainer
        self._turns, self._client, groups, self._checks = inputs.turns, inputs.client, inputs.groups, inputs.checks
        self._shards = ShardBatchSource(trainer, inputs.turns, inputs.origin)
        self._num_pipelines = groups.mesh.num_pipelines
        _, pipeline = groups.mesh.locate(groups.rank)
        self._home = pipeline % self._num_pipelines  # there may be more pipelines than shards
        self._by_hand = not trainer.lightning_module.automatic_optimization
        self._counters = EqualSplit(trainer, lambda: self._closes, self._by_hand)
        self._split: Split | None = None
        self._dealt: DealtBatches | None = None  # None if the loader's cannot be dealt
        self._segment: Segment | None = None
        self._next: DealtBatch | None = None
        self._now: DealtBatch | None = None
        self._looked = False  # `_next` is what follows the batch of this turn
        self._over = False  # all workers have trained what there was in this segment
        self._trained = 0  # in this segment
        self._accumulated = 0  # batches of this pipeline whose gradients wait for an update
        self._closes = False

    def deal(self, loader: Any, split: Split | None) -> None:
        """Deal the batches of ``loader`` from now on, if they can be dealt; ``split`` says how its data are split.

        Raises:
            ConfigurationError: they cannot, and the user asked for it.
        """
        self._dealt = self._segment = self._next = self._now = None
        self._shards.deal(loader, split)
        reason = self._inputs.reason or why_sharded(loader, self._home, self._num_pipelines)
        refused = self._refused(reason)
        if not self._inputs.required and self._inputs.on_any_worker(refused):
            return
        self._loader, self._split = loader, split
        self._dealt = DealtBatches(loader, self._num_pipelines, self._client.lease)

    def _refused(self, reason: str | None) -> bool:
        """Return whether there is a ``reason`` not to deal, which is an error if the user asked for it."""
        if reason is not None and self._inputs.required:
            raise refuse_to_deal(reason)
        if reason is not None:
            rank_zero_info(
                f"Batches are not dealt by speed: {reason}. Each pipeline trains its own shard, and an epoch takes as "
                "long as the slowest one needs."
            )
        return reason is not None

    def take_over(self, fetcher: DataFetcher) -> DataFetcher:
        """Return the fetcher of the epoch that begins: ``fetcher``, if its batches are not dealt."""
        if gives(self, fetcher):
            return fetcher
        if self._dealt is None:
            return self._shards.take_over(fetcher)
        several = len(fetcher.combined_loader.flattened) > 1
        if self._refused("there are several train dataloaders, whose batches belong together" if several else None):
            self._dealt = None
            return self._shards.take_over(fetcher)
        before = self._inputs.origin()
        if not find_place(self._trainer, before, self._split, self._loader):
            if self._inputs.required:
                raise refuse_other_split(before, self._split)
            return self._shards.take_over(fetcher)  # for the rest of this epoch
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
        rank_zero_info(announcement(self._inputs.required, self._trainer.lightning_module, callbacks))
        taken = Fetcher(fetcher, self)
        taken.done = False  # the turns know which is the last
        return taken

    def begin_epoch(self, fetcher: DataFetcher) -> None:
        """Begin a later epoch; see :class:`~lightning_sdpipe.loop.batch_source.BatchSource`, as for the next four."""
        fetcher.fetched = 0

    def fetch(self, fetcher: DataFetcher) -> Item:
        with profiled(fetcher):
            batch = self._next_turn()
        return as_combined(fetcher.combined_loader, batch), fetcher.fetched, 0

    @property
    def resumes(self) -> bool:
        return self._deals or self._shards.resumes

    @property
    def _deals(self) -> bool:
        """True if the batches of this epoch are dealt."""
        return gives(self, lightning_internals.fetcher(self._trainer.fit_loop))

    @property
    def position(self) -> int | None:
        return None if self._now is None else self._now.position

    @property
    def zeroes_gradients(self) -> bool:
        return self._accumulated == 0 if self._deals else self._shards.zeroes_gradients

    # ------------------------------------------------------------------- turns

    def change(self) -> None:
        """Make the trainer's loop take these turns."""
        loop: Any = self._trainer.fit_loop.epoch_loop
        optimization, by_hand = loop.automatic_optimization, loop.manual_optimization
        check_validation = current(loop, Method.VALIDATES)

        def underway() -> bool:
            return self._turns.underway

        def run(optimizer: Any, batch_idx: int, kwargs: Any) -> Any:
            if self._segment is None:
                return type(optimization).run(optimization, optimizer, batch_idx, kwargs)
            whole = batch_idx - batch_idx % self._trainer.accumulate_grad_batches
            output = type(optimization).run(optimization, optimizer, whole + self._accumulated, kwargs)
            self._end_turn()
            return output

        def run_by_hand(kwargs: Any) -> Any:
            output = type(by_hand).run(by_hand, kwargs)
            if self._segment is not None:
                self._end_turn()
            return output

        def should_accumulate() -> bool:
            return not self._closes if self._segment is not None else of_its_class(loop, Method.ACCUMULATES)()

        def update_lr_schedulers(interval: str, update_plateau_schedulers: bool) -> None:
            if interval == "step" and self._segment is not None:
                self._counters.update_schedulers(update_plateau_schedulers)
            else:
                type(loop).update_lr_schedulers(loop, interval, update_plateau_schedulers)

        optimization.run, by_hand.run = run, run_by_hand
        replace(loop, Method.ACCUMULATES, should_accumulate)
        loop.update_lr_schedulers = update_lr_schedulers
        replace(loop, Method.VALIDATES, lambda fetcher: not underway() and check_validation(fetcher))
        save_at_sync_points(self._trainer, underway)

    def close(self) -> None:
        """End the fit; workers of the loader may end."""
        self._dealt = self._next = self._now = None

    def _next_turn(self) -> Any:
        """Return what the turn trains, or shows to hooks if it trains nothing."""
        if not self._turns.underway:
            self._begin_segment()
        return self._begin_turn()

    def _begin_turn(self) -> Any:
        self._now, self._looked = self._next, False
        if self._now is None:
            self._turns.begin_turn(has_batch=False)
            self._closes = self._final
            return batch_to_show(self._loader)
        accumulate = self._trainer.accumulate_grad_batches
        self._closes = self._accumulated + 1 == accumulate
        if accumulate > 1 and self._final:  # the last batch of an epoch closes, as it does without dealing
            self._look()
            self._closes = self._closes or self._next is None
        return self._now.data

    def _begin_segment(self) -> None:
        start = self._counters.number
        self._segment = self._segment_from(start)
        self._counters.begin()
        self._trained = 0
        if start == 0:
            self._accumulated = 0  # what an epoch that was cut short has left is zeroed, as without dealing
        self._turns.begin_dealt()
        with self._turns.first_failure:
            self._client.greet()
            self._batches.begin(self._segment, self._inputs.seed())
        self._looked = self._over = False
        self._look()
        if self._next is None:
            self._run_out()

    def _segment_from(self, start: int) -> Segment:
        stop = next_sync_point(self._trainer, self._checks, self._by_hand)
        return Segment(self._run, self._trainer.current_epoch, start, stop)

    @property
    def _stop(self) -> int:
        """Number at which the segment ends, or has ended."""
        assert self._segment is not None
        return self._batches.stop if self._over else self._segment.stop

    @property
    def _final(self) -> bool:
        """True if the segment ends the epoch."""
        return self._stop == self._trainer.num_training_batches

    @property
    def _batches(self) -> DealtBatches:
        assert self._dealt is not None, "deal() has taken them"
        return self._dealt

    def _look(self) -> None:
        """Look at the next batch, without waiting for another worker."""
        if not self._looked:
            with self._turns.first_failure:
                self._next = self._batches.take()
            self._looked = True

    def _run_out(self) -> None:
        """Wait, as there is nothing to train for now."""
        self._rest()
        self._wait()

    def _rest(self) -> None:
        """Finish everything, so that no worker is held up."""
        self._turns.rest()
        self._client.trained(self._trained, self._turns.loose)

    def _wait(self) -> None:
        """Wait for others until there is something to train, or until this segment has nothing more."""
        with self._turns.first_failure:
            while self._next is None and self._batches.wait():
                self._next = self._batches.take()
        self._over = self._next is None
        if self._next is not None:
            self._turns.go_on()

    def _end_turn(self) -> None:
        split = self._counters
        before, trained = split.number - 1, self._now is not None  # Lightning has counted this turn
        if self._now is not None:
            self._trained += 1
            self._client.trained(self._trained - self._turns.unfinished, self._turns.loose)
            self._look()
            if self._next is None:
                self._run_out()
        self._accumulated = 0 if self._closes else self._accumulated + (self._now is not None)
        if self._over:
            split.advance(before, self._stop, trained)
            self._turns.end_dealt()
            with self._turns.first_failure:
                split.agree(self._checks.from_leader)
        else:
            split.advance(before, min(max(self._reached(before), before), self._stop - 1), trained)

    def _reached(self, before: int) -> int:
        """Return the number of batches of an equal split before the next batch of this pipeline."""
        assert self._next is not None
        return math.floor(self._next.progress / self._num_pipelines + 1e-9)


def batch_to_show(loader: Any) -> Any:
    """Return the batch that hooks see in a turn without one. It comes from a copy of the data set over the same
    tensors, if one can be made, so the data set itself stays as it was."""
    shown, nested = copy.copy(loader), [loader.dataset]
    while isinstance(inner := getattr(nested[-1], "dataset", None), Dataset):  # that of a Subset
        nested.append(inner)
    kept = {id(tensor): tensor for tensor in tensors_within([getattr(each, "__dict__", {}) for each in nested])}
    with suppress(Exception):  # objects say in their own ways that they cannot be copied
        dataset, collate = copy.deepcopy((loader.dataset, loader.collate_fn), kept)
        vars(shown).update(dataset=dataset, collate_fn=collate)
    return sample_batch(shown)


def announcement(required: bool, module: LightningModule, callbacks: Iterable[Callback]) -> str:
    """Return one line on what was chosen, why, and which hooks of the user's are told the number of a training batch.

    Args:
        required: True if the user asked for it, or the run is elastic.
        module: the user's.
        callbacks: of the Trainer.
    """
    instead = " (data='sharded' gives each pipeline a shard instead)"
    why = ", as data='dealt' and elastic runs require" if required else instead
    users = [each for each in callbacks if type(each).__module__.partition(".")[0] not in _LIBRARIES]
    told: list[tuple[Any, str]] = [
        (module, name) for name in ("on_train_batch_start", "on_train_batch_end", "optimizer_step")
    ]
    told += [(each, name) for each in users for name in ("on_train_batch_start", "on_train_batch_end")]
    hooks = [
        f"{type(owner).__name__}.{name}"
        for owner, name in told
        if getattr(type(owner), name) is not getattr(LightningModule if owner is module else Callback, name)
    ]
    seen = f"; {', '.join(hooks)} see the batch_idx of their own pipeline's batches" if hooks else ""
    return (
        f"Batches are dealt to pipelines by their speed{why}{seen}. What all pipelines must do at the same point "
        "should depend on trainer.global_step (docs/data.md)."
    )
