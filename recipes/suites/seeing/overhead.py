"""Cost of the meter: the time of its calls, and a training with it beside one without."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import msgspec

from lightning_sdpipe import meter
from lightning_sdpipe.scheduler.client.reporting import RowBuffer
from recipes.suites.grid import Case, Grid, Ratios, Row, in_turn, ratio, ratios, versus
from recipes.suites.throughput import summary
from recipes.suites.trainings import Named, Training, calibrated_scale, quiet, train

SHAPE, SPANS = "2x2", 21
"""Number of spans in an update with four micro-batches, in a run of this shape."""
BEAT = 16
"""Number of updates in a heartbeat."""


def measure(*, updates: int, update_seconds: float, repeats: int, seed: int) -> tuple[list[Row], Ratios]:
    """Return the ratio of the time of spans, rows and their encoding to an update of ``update_seconds``."""
    seconds = [_seconds(updates) for _ in range(repeats)]
    rows: list[Row] = [
        {"what": "meter", "shape": SHAPE, "repeat": repeat, "us_per_update": 1e6 * each}
        for repeat, each in enumerate(seconds)
    ]
    meaning = f"spans, rows and heartbeats of an update over its {1e3 * update_seconds:g} ms"
    return rows, {f"overhead/{SHAPE}": ratio([each / update_seconds for each in seconds], 0.005, meaning)}


def _seconds(updates: int) -> float:
    """Return the seconds that the meter takes in an update."""
    own, buffer = meter.Meter(), RowBuffer()
    span, encode = own.spans[meter.FORWARD], msgspec.msgpack.Encoder().encode
    start = time.perf_counter()
    for update in range(updates):
        for _ in range(SPANS):
            with span:
                pass
        row = own.update_ended(0.0)
        if row is not None:
            buffer.add(update, row, update)
        if update % BEAT == 0:
            encode(buffer.take())
    taken = time.perf_counter() - start
    own.close()
    return taken / updates


def measure_throughput(
    *, methods: Mapping[str, Any], case: Mapping[str, Any], scale: float | None, repeats: int, seed: int
) -> tuple[list[Row], Ratios]:
    """Return the ratio of samples per second of trainings with the meter to those without, run in rotated order.

    Args:
        methods: specifications for Hydra, by name.
        case: other fields of :class:`~recipes.suites.trainings.Training`.
        scale: factor of emulated times; None to measure it.
        repeats: repeats of each.
        seed: seed of all randomness.
    """
    quiet()
    training = Training(method=Named("sdpipe", methods["sdpipe"]), scale=scale or 1.0, seed=seed, **case)
    training = replace(training, scale=calibrated_scale(training, Grid())) if scale is None else training
    rows: list[Row] = []
    for repeat, what in in_turn(["meter on", "meter off"], repeats):
        columns = {"what": what, "shape": training.shape, "repeat": repeat}
        with _metered(what == "meter on"):
            rows += Grid().run([Case(columns, training)], _train, "samples_per_s")
    goal = versus("samples/s of SDPipe: with the meter over without", "samples_per_s", "meter on", "meter off", 0.99)
    return rows, ratios(rows, {f"throughput/{training.shape}/none": goal})


def _train(case: Training) -> Row:
    return summary(train(case), case.warm_up, case.num_micro_batches)


def _metered(on: bool) -> ExitStack:
    """Return a context in which workers are forked with a meter, or with one that does nothing."""
    stack = ExitStack()
    if not on:
        silent: dict[str, Any] = {"__enter__": lambda self: None, "__exit__": lambda self, *_: None}
        stack.enter_context(mock.patch.multiple(meter.Span, **silent))
        stack.enter_context(mock.patch.object(meter.Meter, "update_ended", return_value=None))
    return stack
