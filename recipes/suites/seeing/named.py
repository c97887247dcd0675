"""Real trainings with one slow worker, or none: which worker is named by its 128th update, and its reported cost."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.seeing.detectors import compute_straggler
from lightning_sdpipe.seeing.finding import costs
from lightning_sdpipe.seeing.recording import Recording, of_log
from lightning_sdpipe.topology.mesh import Mesh
from recipes.suites.grid import Case, Grid, Ratios, Row, chosen, ratio, values
from recipes.suites.trainings import Named, Training, calibrated_scale, named, quiet, strategy_of, train

WITHIN = 128
"""Number of the slow worker's updates within which it must be named."""
GOALS = {"static1.5": 0.95, "static1.2": 0.8}
SKIPPED = 8
"""Number of first updates that costs leave out, since they are longer."""


@dataclass(frozen=True)
class OneSlow:
    """A training in which the worker ``rank`` is slow by ``factor``; 1 for not."""

    training: Training
    rank: int
    factor: float


def measure(
    *,
    methods: Mapping[str, Any],
    factors: Sequence[float],
    shapes: Sequence[Sequence[int]],
    seconds: float,
    iterations: int,
    scale: float | None,
    runs: int,
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Measure one training for each condition, shape, method and run.

    Args:
        methods: specifications for Hydra, by name.
        factors: ratios of the slow worker's time to the others', a condition each: 1.5 is ``static1.5``, 1 is ``none``.
        shapes: pairs of M and N.
        seconds: emulated seconds of a worker's computation in an update, in as many micro-batches as there are stages.
        iterations: iterations of each pipeline.
        scale: factor of ``seconds``; None to measure it for each shape.
        runs: number of runs, whose seeds count up.
        seed: seed of the first run, which draws the slow worker.
    """
    quiet()
    grid, rows = Grid(), list[Row]()
    for stages, pipelines in shapes:
        case = Training(
            method=named({"methods": methods}, "methods", next(iter(methods))),
            num_stages=stages,
            num_pipelines=pipelines,
            num_micro_batches=stages,
            batches=iterations * pipelines,
            block_seconds=seconds / stages,
            scale=scale or 1.0,
            seed=seed,
        )
        case = replace(case, scale=calibrated_scale(case, grid)) if scale is None else case
        cases = []
        for run in range(runs):
            for factor in factors:
                condition = "none" if factor == 1 else f"static{factor:g}"
                slow = random.Random(f"{seed + run}/{case.shape}/{condition}").randrange(case.workers)
                speeds = [factor if rank == slow else 1.0 for rank in range(case.workers)]
                static = {"_target_": "lightning_sdpipe.heterogeneity.Static", "factors": speeds}
                for name, method in methods.items():
                    training = replace(
                        case, method=Named(name, method), condition=Named(condition, static), seed=seed + run
                    )
                    columns = {"what": name, "shape": case.shape, "condition": condition, "run": run}
                    cases.append(Case({**columns, "scale": case.scale}, OneSlow(training, slow, factor)))
        rows += grid.run(cases, _train, "mini_batches_per_s")
    return rows, ratios(rows)


def _train(asked: OneSlow) -> Row:
    case = asked.training
    assert isinstance(case.num_stages, int)
    worker = Worker(*Mesh.build(case.workers, case.num_stages).locate(asked.rank))
    with tempfile.TemporaryDirectory() as directory:
        train(case, strategy=strategy_of(case, log_dir=Path(directory)))
        seen = together(of_log(Path(directory, "scheduler.jsonl")))
    return judged(seen, worker, asked.factor)


def together(recording: Recording) -> Recording:
    """Return the recording up to the time when the first worker finished, since workers that train on alone are not
    slowed by others."""
    return _until(recording, min(series.ends[-1] for series in recording.series.values()))


def _until(recording: Recording, until: float) -> Recording:
    series = {w: s.oldest(sum(end <= until for end in s.ends)) for w, s in recording.series.items()}
    return replace(recording, series=series)


def judged(seen: Recording, slow: Worker, factor: float) -> Row:
    """Return which worker is named after :data:`WITHIN` updates of the slow worker, and its cost over the run."""
    early = _until(seen, seen.series[slow].ends[:WITHIN][-1])
    accused = {worker for finding in compute_straggler(early) for worker in finding.workers}
    right = {slow} if factor > 1 else set()
    begun = max(series.ends[SKIPPED] for series in seen.series.values())
    cost = costs(seen, begun)[slow.pipeline]
    ends = [series.ends for worker, series in seen.series.items() if worker.stage == seen.num_stages - 1]
    return {
        "updates": len(early.series[slow]),
        "right": accused == right,
        "accused": bool(accused - right),
        "stood": cost.stood,
        "lacks": cost.lacks,
        "said_gain": cost.gain,
        "mini_batches_per_s": sum(sum(end > begun for end in own) / (own[-1] - begun) for own in ends),
    }


def ratios(rows: Sequence[Row]) -> Ratios:
    """Return the ratios for all shapes and methods together, comparing each run with one without a slow worker."""
    found: Ratios = {}
    for condition in [condition for condition in values(rows, "condition") if condition in GOALS]:
        own = chosen(rows, condition=condition)
        meaning = f"runs in which the slow worker alone was named by its update {WITHIN}"
        found[f"named/{condition}"] = ratio([sum(row["right"] for row in own) / len(own)], GOALS[condition], meaning)
    none = {(row["shape"], row["what"], row["run"]): row for row in chosen(rows, condition="none")}
    if none:
        share = sum(row["accused"] for row in none.values()) / len(none)
        found["accused/none"] = ratio([share], 0.05, "runs of equal workers in which one was named")
    gains = [
        (row["said_gain"], none[key]["mini_batches_per_s"] / row["mini_batches_per_s"])
        for row in chosen(rows, condition="static2")
        if (key := (row["shape"], row["what"], row["run"])) in none
    ]
    if gains:
        same = [min(said / gain, gain / said) for said, gain in gains]
        meaning = "1/(1 − stood − lacks) and the gain of a run without the slow worker: the smaller over the larger"
        found["cost/static2"] = ratio(same, 0.9, meaning)
    return found
