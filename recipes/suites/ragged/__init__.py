"""Pipelines of unlike depths and cuts: what they make of fleets that are no rectangles, in whole epochs.

Workers sleep instead of computing, at the speeds of assumed devices; only ``samples`` computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from recipes.suites import machine
from recipes.suites.cases import Named, RealCase, named
from recipes.suites.convergence import learned, train
from recipes.suites.journal import Journal
from recipes.suites.ragged.fleets import Shape, network, rectangle, unlike
from recipes.suites.ragged.trainings import BY_SPEED, Emulated, Epochs, Training
from recipes.suites.ratios import Ratios, Row, quotients, ratio, refuse_unknown, rotated
from recipes.suites.trainings import quiet

LOWER_IS_BETTER = frozenset({"samples", "place", "search"})

RAGGED, RECTANGLE = "ragged", "rectangle"
OURS, BASELINE, ALONE = "sdpipe", "all_reduce", "nosync"
RECTANGLE_GOALS = {"1+4": 1.30, "5": 1.08, "2+4": 1.03}
BOUND_GOALS = {"1+4": 0.85}
NOSYNC_GOAL, SAME_GOAL, PLACE_GOAL, SEARCH_GOAL, SAMPLES_GOAL = 0.90, 0.98, 0.05, 1.0, 1.05
ALL_REDUCE_FLEET, ALL_REDUCE_GOAL = "1+4", 1.25
SAME = "2x3"
SAME_CUTS = ((6, 7), (7, 6), (6, 7)), ((6, 7),) * 3
"""Thirteen blocks, one of which takes no time: on whichever side of a cut it is, the work is the same."""
ONE = "1"
"""A device of speed 1 by itself: its mini-batches have the host's time in them, which no assumed speed has."""
PARTS = ("fleets", "all_reduce", "same", "samples")
FIELDS = ("iterations", "num_micro_batches", "variance_correction")
"""Those of an experiment that a real case takes."""


def run(
    *,
    methods: Mapping[str, Any],
    heterogeneity: Mapping[str, Any],
    workloads: Mapping[str, Any],
    fleets: Mapping[str, Mapping[str, Any]],
    measured: Sequence[str],
    model: Mapping[str, Any],
    cut: float,
    kept: float,
    conditions: Sequence[str],
    samples: Mapping[str, Any],
    only: Sequence[str],
    repeats: int,
    output: str | None,
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Run the parts that ``only`` names.

    Args:
        methods: specifications for Hydra, by name.
        heterogeneity: likewise.
        workloads: the ``model`` and ``data`` of each, likewise.
        fleets: by name, as :func:`~recipes.suites.ragged.fleets.network` takes them.
        measured: names of fleets.
        model: fields of :class:`~recipes.suites.ragged.trainings.Emulated`.
        cut: what a cut takes, where shapes are searched.
        kept: bytes in flight, likewise.
        conditions: names of ``heterogeneity``, besides unlike speeds.
        samples: arguments of :func:`measure_samples`.
        only: names of parts.
        repeats: with seeds that count up.
        output: finished rows are kept beside this file; None for nowhere.
        seed: of the first repeat.

    Raises:
        ConfigurationError: a part, a fleet or a condition that there is not.
    """
    refuse_unknown("a part of suite=ragged", only, PARTS)
    refuse_unknown("among suite.heterogeneity", conditions, heterogeneity)
    refuse_unknown("among suite.fleets", measured, fleets)
    fleets = {name: fleets[name] for name in measured}
    quiet()
    journal = Journal(None if output is None else Path(output).with_suffix(".rows.jsonl"), machine.setting())
    emulated = Emulated(**model)
    rows: list[Row] = []
    models = {ONE: of_one(emulated), "same": with_a_free_block(emulated)}
    for part in (ONE, *PARTS[:-1]):
        epochs = Epochs(models.get(part, emulated), methods, heterogeneity, journal)
        for repeat in range(repeats if (part if part != ONE else "fleets") in only else 0):
            planned = list(plan(part, fleets, emulated.blocks, emulated.num_micro_batches, cut, kept, conditions))
            rows += [epochs.row(training, repeat, seed + repeat) for training in rotated(planned, repeat)]
    found = ratios(rows)
    if "fleets" in only:
        found |= _searches(fleets, emulated, cut, kept)
    if "samples" in only:
        more = measure_samples(
            **samples, workloads=workloads, method=methods[OURS], repeats=repeats, journal=journal, seed=seed
        )
        rows, found = [*rows, *more[0]], found | more[1]
    return rows, found


def with_a_free_block(model: Emulated) -> Emulated:
    """Return the same with a block in the middle that takes no time."""
    return replace(model, free=model.blocks // 2)


def of_one(model: Emulated) -> Emulated:
    """Return the same with the mini-batches of one of three pipelines."""
    batches, validation_batches = (max(1, count // 3) for count in (model.batches, model.validation_batches))
    return replace(model, batches=batches, validation_batches=validation_batches)


def plan(
    part: str,
    fleets: Mapping[str, Mapping[str, Any]],
    blocks: int,
    micro_batches: int,
    cut: float,
    kept: float,
    conditions: Sequence[str],
) -> Iterator[Training]:
    """Yield the trainings of one part of the suite. Arguments are those of :func:`run`."""
    if part == ONE:
        yield Training(ONE, RECTANGLE, ALONE, "none", Shape(((blocks,),), (1.0,), 1.0))
        return
    if part == "same":
        for mesh, cuts in zip((RAGGED, RECTANGLE), SAME_CUTS, strict=True):
            yield Training(SAME, mesh, OURS, "none", Shape(cuts, (1.0,) * 6))
        return
    for name, fleet in fleets.items():
        devices = network(fleet, blocks, micro_batches, cut, kept)
        if part == "fleets":
            ragged = unlike(devices, micro_batches, "groups")
            for condition in conditions:
                for method in (OURS, ALONE):
                    yield Training(name, RAGGED, method, condition, ragged)
            yield Training(name, RECTANGLE, OURS, "none", rectangle(devices, micro_batches, "groups"))
        elif name == ALL_REDUCE_FLEET:
            yield Training(name, RAGGED, BASELINE, "none", unlike(devices, micro_batches, "all_reduce"))
            yield Training(name, RECTANGLE, BASELINE, "none", rectangle(devices, micro_batches, "all_reduce"))
            for mesh, shape in ((RAGGED, unlike), (RECTANGLE, rectangle)):
                by_speed = shape(devices, micro_batches, "groups")  # speeds add up, as where pipelines do not wait
                yield Training(name, mesh, f"{BASELINE}/{BY_SPEED}", "none", by_speed)


def ratios(rows: Sequence[Row]) -> Ratios:
    """Return those that were measured."""
    found: Ratios = {}
    hosts = {r["repeat"]: r["batches_per_s"] / r["predicted_per_s"] for r in rows if r["fleet"] == ONE}
    for fleet in dict.fromkeys(row["fleet"] for row in rows):
        ours, alone = (f"{RAGGED} {method}" for method in (OURS, ALONE))
        base, rectangular = f"{RAGGED} {BASELINE}", f"{RECTANGLE} {OURS}"
        own = [row for row in rows if row["fleet"] == fleet]
        for key, mine, other, condition, goal in (
            (f"same/{fleet}" if fleet == SAME else f"rectangle/{fleet}", ours, rectangular, "none", _goal(fleet)),
            (f"nosync/{fleet}/none", ours, alone, "none", NOSYNC_GOAL),
            (f"nosync/{fleet}/b", ours, alone, "b", NOSYNC_GOAL),
            (f"all_reduce/{fleet}", base, f"{RECTANGLE} {BASELINE}", "none", ALL_REDUCE_GOAL),
            (
                f"all_reduce/{fleet}/by_speed",
                f"{base}/{BY_SPEED}",
                f"{RECTANGLE} {BASELINE}/{BY_SPEED}",
                "none",
                ALL_REDUCE_GOAL,
            ),
        ):
            if values := quotients(own, "epoch_s", (other, condition), (mine, condition)):
                found[key] = ratio(values, goal, f"s per epoch, {fleet} emulated, {condition}: {other} over {mine}")
        speeds = [r["batches_per_s"] / r["sum_of_speeds"] for r in own if _is(r, ours)]
        if speeds and fleet != SAME:
            meaning = f"mini-batches/s of whole epochs, {fleet} emulated: {ours} over the sum of the devices' own"
            found[f"bound/{fleet}"] = ratio(speeds, BOUND_GOALS.get(fleet), meaning)
        errors = [
            abs(hosts[r["repeat"]] * r["predicted_per_s"] / r["batches_per_s"] - 1)
            for r in own
            if _is(r, alone) and r["repeat"] in hosts
        ]
        if errors:
            meaning = (
                f"how far mini-batches/s are predicted from those of {alone}, {fleet} emulated, by one device's own"
            )
            found[f"place/{fleet}"] = ratio(errors, PLACE_GOAL, meaning)
    return found


def _goal(fleet: str) -> float | None:
    return SAME_GOAL if fleet == SAME else RECTANGLE_GOALS.get(fleet)


def _is(row: Row, what: str) -> bool:
    return bool((row["what"], row["heterogeneity"]) == (what, "none"))


def _searches(fleets: Mapping[str, Mapping[str, Any]], model: Emulated, cut: float, kept: float) -> Ratios:
    found: Ratios = {}
    for name, fleet in fleets.items():
        devices = network(fleet, model.blocks, model.num_micro_batches, cut, kept)
        seconds = unlike(devices, model.num_micro_batches, "groups").search_seconds
        found[f"search/{name}"] = ratio([seconds], SEARCH_GOAL, f"processor seconds of the search, {name}")
    return found


def measure_samples(
    *,
    meshes: Mapping[str, Mapping[str, Any]],
    experiments: Mapping[str, Mapping[str, Any]],
    workloads: Mapping[str, Any],
    method: Mapping[str, Any],
    pace: float,
    points: int,
    repeats: int,
    journal: Journal,
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Train with real compute: pipelines of unlike depths, to which batches are dealt by speed, and as many equal ones
    on equal devices. Return rows of all trainings, and samples to the target of ``ragged`` over those of ``rectangle``.

    Args:
        meshes: the ``depths`` of the pipelines or one number of stages, and by how many times each rank's device is
            slower than the fastest.
        experiments: by the name of their workload, as in ``suite=convergence``.
        workloads: the ``model`` and ``data`` of each, specifications for Hydra.
        method: the specification of SDPipe.
        pace: how many times slower than a core the fastest device is.
        points: of each learning curve.
        repeats: of each, with seeds that count up.
        journal: of finished measurements.
        seed: of the first repeat.
    """
    rows: list[Row] = []
    for name, experiment in experiments.items():
        for repeat in range(repeats):
            for mesh in rotated(list(meshes), repeat):
                fields = {key: value for key, value in meshes[mesh].items() if key != "factors"}
                speeds = {"_target_": "lightning_sdpipe.heterogeneity.Static", "factors": meshes[mesh]["factors"]}
                case = RealCase(
                    panel="ragged",
                    method=Named("sdpipe", method),
                    condition=Named("static", speeds),
                    schedule="1f1b",
                    warm_up=0,
                    scale=1.0,
                    seed=seed + repeat,
                    workload=named({"workloads": workloads}, "workloads", name),
                    pace=pace,
                    data="auto",
                    **fields,
                    **{key: experiment[key] for key in FIELDS if key in experiment},
                )
                print(f"{case.workload.name} {mesh} {case.shape}, repeat {repeat}", end=": ", flush=True)
                learn = partial(train, case, experiment["metric"], experiment["snapshot_every"], points)
                row = learned(case, experiment, {"points": points}, journal, learn)
                rows.append({"what": f"{mesh} sdpipe", "repeat": repeat, "emulated": False, **row})
    return rows, samples_ratios(rows)


def samples_ratios(rows: Sequence[Row]) -> Ratios:
    """Compare the seeds in which the rectangle reaches the target; what does not reach it needs infinitely many."""
    found: Ratios = {}
    for workload in dict.fromkeys(row["workload"] for row in rows):
        own = [row for row in rows if row["workload"] == workload]
        values = quotients(own, "samples_to_target", ("ragged sdpipe",), ("rectangle sdpipe",), names=("what",))
        if values:
            meaning = (
                f"samples to {own[0]['target']}, {workload}, real compute: unlike depths over as many equal pipelines"
            )
            found[f"samples/{workload}"] = ratio(values, SAMPLES_GOAL, meaning)
    return found
