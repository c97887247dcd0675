"""Real trainings with one slow worker, or none: which is named by its 128th update, and what it is said to cost."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.seeing.detectors import compute_straggler
from lightning_sdpipe.seeing.finding import costs
from lightning_sdpipe.seeing.recording import Recording, of_log
from lightning_sdpipe.topology.mesh import Mesh
from recipes.suites.calibration import calibrated_scale
from recipes.suites.cases import EmulatedCase, Named
from recipes.suites.emulated import EmulatedChain, passes
from recipes.suites.journal import Journal
from recipes.suites.ratios import Ratios, Row, ratio
from recipes.suites.trainings import fit, quiet, random_features, strategy

WITHIN = 128
"""Updates of the slow worker in which it must be named."""
GOALS = {"static1.5": 0.95, "static1.2": 0.8}
SKIPPED = 8
"""Updates that costs leave out: the first ones are longer."""


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
    """One training for each condition, shape, method and run.

    Args:
        methods: specifications for Hydra, by name.
        factors: how many times as slow one worker is, a condition each: 1.5 is ``static1.5``, and 1 ``none``.
        shapes: M and N.
        seconds: that a worker computes in an update, emulated, in as many micro-batches as there are stages.
        iterations: of each pipeline.
        scale: of ``seconds``; None to measure it for each shape.
        runs: with seeds that count up.
        seed: of the first; it draws the slow worker.
    """
    quiet()
    rows: list[Row] = []
    for shape in shapes:
        case = _case(shape, methods, seconds, iterations, scale or 1.0, seed)
        if scale is None:
            none = _static([1.0] * (shape[0] * shape[1])).specification
            assert none is not None
            case = replace(case, scale=calibrated_scale(case, methods["all_reduce"], none, Journal(None, {})))
        for run in range(runs):
            for factor in factors:
                condition = "none" if factor == 1 else f"static{factor:g}"
                for method, specification in methods.items():
                    of_run = replace(case, method=Named(method, specification), seed=seed + run)
                    rows.append(_train(of_run, condition, factor, run))
    return rows, ratios(rows)


def _case(
    shape: Sequence[int], methods: Mapping[str, Any], seconds: float, iterations: int, scale: float, seed: int
) -> EmulatedCase:
    stages, pipelines = shape
    name = next(iter(methods))
    return EmulatedCase(
        panel="named",
        method=Named(name, methods[name]),
        condition=_static([1.0] * (stages * pipelines)),
        num_stages=stages,
        num_pipelines=pipelines,
        schedule="1f1b",
        num_micro_batches=stages,
        iterations=iterations,
        warm_up=0,
        scale=scale,
        seed=seed,
        micro_batch_seconds=seconds / stages,
        num_parameters=1024,
    )


def _static(factors: Sequence[float]) -> Named:
    return Named("static", {"_target_": "lightning_sdpipe.heterogeneity.Static", "factors": list(factors)})


def _train(case: EmulatedCase, condition: str, factor: float, run: int) -> Row:
    workers = case.num_stages * case.num_pipelines
    mesh = Mesh.build(workers, case.num_stages)
    slow = random.Random(f"{case.seed}/{case.shape}/{condition}").randrange(workers)
    factors = [factor if rank == slow else 1.0 for rank in range(workers)]
    worker = Worker(*mesh.locate(slow))
    seconds = case.micro_batch_seconds * case.scale
    torch.manual_seed(case.seed)
    module = EmulatedChain(case.num_stages, *passes(seconds))
    loader = random_features(case.iterations * case.num_pipelines, case.num_micro_batches)
    with tempfile.TemporaryDirectory() as directory:
        trains = strategy(replace(case, condition=_static(factors)), Path(directory))
        fit(module, [loader], trains, workers, limit_train_batches=case.iterations)
        seen = together(of_log(Path(directory, "scheduler.jsonl")))
    row = {"what": case.method.name, "shape": case.shape, "condition": condition, "run": run, "scale": case.scale}
    return row | judged(seen, worker, factor)


def together(recording: Recording) -> Recording:
    """Up to the moment at which the first worker had finished: one that trains on alone is not slowed by others."""
    until = min(series.ends[-1] for series in recording.series.values())
    cut = {}
    for worker, series in recording.series.items():
        late = sum(end > until for end in series.ends)
        cut[worker] = series.oldest(len(series) - late)
    return replace(recording, series=cut)


def judged(seen: Recording, slow: Worker, factor: float) -> Row:
    """Return what is named after :data:`WITHIN` updates of the slow worker, and what the run says that it cost."""
    until = seen.series[slow].ends[:WITHIN][-1]
    early = {w: series.oldest(sum(end <= until for end in series.ends)) for w, series in seen.series.items()}
    named = {worker for finding in compute_straggler(replace(seen, series=early)) for worker in finding.workers}
    last = seen.num_stages - 1
    begun = max(series.ends[SKIPPED] for series in seen.series.values())
    cost = costs(seen, begun)[slow.pipeline]
    rates = [
        sum(end > begun for end in series.ends) / (series.ends[-1] - begun)
        for worker, series in seen.series.items()
        if worker.stage == last
    ]
    return {
        "updates": len(early[slow]),
        "right": named == ({slow} if factor > 1 else set()),
        "accused": bool(named - ({slow} if factor > 1 else set())),
        "stood": cost.stood,
        "lacks": cost.lacks,
        "said_gain": cost.gain,
        "mini_batches_per_s": sum(rates),
    }


def ratios(rows: Sequence[Row]) -> Ratios:
    """Return the ratios of all shapes and methods together: each run of a condition beside that without a slow one."""
    found: Ratios = {}
    for condition in dict.fromkeys(row["condition"] for row in rows):
        own = [row for row in rows if row["condition"] == condition]
        share = sum(row["right"] for row in own) / len(own)
        if condition in GOALS:
            meaning = f"runs in which the slow worker alone was named by its update {WITHIN}"
            found[f"named/{condition}"] = ratio([share], GOALS[condition], meaning)
    none = {(row["shape"], row["what"], row["run"]): row for row in rows if row["condition"] == "none"}
    if none:
        share = sum(row["accused"] for row in none.values()) / len(none)
        found["accused/none"] = ratio([share], 0.05, "runs of equal workers in which one was named")
    gains = [
        (row["said_gain"], none[key]["mini_batches_per_s"] / row["mini_batches_per_s"])
        for row in rows
        if row["condition"] == "static2" and (key := (row["shape"], row["what"], row["run"])) in none
    ]
    if gains:
        values = [min(said / gain, gain / said) for said, gain in gains]
        meaning = "1/(1 − stood − lacks) and the gain of a run without the slow worker: the smaller over the larger"
        found["cost/static2"] = ratio(values, 0.9, meaning)
    return found
