"""Counters follow the progress of all, whatever a pipeline trains in a turn, and the next sync point is where Lightning
would do something for everybody, on equal pipelines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.progress import _BatchProgress, _OptimizationProgress, _Progress, _ReadyCompletedTracker

from lightning_sdpipe.loop.equal_split import EqualSplit, next_sync_point


class Loop:
    """What is counted, and the numbers at which schedulers step."""

    def __init__(self) -> None:
        self.batch_progress = _BatchProgress()
        self.automatic_optimization = SimpleNamespace(optim_progress=_OptimizationProgress())
        self.max_steps = -1
        self._batches_that_stepped = 0
        self.stepped: list[int] = []

    def _update_learning_rates(self, interval: str, update_plateau_schedulers: bool) -> None:
        self.stepped.append(self.batch_progress.current.ready)


def trainer_of(loop: Any, batches: int, **more: Any) -> Any:
    """One that is in an epoch of so many batches."""
    given = {"accumulate_grad_batches": 1, "log_every_n_steps": 0, "checkpoint_callbacks": [], **more}
    return SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=loop), num_training_batches=batches, **given)


@given(
    turns=st.lists(st.integers(0, 5), min_size=1, max_size=30), accumulate=st.integers(1, 3), every=st.integers(1, 4)
)
def test_schedulers_and_loggers_miss_nothing(turns: list[int], accumulate: int, every: int) -> None:
    end, loop = sum(turns) + 1, Loop()
    trainer = trainer_of(loop, end, accumulate_grad_batches=accumulate, log_every_n_steps=every)
    split = EqualSplit(trainer, lambda: True)
    split.begin()
    numbers = [0]
    for step in [*turns, 1]:
        numbers.append(numbers[-1] + step)
        loop.batch_progress.increment_ready()  # as Lightning does when it begins a turn
        loop.batch_progress.increment_started()
        split.advance(numbers[-2], numbers[-1])
        loop.batch_progress.increment_processed()
        split.update_schedulers(plateau=False)
        loop.batch_progress.increment_completed()
        loop._batches_that_stepped += 1  # a turn that closes
        before, now = (number // accumulate // every for number in numbers[-2:])
        if now > before and numbers[-1] < end:
            assert loop._batches_that_stepped == now * every  # so it is logged
        progress = loop.batch_progress
        for tracker in (progress.current, progress.total):
            assert {tracker.ready, tracker.started, tracker.processed, tracker.completed} == {numbers[-1]}
        assert progress.is_last_batch == (numbers[-1] == end)
    steps = -(-end // accumulate)
    assert loop.automatic_optimization.optim_progress.optimizer_steps == loop._batches_that_stepped == steps
    assert loop.stepped == [n for n in range(1, end + 1) if n % accumulate == 0 or n == end]


@given(turns=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=30))
def test_steps_by_hand_follow_the_progress_of_all(turns: list[tuple[int, int]]) -> None:
    """Equal pipelines are taken to step as often on a batch as this one; where a segment ends, as often as the leader
    has counted."""
    progress = _Progress.from_defaults(_ReadyCompletedTracker)
    loop: Any = Loop()
    loop.manual_optimization = SimpleNamespace(optim_step_progress=progress)
    progress.total.completed = progress.total.ready = 7  # of earlier epochs
    split, number, made = EqualSplit(trainer_of(loop, 1000), lambda: True, by_hand=True), 0, 0
    split.begin()
    for place, (batches, steps) in enumerate(turns, 1):
        for _ in range(steps):
            progress.increment_ready()
            progress.increment_completed()
        before, number, made = number, number + batches, made + steps
        split.advance(before, number)
        assert progress.total.completed == progress.total.ready == 7 + round(number * (made / place))
        assert progress.current.completed == round(number * (made / place))
    split.agree(lambda mine: [mine[0] + 2])
    assert progress.total.completed == 7 + round(number * (made / len(turns))) + 2
    split.begin()
    split.advance(number, number + 1, trained=False)  # others have, as often on a batch as this one did
    assert progress.total.completed == 7 + round(number * (made / len(turns))) + 2 + round(made / len(turns))


def test_no_pipeline_ends_the_epoch_alone_by_its_steps_by_hand() -> None:
    progress = _Progress.from_defaults(_ReadyCompletedTracker)
    loop: Any = Loop()
    loop.manual_optimization, loop.max_steps = SimpleNamespace(optim_step_progress=progress), 10
    split = EqualSplit(trainer_of(loop, 1000), lambda: True, by_hand=True)
    split.begin()
    for number in (1, 2, 3):
        for _ in range(6):
            progress.increment_ready()
            progress.increment_completed()
        split.advance(number - 1, number)
        assert progress.total.completed == min(6 * number, 9)
    split.agree(lambda mine: mine)
    assert progress.total.completed == 18  # all are together


def test_the_step_at_which_all_meet_is_found_by_their_pace() -> None:
    progress = SimpleNamespace(current=SimpleNamespace(ready=6), total=SimpleNamespace(ready=16))
    loop = SimpleNamespace(batch_progress=progress, max_steps=50, _should_check_val_epoch=lambda: False)
    trainer = trainer_of(loop, 100, global_step=32, val_check_batch=100)
    checks: Any = SimpleNamespace(next=None)
    assert next_sync_point(trainer, checks, by_hand=True) == 6 + 9  # two steps in each batch, and 18 are left
    trainer.global_step = progress.total.ready = progress.current.ready = 0
    assert next_sync_point(trainer, checks, by_hand=True) == 1  # which tells how many there are in a batch


SMALL = st.integers(1, 9)


@given(
    end=SMALL,
    start=st.integers(0, 8),
    epochs=st.integers(0, 3),
    accumulate=st.integers(1, 4),
    validation=st.none() | SMALL,
    over_epochs=st.booleans(),
    saves=st.lists(SMALL, max_size=2),
    max_steps=st.just(-1) | st.integers(0, 20),
    clock=st.none() | st.integers(0, 20),
)
def test_nothing_is_passed_over(
    end: int,
    start: int,
    epochs: int,
    accumulate: int,
    validation: int | None,
    over_epochs: bool,
    saves: list[int],
    max_steps: int,
    clock: int | None,
) -> None:
    start = min(start, end - 1)
    per_epoch = -(-end // accumulate)

    def steps(number: int) -> int:
        return epochs * per_epoch + (per_epoch if number == end else number // accumulate)

    def pauses(number: int) -> bool:
        counted = number + (epochs * end if over_epochs else 0)
        return (
            number == end
            or (validation is not None and counted % validation == 0)
            or (steps(number) > steps(number - 1) and any(steps(number) % every == 0 for every in saves))
            or (steps(number) > steps(number - 1) and steps(number) == max_steps)
            or (clock is not None and epochs * end + number >= clock)
        )

    if max_steps != -1:
        max_steps = max(max_steps, steps(start) + 1)  # else training is over
    progress = SimpleNamespace(current=SimpleNamespace(ready=start), total=SimpleNamespace(ready=epochs * end + start))
    loop = SimpleNamespace(
        batch_progress=progress, max_steps=max_steps, _should_check_val_epoch=lambda: validation is not None
    )
    trainer = trainer_of(
        loop,
        end,
        accumulate_grad_batches=accumulate,
        global_step=steps(start),
        val_check_batch=validation,
        check_val_every_n_epoch=None if over_epochs else 1,
        checkpoint_callbacks=[ModelCheckpoint(every_n_train_steps=every) for every in saves],
    )
    checks: Any = SimpleNamespace(next=clock)
    expected = next(number for number in range(start + 1, end + 1) if pauses(number))
    assert next_sync_point(trainer, checks) == expected
