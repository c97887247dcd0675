"""The factors by which a benchmark stretches times: emulated ones until the cores are under half busy, and the delays
of real compute as its mini-batch is longer than the one that they are meant for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from recipes.suites import machine, trainings
from recipes.suites.cases import AnyCase, EmulatedCase, Named
from recipes.suites.journal import Journal

ITERATIONS = 20
NOMINAL_ITERATION_SECONDS = 0.1
"""The length of a mini-batch that delays are meant for: others get theirs in proportion. It is our choice: neither the
paper nor its artefact says how long a mini-batch is."""


def calibrated_scale(
    case: AnyCase, all_reduce: Mapping[str, Any], no_delays: Mapping[str, Any], journal: Journal
) -> float:
    """The scale for ``case`` and its like, measured with all-reduce and without delays.

    Args:
        case: any of those that shall have the same scale.
        all_reduce: the specification of this method.
        no_delays: the specification of this condition.
        journal: where the measurement is kept.
    """
    probe = replace(
        case,
        panel="calibration",
        method=Named("all_reduce", all_reduce),
        condition=Named("none", no_delays),
        iterations=ITERATIONS,
        warm_up=ITERATIONS // 4,
        scale=1.0,
    )
    if isinstance(probe, EmulatedCase):
        slots = case.num_micro_batches + case.num_stages - 1
        probe = replace(probe, schedule="1f1b", micro_batch_seconds=NOMINAL_ITERATION_SECONDS / slots)
    row = journal.measured(asdict(probe), lambda: trainings.measure(probe))
    if isinstance(probe, EmulatedCase):
        return machine.needed_scale(row["processor_s"], NOMINAL_ITERATION_SECONDS, machine.cores())
    return float(round(row["iteration_ms"] / 1e3 / NOMINAL_ITERATION_SECONDS, 2))
