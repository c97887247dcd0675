"""Cost of a bound on staleness for the methods that average in groups of pipelines, and how well it is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_sdpipe.heterogeneity import Trace, condition
from lightning_sdpipe.policies import Reason
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.simulate import Slowness, Work, jittered, simulate
from recipes.suites.ratios import Row

SECONDS = 0.1
"""Of a mini-batch without delays, for which the paper's conditions are meant."""

METHODS: dict[str, Callable[[int | None, int], PolicyConfig]] = {
    "sdpipe": lambda bound, seed: SemiDecentralized(staleness=bound),
    "adpsgd": lambda bound, seed: ADPSGD(staleness=bound, seed=seed),
}
CONDITIONS: dict[str, Callable[[int], Slowness]] = {
    "b": lambda seed: condition("B", "resnet", seed=seed),
    "trace": lambda seed: Trace(seed=seed),
}


def measure(stages: Sequence[int], pipelines: int, iterations: int, bounds: Sequence[int], seed: int) -> list[Row]:
    """One row for each method, number of stages, condition and bound, over the same without a bound.

    Args:
        stages: numbers of stages.
        pipelines: N.
        iterations: of each pipeline.
        bounds: values of ``staleness``.
        seed: of the delays and the draws.
    """
    rows: list[Row] = []
    for num_stages in stages:
        for name, slowness in CONDITIONS.items():
            for method, config in METHODS.items():
                free: float | None = None
                for bound in (None, *bounds):
                    work = Work(
                        num_stages,
                        pipelines,
                        iterations,
                        jittered(SECONDS * num_stages / (2 * num_stages - 1), 0.05, seed),
                        heterogeneity=slowness(seed),
                    )
                    run = simulate(config(bound, seed), work)
                    free = free or run.throughput
                    exceeded = run.reasons[Reason.STALENESS_EXCEEDED]
                    rows.append(
                        {
                            "what": f"{method}, bounded" if bound else method,
                            "shape": f"{num_stages}x{pipelines}",
                            "heterogeneity": name,
                            "staleness": bound,
                            "steps_per_s": run.throughput,
                            "over_unbounded": run.throughput / free,
                            "lag": max(lag for stage in range(num_stages) for _, lag in run.lags(stage)),
                            "exceeded": exceeded / len(run.groups),
                        }
                    )
    return rows
