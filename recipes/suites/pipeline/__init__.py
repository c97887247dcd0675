"""The pipeline runtime against bare torch, its own flush, one process, and Lightning's DDP; and the cost of set-up."""

from __future__ import annotations

from functools import partial

from recipes.suites.exchange.averages import measure_group_mean
from recipes.suites.grid import Parts, run_parts
from recipes.suites.pipeline import bare_torch, bubble, lock_step, memory, rehearsal, step_cost

LOWER_IS_BETTER = frozenset({"exchange", "memory", "rehearsal", "step_cost"})
PARTS: Parts = {
    "bare_torch": bare_torch.measure,
    "pipedream": bubble.measure,
    "memory": memory.measure,
    "rehearsal": rehearsal.measure,
    "group_mean": measure_group_mean,
    "step_cost": step_cost.measure,
    "lock_step": lock_step.measure,
}
run = partial(run_parts, "pipeline", PARTS)
