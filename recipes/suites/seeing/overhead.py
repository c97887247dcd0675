"""Cost of the meter: a call of it by the clock, and a training with it over one without."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import msgspec

from lightning_sdpipe import meter
from lightning_sdpipe.scheduler.client.training_asks import RowBuffer
from recipes.suites.calibration import calibrated_scale
from recipes.suites.cases import EmulatedCase, named
from recipes.suites.journal import Journal
from recipes.suites.ratios import Ratios, Row, ratio, rotated
from recipes.suites.trainings import measure as measure_training
from recipes.suites.trainings import quiet

SPANS = {"2x2": 21}
"""Of an update with four micro-batches, by the shape of the run."""
BEAT = 16
"""Updates of a heartbeat."""


def measure(*, updates: int, update_seconds: float, repeats: int, seed: int) -> tuple[list[Row], Ratios]:
    """Spans, rows and their encoding, over an update of ``update_seconds``."""
    rows: list[Row] = []
    for repeat in range(repeats):
        for shape, spans in SPANS.items():
            seconds = _seconds(updates, spans)
            rows.append({"what": "meter", "shape": shape, "repeat": repeat, "us_per_update": 1e6 * seconds})
    ratios = {
        f"overhead/{shape}": ratio(
            [row["us_per_update"] / 1e6 / update_seconds for row in rows if row["shape"] == shape],
            0.005,
            f"spans, rows and heartbeats of an update over its {1e3 * update_seconds:g} ms",
        )
        for shape in SPANS
    }
    return rows, ratios


def _seconds(updates: int, spans: int) -> float:
    """Return the seconds of the meter in an update."""
    own, buffer = meter.Meter(), RowBuffer()
    span, encode = own.spans[meter.FORWARD], msgspec.msgpack.Encoder().encode
    start = time.perf_counter()
    for update in range(updates):
        for _ in range(spans):
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
    *,
    methods: Mapping[str, Any],
    heterogeneity: Mapping[str, Any],
    case: Mapping[str, Any],
    scale: float | None,
    repeats: int,
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Samples per second of trainings with the meter over those without, in rotated order.

    Args:
        methods: specifications for Hydra, by name.
        heterogeneity: likewise.
        case: of :class:`~recipes.suites.cases.EmulatedCase`, what is not given here.
        scale: of emulated times; None to measure it.
        repeats: of each.
        seed: of everything random.
    """
    quiet()
    known = {"methods": methods, "heterogeneity": heterogeneity}
    training = EmulatedCase(
        panel="throughput",
        method=named(known, "methods", "sdpipe"),
        condition=named(known, "heterogeneity", "none"),
        scale=scale or 1.0,
        seed=seed,
        **case,
    )
    if scale is None:
        factor = calibrated_scale(training, methods["all_reduce"], heterogeneity["none"], Journal(None, {}))
        training = EmulatedCase(**{**vars(training), "scale": factor})
    speeds: dict[str, list[float]] = {"on": [], "off": []}
    rows: list[Row] = []
    for repeat in range(repeats):
        for what in rotated(list(speeds), repeat):
            with _metered(what == "on"):
                measured = measure_training(training)
            speeds[what].append(measured["samples_per_s"])
            rows.append({"what": f"meter {what}", "shape": training.shape, "repeat": repeat, **measured})
    values = [on / off for on, off in zip(speeds["on"], speeds["off"], strict=True)]
    key = f"throughput/{training.shape}/none"
    return rows, {key: ratio(values, 0.99, "samples/s of SDPipe: with the meter over without")}


@contextmanager
def _metered(on: bool) -> Iterator[None]:
    """Workers are forked, so that they have what is in the place of the meter's methods here."""
    if on:
        yield
        return
    with mock.patch.multiple(
        meter.Meter, enter=lambda self, phase: None, leave=lambda self: None, update_ended=lambda self, waited: None
    ):
        yield
