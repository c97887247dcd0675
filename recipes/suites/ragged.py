"""Pipelines of unlike depths and cuts: what they make of fleets that are no rectangles, in whole epochs.

Workers sleep instead of computing, at the speeds of assumed devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_sdpipe.placement.rate import Sync
from recipes.suites import epochs
from recipes.suites.fleets import Shape, network, shapes
from recipes.suites.grid import (
    Case,
    Goal,
    Grid,
    Ratios,
    Row,
    chosen,
    ratio,
    ratios,
    refuse_unknown,
    rotated,
    values,
    versus,
)
from recipes.suites.trainings import Training, named, quiet

LOWER_IS_BETTER = frozenset({"place", "search"})

OURS, ALONE, BASELINE, BY_SPEED = "sdpipe", "nosync", "all_reduce", "all_reduce/by_speed"
RECTANGLE_GOALS = {"1+4": 1.30, "5": 1.08, "2+4": 1.03}
BOUND_GOALS = {"1+4": 0.85}
NOSYNC_GOAL, SAME_GOAL, PLACE_GOAL, SEARCH_GOAL = 0.90, 0.98, 0.05, 1.0
ALL_REDUCE_FLEET, ALL_REDUCE_GOAL = "1+4", 1.25
SAME = "2x3"
SAME_CUTS = {"ragged": ((6, 7), (7, 6), (6, 7)), "rectangle": ((6, 7),) * 3}
"""Thirteen blocks, one of which takes no time: on whichever side of a cut it is, the work is the same."""
ONE = "1"
"""A device of speed 1 by itself: its mini-batches have the host's time in them, which no assumed speed has."""
PARTS = ("fleets", "all_reduce", "same")


def case(
    model: Training, known: Mapping[str, Any], fleet: str, mesh: str, what: str, condition: str, shape: Shape
) -> Case:
    """Return the case of a fleet, ``"ragged"`` or ``"rectangle"``, a method, a condition and pipelines."""
    method, _, data = what.partition("/")
    blocks, share = model.num_blocks or 1, 3 if fleet == ONE else 1  # one of three pipelines
    training = replace(
        model,
        method=named(known, "methods", method),
        condition=named(known, "heterogeneity", condition),
        num_pipelines=len(shape.cuts),
        batches=max(1, model.batches // share),
        validation_batches=max(1, model.validation_batches // share),
        data=data or ("sharded" if method == BASELINE else "auto"),
        pace=shape.factors,
        num_blocks=blocks + (fleet == SAME),
        free=blocks // 2 if fleet == SAME else None,  # one more, which takes no time
        **shape.options,
    )
    seconds = model.block_seconds * model.scale * blocks * model.num_micro_batches
    columns: Row = {"what": f"{mesh} {what}", "fleet": fleet, "heterogeneity": condition, "pipelines": str(shape)}
    columns |= {"left_out": shape.left_out, "predicted_per_s": shape.rate / seconds or None}
    return Case(columns, training)


def run(
    *,
    fleets: Mapping[str, Mapping[str, Any]],
    measured: Sequence[str],
    model: Mapping[str, Any],
    cut: float,
    kept: float,
    conditions: Sequence[str],
    only: Sequence[str],
    repeats: int,
    output: str | None,
    seed: int,
    **known: Mapping[str, Any],
) -> tuple[list[Row], Ratios]:
    """Run the parts that ``only`` names.

    Args:
        fleets: by name, as :func:`~recipes.suites.fleets.network` takes them.
        measured: names of fleets.
        model: fields of a :class:`~recipes.suites.trainings.Training` on one device of speed 1.
        cut: what a cut takes, where shapes are searched.
        kept: bytes in flight, likewise.
        conditions: names of ``heterogeneity``, besides unlike speeds.
        only: names of parts.
        repeats: with seeds that count up.
        output: finished rows are kept beside this file; None for nowhere.
        seed: of the first repeat.
        known: ``methods`` and ``heterogeneity``: specifications for Hydra, by name.

    Raises:
        ConfigurationError: a part, a fleet or a condition that there is not.
    """
    refuse_unknown("a part of suite=ragged", only, PARTS)
    refuse_unknown("among suite.heterogeneity", conditions, known["heterogeneity"])
    refuse_unknown("among suite.fleets", measured, fleets)
    quiet()
    grid, rows = Grid(output), list[Row]()
    alone = Training(method=named(known, "methods", ALONE), num_stages=1, num_pipelines=1, seed=seed, **model)
    assert alone.num_blocks is not None
    networks = {name: network(fleets[name], alone.num_blocks, alone.num_micro_batches, cut, kept) for name in measured}
    for part in [part for part in (ONE, *PARTS) if (part if part != ONE else "fleets") in only]:
        cases = list(plan(part, networks, alone, known, conditions))
        for repeat in range(repeats):
            numbered = [
                Case({**columns, "repeat": repeat}, replace(training, seed=seed + repeat))
                for columns, training in rotated(cases, repeat)
            ]
            rows += grid.run(numbered, epochs.measure, "epoch_s")
    found = ratios_of(rows)
    if "fleets" in only:
        for name, devices in networks.items():
            seconds = shapes(devices, alone.num_micro_batches, "groups")["ragged"].search_seconds
            found[f"search/{name}"] = ratio([seconds], SEARCH_GOAL, f"processor seconds of the search, {name}")
    return rows, found


def plan(
    part: str,
    networks: Mapping[str, Any],
    model: Training,
    known: Mapping[str, Any],
    conditions: Sequence[str],
) -> Iterator[Case]:
    """Yield the trainings of one part of the suite, of one repeat. Arguments are those of :func:`run`."""
    micro_batches = model.num_micro_batches
    if part == ONE:
        yield case(model, known, ONE, "rectangle", ALONE, "none", Shape(((model.num_blocks or 1,),), (1.0,), 1.0))
    elif part == "same":
        for mesh, cuts in SAME_CUTS.items():
            yield case(model, known, SAME, mesh, OURS, "none", Shape(cuts, (1.0,) * 6))
    elif part == "fleets":
        for name, devices in networks.items():
            found = shapes(devices, micro_batches, "groups")
            for condition in conditions:
                for method in (OURS, ALONE):
                    yield case(model, known, name, "ragged", method, condition, found["ragged"])
            yield case(model, known, name, "rectangle", OURS, "none", found["rectangle"])
    elif ALL_REDUCE_FLEET in networks:
        syncs: dict[str, Sync] = {BASELINE: "all_reduce", BY_SPEED: "groups"}
        for method, sync in syncs.items():  # by speed as if pipelines did not wait
            for mesh, shape in shapes(networks[ALL_REDUCE_FLEET], micro_batches, sync).items():
                yield case(model, known, ALL_REDUCE_FLEET, mesh, method, "none", shape)


def ratios_of(rows: Sequence[Row]) -> Ratios:
    """Return those that were measured."""
    found: Ratios = {}
    hosts = {row["repeat"]: row["batches_per_s"] / row["predicted_per_s"] for row in chosen(rows, fleet=ONE)}
    for fleet in values(rows, "fleet"):
        own = chosen(rows, fleet=fleet)
        ours, rectangular, alone = f"ragged {OURS}", f"rectangle {OURS}", f"ragged {ALONE}"
        against = [(f"rectangle/{fleet}", ours, rectangular, "none", RECTANGLE_GOALS.get(fleet))]
        if fleet == SAME:
            against = [(f"same/{fleet}", ours, rectangular, "none", SAME_GOAL)]
        against += [(f"nosync/{fleet}/{condition}", ours, alone, condition, NOSYNC_GOAL) for condition in ("none", "b")]
        for method, suffix in ((BASELINE, ""), (BY_SPEED, "/by_speed")):
            key = f"all_reduce/{fleet}{suffix}"
            against.append((key, f"ragged {method}", f"rectangle {method}", "none", ALL_REDUCE_GOAL))
        goals = {}
        for key, mine, other, condition, value in against:
            meaning = f"s per epoch, {fleet} emulated, {condition}: {{one}} over {{other}}"
            goals[key] = versus(meaning, "epoch_s", other, mine, value, heterogeneity=condition)
        if fleet != SAME:
            meaning = f"mini-batches/s of whole epochs, {fleet} emulated: {ours} over the sum of the devices' own"
            by_itself = {"what": ours, "heterogeneity": "none"}
            goals[f"bound/{fleet}"] = Goal(meaning, "batches_per_s", by_itself, "sum_of_rates", BOUND_GOALS.get(fleet))
        found |= ratios(own, goals)
        errors = [
            abs(hosts[row["repeat"]] * row["predicted_per_s"] / row["batches_per_s"] - 1)
            for row in chosen(own, what=alone, heterogeneity="none")
            if row["repeat"] in hosts
        ]
        if errors:
            meaning = (
                f"how far mini-batches/s are predicted from those of {alone}, {fleet} emulated, by one device's own"
            )
            found[f"place/{fleet}"] = ratio(errors, PLACE_GOAL, meaning)
    return found
