"""The pipeline runtime against bare torch, against its own flush, against one process, and against Lightning's DDP; and
what set-up takes."""

from __future__ import annotations

from functools import partial

from recipes.suites.pipeline import bare_torch, bubble, group_mean, memory, rehearsal, step_cost
from recipes.suites.ratios import run_parts

LOWER_IS_BETTER = frozenset({"exchange", "memory", "rehearsal", "step_cost"})
run = partial(
    run_parts,
    "pipeline",
    {
        "bare_torch": bare_torch.measure,
        "pipedream": bubble.measure,
        "memory": memory.measure,
        "rehearsal": rehearsal.measure,
        "group_mean": group_mean.measure,
        "step_cost": step_cost.measure,
    },
)
