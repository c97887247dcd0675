"""Lightning's loop, kept from holding all ranks in step, and from letting them decide differently.

Within an epoch, pipelines run at their own speeds. Lightning's loop is written for ranks that do the same batch at the
same time. What it does between batches is changed here, in the loop of one Trainer:

- Before every batch, it broadcasts from rank 0 whether that has received SIGTERM. Every worker would wait there for
  rank 0's worker. Here a worker that receives SIGTERM fails like any other, and the scheduler tells the rest.
- After every batch, it broadcasts whether rank 0's clock says that training ends or a checkpoint is due, and asks each
  rank's own clock whether to validate. Here all look at the clock after batches that they have agreed on.
- A rank on which ``trainer.should_stop`` is set would stop alone. Here all stop at the next point where all meet, which
  comes at once where batches are dealt.
- A rank whose data end sooner would end the epoch alone. Here it counts on, until all are at the end.
- Every rank would train as many batches as the others. Here they may be dealt by speed.
"""

from __future__ import annotations

import math
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import FrameType, FunctionType
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PassThroughProfiler
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sdpipe import lightning_internals
from lightning_sdpipe.data.loader import PipelineLoader
from lightning_sdpipe.lightning_internals import Method
from lightning_sdpipe.loop.batch_source import BatchSource, Turns, batches_done, move_to

_SOONEST, _LATEST = 1, 2**40
_NOTHING = nullcontext()
_ROUNDING = 1e-3
"""Seconds by which a due feature is set past its time, so that rounding cannot hide it."""


@dataclass(frozen=True)
class Countdown:
    """A feature of a Trainer that is due by the clock: a callback that ends training or saves, or validation.

    Args:
        owner: the callback, or the Trainer.
        every: seconds from one time to the next.
        left: returns the seconds until it is due; 0 or less if it is.
        wind: makes it due in a given number of seconds.
    """

    owner: object
    every: float
    left: Callable[[], float]
    wind: Callable[[float], None]


class ClockChecks:
    """Agreement on the batches after which all workers look at the clock. Batches count from the start of training, the
    same on all workers.

    Lightning asks after every batch whether ``max_time`` has passed or a checkpoint is due by the clock, and takes rank
    0's answer, so all workers would wait for rank 0 each time. Here they agree on the number of the batch after which
    they ask next: half of the way to what is due next, as far as the leader can tell from its pace. So they meet some
    ten times on the way to a limit, and just before it after every batch. At each look all clocks are set to the
    leader's, and whichever pipeline leads next goes on from there.

    Args:
        clocks: in the same order on all workers.
        from_leader: gives all workers the leader's numbers; all of them call it at the same batch.
        time: returns seconds.
    """

    def __init__(
        self,
        clocks: Sequence[Countdown],
        from_leader: Callable[[list[float]], list[float]],
        time: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clocks = clocks
        self.from_leader = from_leader
        self._now = time
        self._batch, self._time = 0, time()
        self._next: int | None = None
        self._given: int | None = None
        self._due: list[object] = []
        self.now = False
        """True if the clock may be looked at: all workers are together."""

    def start_at(self, look: int | None) -> None:
        """Let training start among workers that look at the clock next after ``look`` batches."""
        self._given = look

    def start(self, batch: int) -> None:
        """Start training, or go on after ``batch`` batches; the first look is after the next one."""
        self.now = False
        self._batch, self._time, self._next = batch, self._now(), self._given or batch + 1
        self._given = None

    @property
    def next(self) -> int | None:
        """Number of batches after which all look at the clock next; None if nothing is ever due by it."""
        return self._next if self._clocks else None

    def agreed(self, batch: int) -> bool:
        """Return whether it is agreed to look at the clock after ``batch`` batches."""
        return bool(self._clocks) and self._next is not None and batch >= self._next

    def look(self) -> None:
        """Look at the clock with all other workers; all find the same features due until :meth:`renew`."""
        self.now, self._due = True, []
        for clock, left in zip(self._clocks, self.from_leader([clock.left() for clock in self._clocks]), strict=True):
            if left <= 0:
                self._due.append(clock.owner)
            clock.wind(left if left > 0 else left - _ROUNDING)

    def is_due(self, owner: object) -> bool:
        """Return whether the feature of ``owner`` is due by this look."""
        return self.now and any(owner is each for each in self._due)

    def renew(self, batch: int) -> None:
        """Agree on the next look, after what was due has been done."""
        self.now = False
        now = self._now()
        pace = (now - self._time) / max(1, batch - self._batch)
        way = min(clock.left() for clock in self._clocks) / 2
        batches = min(max(way / max(pace, 1e-6), _SOONEST), _LATEST)
        self._batch, self._time = batch, now
        self._next = batch + int(self.from_leader([batches])[0])


def change(trainer: Trainer, turns: Turns, checks: ClockChecks, source: BatchSource | None = None) -> None:
    """Change ``trainer``'s loop and callbacks as this module says; ``source`` gives the batches of a fit.

    Must run before the Trainer registers its signal handlers, as ``Strategy.setup`` does; and again before each run.
    """
    _fail_on_sigterm(trainer)
    _stop_together(trainer, turns, checks)
    _look_together(trainer, checks)
    _begin_whole_epochs(trainer)
    _profile_nothing(trainer)
    _show_loaders(trainer)
    if source is not None:
        _take_over(trainer, source)
        source.change()
        _resume_quietly(trainer, source)


def change_back(trainer: Any) -> None:
    """Undo what :func:`change` and others of this package have changed in the objects that a user of ``trainer``
    holds."""
    epoch, connectors = trainer.fit_loop.epoch_loop, lightning_internals.connectors(trainer)
    loops = *_loading(trainer), epoch, epoch.automatic_optimization, epoch.manual_optimization
    for owner in (*loops, *connectors, *trainer.callbacks, trainer.profiler, trainer.precision_plugin):
        for name, value in list(vars(owner).items()):
            function = value.func if isinstance(value, partial) else value
            if isinstance(function, FunctionType) and function.__module__.startswith("lightning_sdpipe."):
                del vars(owner)[name]


def evaluation_loops(trainer: Any) -> list[Any]:
    """Return the loops of ``trainer`` that validate and test."""
    return [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop]


def clocks(trainer: Any) -> list[Countdown]:
    """Return the features of ``trainer`` that are due by the clock."""
    left, wind = lightning_internals.seconds_left, lightning_internals.set_seconds_left
    return [
        Countdown(owner, every, partial(left, owner), partial(wind, owner))
        for owner in (*trainer.callbacks, trainer)
        if (every := lightning_internals.seconds_between(owner)) is not None
    ]


def position(trainer: Trainer) -> int:
    """Return how many batches were begun in this epoch: equal on all ranks that meet."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def trains_whole_epochs(trainer: Any) -> bool:
    """Return whether ``limit_train_batches`` allows an epoch all batches of its loader; the int 1 is one batch."""
    return isinstance(trainer.limit_train_batches, float) and trainer.limit_train_batches == 1.0


def batches(trainer: Trainer) -> int:
    """Return how many batches were begun since training started: equal on all ranks that meet."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def count_steps(trainer: Trainer, number: int) -> None:
    """Set the count of optimizer steps in manual optimization to ``number``, as in other pipelines."""
    progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
    more = number - progress.total.completed
    for tracker in (progress.total, progress.current):
        tracker.ready = tracker.completed = tracker.completed + more


def _fail_on_sigterm(trainer: Trainer) -> None:
    lightning_internals.replace(trainer.fit_loop.epoch_loop, Method.BROADCAST_SIGTERM, lambda: None)

    def note_sigterm(signum: signal.Signals, _: FrameType) -> None:
        launcher = trainer.strategy.launcher
        if not trainer.received_sigterm and launcher is not None:
            launcher.kill(signum)
        lightning_internals.mark_sigterm_received(trainer)

    lightning_internals.on_sigterm(trainer, note_sigterm)
    lightning_internals.on_requeue_signal(trainer, _decline_to_requeue)


def _decline_to_requeue(signum: signal.Signals, _: FrameType) -> None:
    """Decline to requeue: Lightning would save a checkpoint in the handler, at a different batch on each rank, and the
    ranks would wait for ever."""
    rank_zero_warn(
        f"Signal {signum} does not requeue the job: workers cannot save a checkpoint at any moment. Save with "
        "ModelCheckpoint('checkpoints', save_last=True, train_time_interval=...), and resume by fit(ckpt_path='last')."
    )


def _take_over(trainer: Trainer, source: BatchSource) -> None:
    loop: Any = trainer.fit_loop

    def advance() -> None:
        fetcher = lightning_internals.fetcher(loop)
        assert fetcher is not None
        lightning_internals.set_fetcher(loop, source.take_over(fetcher))
        type(loop).advance(loop)

    loop.advance = advance


def _begin_whole_epochs(trainer: Trainer) -> None:
    """Make a run that resumes from a checkpoint of an epoch's last batch train no more of that epoch, and begin the
    next one like any other. Lightning goes by the number of that batch, but the epoch may have another number of
    batches now. It also takes a checkpoint from the end of that batch for the middle of the epoch: it leaves out
    ``on_train_epoch_start``, and its epoch counters stay one behind, so that a checkpoint within a later epoch, or a
    newcomer to an elastic run, would begin that epoch again."""
    loop: Any = trainer.fit_loop
    epoch: Any = loop.epoch_loop

    def reset() -> None:
        type(loop).reset(loop)
        if not loop.restarted_mid_epoch or not epoch.batch_progress.is_last_batch:
            return
        if epoch.restarted_on_train_batch_end:
            loop.reset_restart_stage()
            move_to(trainer, trainer.num_training_batches)
        elif trainer.num_training_batches != math.inf:
            move_to(trainer, int(trainer.num_training_batches))

    def advance(fetcher: Any) -> None:
        if epoch.restarting and epoch.batch_progress.is_last_batch and epoch.restarted_on_last:
            lightning_internals.skip_next_validation(trainer)  # the checkpoint was saved in it, or after it
        else:
            type(epoch).advance(epoch, fetcher)

    loop.reset, epoch.advance = reset, advance


def _profile_nothing(trainer: Any) -> None:
    """Make the default profiler, which measures nothing, take no time: Lightning runs two dozen of its generators in
    each step."""
    if type(trainer.profiler) is PassThroughProfiler:
        plain: Any = trainer.profiler
        plain.profile = lambda action_name: _NOTHING


def _loading(trainer: Any) -> tuple[Any, ...]:
    """Return the loops of ``trainer`` that have dataloaders."""
    return trainer.fit_loop, *evaluation_loops(trainer), trainer.predict_loop


def _show_loaders(trainer: Trainer) -> None:
    """Make ``trainer.train_dataloader`` and the like show Lightning's loaders, without this package's around them."""
    for loop in _loading(trainer):

        def setup_data(loop: Any = loop) -> None:
            type(loop).setup_data(loop)
            lightning_internals.show_loaders(
                loop, lambda each: each.given if isinstance(each, PipelineLoader) else each
            )

        loop.setup_data = setup_data


def _resume_quietly(trainer: Trainer, source: BatchSource) -> None:
    """Silence Lightning's warning that it does not know which batches of an epoch remain, where none remain or
    ``source`` knows. Lightning goes by the number of steps, which depends on the number of pipelines."""
    loop: Any = trainer.fit_loop.epoch_loop

    def reset() -> None:
        known = source.resumes or not batches_done(trainer)
        with warnings.catch_warnings() if known else nullcontext():
            if known:
                warnings.filterwarnings("ignore", ".*dataloader is not resumable")
            type(loop).reset(loop)

    loop.reset = reset


def _stop_together(trainer: Trainer, turns: Turns, checks: ClockChecks) -> None:
    fit_loop: Any = trainer.fit_loop
    epoch_loop: Any = fit_loop.epoch_loop
    asked = False
    strategy: Any = trainer.strategy
    is_alone = trainer.world_size == 1 and strategy.options.job is None

    def agree() -> None:
        nonlocal asked
        if is_alone:
            return
        if turns.together:
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(trainer.should_stop or asked, all=False)
            asked = False
        else:
            asked, trainer.should_stop = asked or trainer.should_stop, False
            if asked and turns.underway and lightning_internals.may_stop_early(trainer):
                turns.stop_dealing()

    def after_batch(fetcher: Any) -> None:
        agree()
        type(epoch_loop).on_advance_end(epoch_loop, fetcher)
        agree()  # validation may have changed it
        if checks.now:
            checks.renew(batches(trainer))

    def after_epoch() -> None:
        type(fit_loop).on_advance_end(fit_loop)
        agree()

    epoch_loop.on_advance_end, fit_loop.on_advance_end = after_batch, after_epoch


def _look_together(trainer: Any, checks: ClockChecks) -> None:
    def changed(callback: Any) -> Callable[..., None]:
        def on_train_batch_end(*arguments: Any, **kwargs: Any) -> None:
            with lightning_internals.due_by_clock(callback, checks.is_due(callback)):
                type(callback).on_train_batch_end(callback, *arguments, **kwargs)  # a subclass may do more

        return on_train_batch_end

    for callback in trainer.callbacks:
        if lightning_internals.seconds_between(callback) is not None:
            callback.on_train_batch_end = changed(callback)

    epoch_loop: Any = trainer.fit_loop.epoch_loop
    lightning_internals.restore(epoch_loop, Method.VALIDATES)  # after an earlier run

    def should_validate(fetcher: Any) -> bool:
        with lightning_internals.due_by_clock(trainer, checks.is_due(trainer)):
            decision: bool = lightning_internals.of_its_class(epoch_loop, Method.VALIDATES)(fetcher)
        return decision

    if lightning_internals.seconds_between(trainer) is not None:
        lightning_internals.replace(epoch_loop, Method.VALIDATES, should_validate)
