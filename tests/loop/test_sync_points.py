"""The next pause is where Lightning would do something for everybody, on equal pipelines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_sdpipe.loop.sync_points import next_sync_point

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
    trainer: Any = SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_loop=loop),
        num_training_batches=end,
        accumulate_grad_batches=accumulate,
        global_step=steps(start),
        val_check_batch=validation,
        check_val_every_n_epoch=None if over_epochs else 1,
        checkpoint_callbacks=[ModelCheckpoint(every_n_train_steps=every) for every in saves],
    )
    checks: Any = SimpleNamespace(next=clock)
    expected = next(number for number in range(start + 1, end + 1) if pauses(number))
    assert next_sync_point(trainer, checks) == expected
