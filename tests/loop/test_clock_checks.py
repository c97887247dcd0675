"""All pipelines find the same due by the clock, at the same batches, whatever their own clocks and whichever leads."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint, Timer

from lightning_sdpipe import lightning_internals
from lightning_sdpipe.loop import loop
from lightning_sdpipe.loop.loop import ClockChecks, Countdown


class Pipeline:
    """One of several that count the same batches: its clock is its own, and so is its speed."""

    def __init__(self, world: World, offset: float, seconds: float) -> None:
        self.world, self.now, self.seconds = world, offset, seconds
        self.due_at = [offset + every for every in world.every]
        self.clocks = [Countdown(i, every, self._left(i), self._wind(i)) for i, every in enumerate(world.every)]
        self.checks = ClockChecks(self.clocks, lambda said: world.from_leader(self, said), lambda: self.now)
        self.happened: list[tuple[int, int]] = []

    def _left(self, i: int) -> Callable[[], float]:
        return lambda: self.due_at[i] - self.now

    def _wind(self, i: int) -> Callable[[float], None]:
        def wind(left: float) -> None:
            self.due_at[i] = self.now + left

        return wind

    def do_what_is_due(self, batch: int) -> None:
        for clock in self.clocks:
            if self.checks.is_due(clock.owner):
                assert clock.left() <= 0, "Lightning must find it due, too"
                self.happened.append((batch, int(str(clock.owner))))
                clock.wind(clock.every)


class World:
    """Pipelines, the first of which leads."""

    def __init__(self, every: list[float]) -> None:
        self.every = every
        self.pipelines: list[Pipeline] = []

    def from_leader(self, asking: Pipeline, numbers: list[float]) -> list[float]:
        if asking is self.pipelines[0]:
            self.said = list(numbers)
        return self.said


@given(
    every=st.lists(st.floats(1.0, 20.0), min_size=1, max_size=3),
    speeds=st.lists(st.floats(0.05, 2.0), min_size=2, max_size=4),
    offsets=st.lists(st.floats(-1e3, 1e6), min_size=5, max_size=5),
    loses_leader=st.integers(1, 60),
    joins=st.integers(1, 60),
)
def test_what_is_due_is_due_on_all_at_once(
    every: list[float], speeds: list[float], offsets: list[float], loses_leader: int, joins: int
) -> None:
    world = World(every)
    world.pipelines = [Pipeline(world, offset, speed) for offset, speed in zip(offsets, speeds, strict=False)]
    for pipeline in world.pipelines:
        pipeline.checks.start(0)
    looks, since = 0, 0
    for batch in range(1, 80):
        slowest = max(pipeline.seconds for pipeline in world.pipelines)  # they meet after each batch here
        for pipeline in world.pipelines:
            pipeline.now += slowest
        if batch == joins:
            newcomer = Pipeline(world, offsets[-1], speeds[0])
            newcomer.checks.start_at(world.pipelines[0].checks.next)
            newcomer.checks.start(batch - 1)
            since = len(world.pipelines[0].happened)
            world.pipelines.append(newcomer)
        if batch == loses_leader:
            world.pipelines.pop(0)
        assert len({pipeline.checks.next for pipeline in world.pipelines}) == 1
        if world.pipelines[0].checks.agreed(batch):
            looks += 1
            for pipeline in world.pipelines:
                pipeline.checks.look()
            for pipeline in world.pipelines:
                pipeline.do_what_is_due(batch)
            for pipeline in world.pipelines:
                pipeline.checks.renew(batch)
    assert looks
    for other in world.pipelines:
        seen = world.pipelines[0].happened
        assert other.happened == seen[len(seen) - len(other.happened) :]
        assert len(other.happened) in {len(seen), len(seen) - since}


def test_it_is_looked_at_some_ten_times_on_the_way_and_in_time() -> None:
    world = World([100.0])
    world.pipelines = [Pipeline(world, 0.0, 0.1)]
    (only,) = world.pipelines
    only.checks.start(0)
    looks = []
    for batch in range(1, 1010):
        only.now += 0.1
        if only.checks.agreed(batch):
            looks.append(batch)
            only.checks.look()
            only.do_what_is_due(batch)
            only.checks.renew(batch)
    assert [batch for batch, _ in only.happened] in ([1000], [1001])
    assert len(looks) < 40


@pytest.mark.parametrize(
    "made",
    [
        lambda: Timer(duration={"seconds": 100}),
        lambda: ModelCheckpoint(train_time_interval=timedelta(seconds=100)),
        lambda: None,
    ],
    ids=["timer", "checkpoint", "validation"],
)
def test_clocks_of_lightning_are_wound(made: Callable[[], Any]) -> None:
    callback = made()
    options: dict[str, Any] = {"callbacks": [callback]} if callback else {"val_check_interval": {"seconds": 100}}
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=callback is not None, **options)
    (clock,) = loop.clocks(trainer)
    assert clock.every == 100
    if callback is None:
        trainer._last_val_time = time.monotonic()
    else:
        callback.on_train_start(trainer, None)
    assert 99 < clock.left() <= 100
    clock.wind(7.0)
    assert 6 < clock.left() <= 7
    clock.wind(-0.001)
    assert clock.left() < 0


def test_a_timer_that_goes_on_from_a_checkpoint_is_wound_as_well() -> None:
    timer = Timer(duration={"seconds": 100})
    timer.load_state_dict({"time_elapsed": {"train": 60.0}})
    timer.on_train_start(L.Trainer(accelerator="cpu", logger=False), L.LightningModule())
    assert 39 < lightning_internals.seconds_left(timer) <= 40
    lightning_internals.set_seconds_left(timer, 5.0)
    assert 4 < lightning_internals.seconds_left(timer) <= 5


@pytest.mark.parametrize("of", [ModelCheckpoint, Timer])
def test_what_a_subclass_does_after_every_batch_is_done_though_the_clock_is_not_looked_at(of: Any) -> None:
    class Counts(of):  # type: ignore[misc]
        batches = 0

        def on_train_batch_end(self, *arguments: Any, **kwargs: Any) -> None:
            self.batches += 1
            super().on_train_batch_end(*arguments, **kwargs)

    times: dict[str, Any] = {
        ModelCheckpoint: {"train_time_interval": timedelta(0), "save_last": True},
        Timer: {"duration": {"seconds": 0}},
    }[of]
    callback = Counts(**times)
    strategy = Mock()
    trainer = Mock(strategy=strategy, global_step=3, should_stop=False)
    callback.on_train_start(trainer, Mock())
    for due in (False, True):
        with lightning_internals.due_by_clock(callback, due):
            callback.on_train_batch_end(trainer, Mock(automatic_optimization=True), None, None, 0)
        assert strategy.broadcast.called == due, "a decision of all workers, which are together only then"
    assert callback.batches == 2
    assert lightning_internals.seconds_between(callback) == 0
