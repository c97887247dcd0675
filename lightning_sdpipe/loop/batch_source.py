"""Sources of training batches: the protocol of all of them, and the plainest one, a pipeline's own shard.

A turn is one pass of Lightning's loop. In each it asks one :class:`Fetcher` for a batch, which asks a source:
:class:`ShardBatchSource`, :class:`~lightning_sdpipe.loop.dealt.DealtBatchSource`,
:class:`~lightning_sdpipe.loop.joint.JointBatchSource`, or in elastic runs
:class:`~lightning_sdpipe.worker.elastic.elastic_batches.ElasticBatchSource`.

Shards may have different lengths. All pipelines count the same batches, so that validation, checkpoints, learning rates
and the end of training come at the same number everywhere. A pipeline that reaches its last batch keeps it, and waits.
When the others meet somewhere, it follows them there through absences: turns in which it trains nothing. When every
pipeline has one batch left, all train it, and the epoch ends for all of them at once.

A :data:`Split` says how a run divides an epoch into batches, and so whether another run can continue within that epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sdpipe.data.shards import takes_turns
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.lightning_internals import DataFetcher, PrefetchDataFetcher, loaders
from lightning_sdpipe.pipeline.micro_batches import Portion
from lightning_sdpipe.sync.rendezvous import SyncPoint

Split = list[int]
"""Number of pipelines, batches of each in an epoch, and samples of a batch (0 if unknown)."""


def split_of(loader: Any, num_pipelines: int) -> Split | None:
    """Return the split of ``loader``, which every pipeline has; None if its length is not known."""
    batches = sized_len(loader)
    return None if batches is None else [num_pipelines, batches, getattr(loader, "batch_size", None) or 0]


def find_place(trainer: Trainer, before: Split | None, now: Split | None, loader: Any) -> bool:
    """Move ``trainer`` to the place in the split ``now`` where a checkpoint of a run with the split ``before`` ended,
    if that is within an epoch. Return False if there is no such place.

    Replica i of N trains samples i, i + N, ... of the epoch's order. So when each of N pipelines has trained b batches
    of B samples, the first b N B samples of that order are done, which are those of b N B / (N' B') batches of N'
    pipelines. If that is not a whole number, it is rounded down, and the samples beyond it are trained again.
    """
    done = batches_done(trainer)
    if not done or before == now:
        return True
    number = place_in(now, before, done) if takes_turns(loader) else None
    if number is None:
        return False
    assert now is not None
    assert before is not None
    number = min(number, int(trainer.num_training_batches) - 1)
    again = done * before[0] * before[2] - number * now[0] * now[2]
    if again:
        rank_zero_warn(
            f"The checkpoint is from the middle of an epoch of {_described(before)}, and this run has "
            f"{_described(now)}. It continues after batch {number} of each, so {again} samples are trained again."
        )
    move_to(trainer, number)
    return True


def batches_done(trainer: Trainer) -> int:
    """Return how many batches of the epoch each pipeline has trained, if a checkpoint resumes within one; else 0."""
    loop: Any = trainer.fit_loop
    progress = loop.epoch_loop.batch_progress
    return progress.current.processed if loop.restarted_mid_epoch and not progress.is_last_batch else 0


def move_to(trainer: Trainer, number: int | float) -> None:
    """Move the progress that a checkpoint restored to ``number`` batches of its epoch."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    moved = number - progress.processed
    for name in ("ready", "started", "processed", "completed"):  # these may differ, by where the checkpoint was written
        setattr(progress, name, getattr(progress, name) + moved)


def place_in(now: Split | None, before: Split | None, done: int) -> int | None:
    """Return how many batches of each pipeline are done in the split ``now`` when ``done`` are in ``before``; None if
    the two are of different data, or their batch sizes are unknown."""
    if now is None or before is None or len(before) != 3 or not now[2] or not before[2]:
        return None
    (n, batches, size), (earlier, earlier_batches, earlier_size) = now, before
    step, earlier_step = n * size, earlier * earlier_size
    if abs(batches * step - earlier_batches * earlier_step) >= step + earlier_step:  # more than is padded, or cut off
        return None
    return done * earlier_step // step


def refuse_other_split(before: Split | None, now: Split | None) -> ConfigurationError:
    """Return the error for a checkpoint that cannot be continued within its epoch."""
    return ConfigurationError(
        f"The checkpoint is from the middle of an epoch of {_described(before)}, and this run has {_described(now)}, "
        "so it is not known which samples remain. Resume with the same data, and with the same batch size and number "
        "of pipelines if the loader has a batch sampler of your own; or from the end of an epoch."
    )


def _described(split: Split | None) -> str:
    if split is None:
        return "data that were not counted"
    if len(split) != 3:  # as older checkpoints may have it
        return f"data that another version has counted ({split})"
    pipelines, batches, samples = split
    return f"{pipelines} pipelines × {batches} batches" + (f" of {samples}" if samples else "")


Item = tuple[Any, int, int]
"""A batch, its number, and that of its dataloader."""


class Turns(Protocol):
    """A worker's actions where its source has a batch for it, where it has none, and at sync points."""

    @property
    def together(self) -> bool:
        """True if all workers of the stage are at the same point of training."""

    @property
    def underway(self) -> bool:
        """True while batches are dealt: each pipeline is at a batch number of its own until the next sync point."""

    @property
    def first_failure(self) -> AbstractContextManager[None]:
        """Context for waits for others, one of which may have failed."""

    @property
    def unfinished(self) -> int:
        """Mini-batches that are still in this pipeline."""

    @property
    def loose(self) -> int:
        """Number of this pipeline's latest mini-batches that no other pipeline's model has, and that are lost with
        it."""

    def show(self, metrics: Mapping[str, float]) -> None:
        """Show users these metrics, the newest that all workers have."""

    def pause(self) -> None:
        """Finish what is in the pipeline, and make all replicas equal."""

    def begin_shards(self, uneven: bool) -> None:
        """Begin an epoch in which each pipeline trains its own shard; they may be ``uneven``."""

    def wait_for_others(self) -> SyncPoint:
        """Wait with only the last batch left; return where the others meet next."""

    def begin_turn(self, has_batch: bool, gives_nothing: bool = False) -> None:
        """Begin a turn, with a batch to train or without; without this call it is like the one before. Without a batch
        it may take part in the round of those that have one, to which it ``gives_nothing``."""

    def begin_dealt(self) -> None:
        """Begin a segment of dealt batches. All workers are together, and take part from now on."""

    @property
    def called(self) -> int | None:
        """Life of the scheduler if the other pipelines expect this one in an exchange for which it is ready while it
        trains; else None."""

    def take_part(self, called: int) -> None:
        """Take part in that exchange after this turn."""

    def drain(self) -> None:
        """Finish what is in the pipeline, while other pipelines train."""

    def rest(self) -> None:
        """Rest while there is no batch: finish what is in the pipeline, and hold up no other pipeline."""

    def go_on(self) -> None:
        """Go on: there is a batch again."""

    def stop_dealing(self) -> None:
        """Ask for the end of the segment before all of it is dealt."""

    def end_dealt(self) -> None:
        """End the segment, which all pipelines have finished, and come together with them."""


class BatchSource(Protocol):
    """The source of one worker's batches, in one fit."""

    description: str
    """Description for the lines that are printed when training begins."""

    @property
    def resumes(self) -> bool:
        """True if an epoch resumes where the checkpoint ended."""

    @property
    def position(self) -> int | None:
        """Position of this turn's batch in the epoch; None if it follows from the number of the turn."""

    @property
    def portion(self) -> Portion | None:
        """The portion of all pipelines' joint batch that this turn's batch is; None if each trains its own."""

    @property
    def zeroes_gradients(self) -> bool:
        """True if Lightning zeroes the gradients before it adds those of this turn's batch."""

    def deal(self, loader: Any, split: Split | None) -> None:
        """Take the batches from ``loader`` from now on; ``split`` says how its data are split.

        Raises:
            ConfigurationError: this source cannot take them, and the user asked for it.
        """

    def change(self) -> None:
        """Adapt the Trainer's loop to these turns, before training.

        Raises:
            ConfigurationError: the module splits or weighs its batches in a way that this source cannot.
        """

    def take_over(self, fetcher: DataFetcher) -> DataFetcher:
        """Return the fetcher of the epoch that begins: a :class:`Fetcher`, or ``fetcher`` where Lightning's own gives
        the batches."""

    def begin_epoch(self, fetcher: DataFetcher) -> None:
        """Begin a later epoch with ``fetcher``, which has been taken over."""

    def fetch(self, fetcher: DataFetcher) -> Item:
        """Return what the next turn trains, or shows to hooks if it trains nothing. Set ``fetcher.done`` with the
        last."""

    def close(self) -> None:
        """End the fit; workers of the loader may end."""


class Fetcher(PrefetchDataFetcher):
    """A fetcher that takes over from Lightning's ``fetcher``, with what that has fetched already, and gives the batches
    of ``source``."""

    def __init__(self, fetcher: DataFetcher, source: BatchSource) -> None:
        self.batches: list[Item] = []
        self.__dict__.update(fetcher.__dict__)
        self.source = source

    def __iter__(self) -> Fetcher:
        self.source.begin_epoch(self)
        return self

    def __next__(self) -> Item:
        return self.source.fetch(self)


def gives(source: BatchSource, fetcher: DataFetcher | None) -> bool:
    """Return whether ``source`` has taken over from ``fetcher``."""
    return isinstance(fetcher, Fetcher) and fetcher.source is source


def begins_accumulation(trainer: Trainer) -> bool:
    """Return whether the batch of this turn, by its number, begins an accumulation of gradients."""
    return trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0


class ShardBatchSource:
    """A source in which each pipeline trains what its own loader gives; Lightning's fetcher stays where the shards are
    even.

    Args:
        trainer: about to fit.
        turns: those of this worker.
        origin: the split of the data that a checkpoint counts by, if one was loaded.
    """

    description = "each pipeline's own shard"
    resumes = False
    position = portion = None

    def __init__(self, trainer: Trainer, turns: Turns, origin: Callable[[], Split | None]) -> None:
        self._trainer, self._turns, self._origin = trainer, turns, origin
        self._split: Split | None = None
        self._last: Item | None = None
        self._sync_point: SyncPoint | None = None  # where this worker, which is out of data, will find the others

    @property
    def zeroes_gradients(self) -> bool:
        """True if an accumulation begins. For the other members see :class:`BatchSource`."""
        return begins_accumulation(self._trainer)

    def deal(self, loader: Any, split: Split | None) -> None:
        self._split = split

    def change(self) -> None:
        """No-op: a turn is one of Lightning's."""

    def close(self) -> None:
        """No-op: Lightning ends its loader."""

    def take_over(self, fetcher: DataFetcher) -> DataFetcher:
        if gives(self, fetcher):
            return fetcher
        self.resumes = self._skip_what_is_done()
        if all(loader.even for loader in loaders(self._trainer.fit_loop)):
            self._turns.begin_shards(uneven=False)
            return fetcher
        if not isinstance(fetcher, PrefetchDataFetcher):
            raise ConfigurationError(
                "training_step takes batches from dataloader_iter itself, and pipelines may have unlike numbers of "
                "them. Take the batch instead, or let Lightning make the sampler of a map-style dataset."
            )
        taken = Fetcher(fetcher, self)
        self._start(taken)
        return taken

    def begin_epoch(self, fetcher: DataFetcher) -> None:
        DataFetcher.__iter__(fetcher)
        assert isinstance(fetcher, Fetcher)
        self._start(fetcher)

    def fetch(self, fetcher: DataFetcher) -> Item:
        assert isinstance(fetcher, Fetcher)
        if self._last is None:
            item = fetcher.batches.pop(0)
            self._look_ahead(fetcher)
            if fetcher.batches:
                return item
            self._last = item
        fetcher.done = self._trains_the_last()
        return self._last

    def _skip_what_is_done(self) -> bool:
        """Go on where a checkpoint ended within this epoch; return whether the loader can."""
        given = loaders(self._trainer.fit_loop)
        if not batches_done(self._trainer) or len(given) > 1 or not given[0].skips:
            return False
        if not find_place(self._trainer, self._origin(), self._split, given[0].given):
            rank_zero_warn(str(refuse_other_split(self._origin(), self._split)))
            return False
        given[0].skip(batches_done(self._trainer))
        return True

    def _start(self, fetcher: Fetcher) -> None:
        fetcher.done = False  # it is when all are
        self._turns.begin_shards(uneven=True)
        self._last = self._sync_point = None
        if not fetcher.batches:
            self._look_ahead(fetcher)
        if not fetcher.batches:
            raise ConfigurationError(
                "This pipeline was given no batches in this epoch. Every pipeline needs one at least: give it more "
                "data, or use fewer pipelines."
            )

    def _look_ahead(self, fetcher: Fetcher) -> None:
        if fetcher.length is None or fetcher.fetched < fetcher.length:
            with suppress(StopIteration):
                fetcher.batches.append(DataFetcher.__next__(fetcher))
            fetcher.done = False

    def _trains_the_last(self) -> bool:
        """Return whether the last batch, the only one left, is to be trained in this turn, like the last of every
        pipeline."""
        position = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        sync_point = self._sync_point
        if sync_point is None or (position == sync_point.position and not sync_point.closing):
            sync_point = self._sync_point = self._turns.wait_for_others()
        last = sync_point.closing and position == sync_point.position - 1
        self._turns.begin_turn(has_batch=last)
        return last
