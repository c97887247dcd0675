"""Cost of a step besides its compute: processor time of whole steps under a Trainer, beside Lightning's own DDP.

The model is tiny and its compute *emulated*, so the processor is used only by Lightning, the strategy, and messages.
Pipelines have one stage, and gradients are averaged, as in DDP. The parameters and the batches are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_sdpipe.errors import ConfigurationError
from recipes.baselines.references import lightning_ddp
from recipes.suites.grid import Case, Grid, Ratios, Row, in_turn, ratios, versus
from recipes.suites.trainings import ALL_REDUCE, Named, Training, pace, quiet

GOALS = {1: 1.05, 4: 1.10}
"""Goals by the number of pipelines; the last one holds for other numbers."""
BASELINE = Named("lightning_ddp", {})
COMPARED = (BASELINE, ALL_REDUCE, Named("sdpipe", {"_target_": "lightning_sdpipe.SemiDecentralized"}))


def measure(
    *, pipelines: Sequence[int], compute_seconds: float, steps: int, warm_up: int, repeats: int, seed: int
) -> tuple[list[Row], Ratios]:
    """Return milliseconds of a step, and the ratio of the workers' processor times.

    Args:
        pipelines: numbers of pipelines of one stage.
        compute_seconds: emulated seconds of a mini-batch, forward and backward.
        steps: number of steps that count in one training.
        warm_up: number of steps before them, at least 1.
        repeats: trainings of each strategy.
        seed: seed of the batches.

    Raises:
        ConfigurationError: ``steps`` or ``warm_up`` is below 1.
    """
    if min(steps, warm_up) < 1:
        raise ConfigurationError(f"suite.step_cost has {steps=} and {warm_up=}; both must be at least 1.")
    quiet()
    cases, goals = [], {}
    for count in pipelines:
        for repeat, method in in_turn(COMPARED, repeats):
            training = Training(
                method=method,
                num_stages=1,
                num_pipelines=count,
                batches=(warm_up + steps) * count,
                warm_up=warm_up,
                block_seconds=compute_seconds,
                seed=seed + repeat,
            )
            columns = {"what": method.name, "emulated": True, "shape": training.shape, "repeat": repeat}
            cases.append(Case(columns, training))
        meaning = f"processor time of a step of {count} workers, emulated compute: all_reduce over Lightning's DDP"
        of = "processor_ms_per_step", ALL_REDUCE.name, BASELINE.name, GOALS.get(count, max(GOALS.values()))
        goals[f"step_cost/1x{count}"] = versus(meaning, *of, shape=f"1x{count}")
    rows = Grid().run(cases, _train, "processor_ms_per_step")
    return rows, ratios(rows, goals)


def _train(case: Training) -> Row:
    found = pace(case, lightning_ddp() if case.method is BASELINE else None)
    return {"ms_per_step": 1e3 * found["seconds"], "processor_ms_per_step": 1e3 * found["processor_s"]}
