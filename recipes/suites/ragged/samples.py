"""This part counts samples to a target, with real compute: of pipelines of unlike depths, batches dealt by speed, and
of as many equal ones on equal devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from recipes.suites.cases import Named, RealCase, named
from recipes.suites.convergence.suite import learned, train
from recipes.suites.journal import Journal
from recipes.suites.ratios import Ratios, Row, quotients, ratio, rotated

GOAL = 1.05
FIELDS = ("iterations", "num_micro_batches", "variance_correction")
"""Those of an experiment that a case takes."""


def measure(
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
    """Return rows of all trainings, and samples to the target of ``ragged`` over those of ``rectangle``.

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
                rows.append(_row(case, mesh, repeat, experiment, points, journal))
    return rows, ratios(rows)


def _row(case: RealCase, mesh: str, repeat: int, experiment: Mapping[str, Any], points: int, journal: Journal) -> Row:
    print(f"{case.workload.name} {mesh} {case.shape}, repeat {repeat}", end=": ", flush=True)
    learn = partial(train, case, experiment["metric"], experiment["snapshot_every"], points)
    row = learned(case, experiment, {"points": points}, journal, learn)
    return {"what": f"{mesh} sdpipe", "repeat": repeat, "emulated": False, **row}


def ratios(rows: Sequence[Row]) -> Ratios:
    """Compare the seeds in which the rectangle reaches the target; what does not reach it needs infinitely many."""
    found: Ratios = {}
    for workload in dict.fromkeys(row["workload"] for row in rows):
        own = [row for row in rows if row["workload"] == workload]
        values = quotients(own, "samples_to_target", ("ragged sdpipe",), ("rectangle sdpipe",), names=("what",))
        if values:
            meaning = (
                f"samples to {own[0]['target']}, {workload}, real compute: unlike depths over as many equal pipelines"
            )
            found[f"samples/{workload}"] = ratio(values, GOAL, meaning)
    return found
