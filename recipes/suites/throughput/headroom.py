"""Possible gain, by formula: which delays and which schedule give the paper's headline figures.

With one draw per iteration, probability p, a delay of r mini-batches and M × N workers that flush, an iteration of
all-reduce takes 1 + r(1 − (1 − p)^(MN)) mini-batches, and one of a pipeline that waits for no other takes
1 + r(1 − (1 − p)^M). Two draws, one before each pass, count twice. Without a flush the stages of a pipeline are M
mini-batches apart, so their delays overlap; a stage that never waits loses its own delays only, 1 + rp. The bubble of a
flush, (m + M − 1)/m, comes on top. SDPipe runs without a flush in the paper, and its baselines with one (§5.1).
"""

from __future__ import annotations

from collections.abc import Sequence

from recipes.suites.ratios import Row

DRAWS = {"iteration": 1, "pass": 2}


def slowdown(workers: int, ratio: float, draws: str, probability: float = 0.1) -> float:
    """Return the slowdown of a mini-batch that waits for ``workers`` workers.

    Args:
        workers: how many take part.
        ratio: length of a delay over that of a mini-batch.
        draws: ``"iteration"`` or ``"pass"``.
        probability: of a delay at each draw.
    """
    return float(1.0 + DRAWS[draws] * ratio * (1.0 - (1.0 - probability) ** workers))


def table(shapes: Sequence[tuple[int, int]], delay_ratios: Sequence[float], num_micro_batches: int) -> list[Row]:
    """Slowdowns against no delays, and the largest possible speed-ups over an all-reduce with a flush."""
    rows = []
    for stages, pipelines in shapes:
        bubble = (num_micro_batches + stages - 1) / num_micro_batches
        for draws in DRAWS:
            for ratio in delay_ratios:
                everybody = slowdown(stages * pipelines, ratio, draws)
                one_pipeline = slowdown(stages, ratio, draws)
                one_stage = slowdown(1, ratio * bubble, draws)  # its mini-batches are shorter by the bubble
                rows.append(
                    {
                        "what": "by formula",
                        "shape": f"{stages}x{pipelines}",
                        "draws_per": draws,
                        "delay_over_compute": float(ratio),
                        "all_reduce_slowdown": everybody,
                        "pipeline_slowdown": one_pipeline,
                        "stage_slowdown": one_stage,
                        "speedup_flush": everybody / one_pipeline,
                        "speedup_no_flush": everybody * bubble / one_stage,
                    }
                )
    return rows
