"""PHD-PSGD's evaluation in virtual time: groups of unlike speed, with and without the bound on staleness.

The policies are the real ones, and so is the training: models of a small network follow every decision. Workers and
links are simulated, so that nothing here depends on the machine; transfers take no time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from lightning_sdpipe.heterogeneity import Trace, condition
from lightning_sdpipe.policies import Progress
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.policies.phd_psgd import PHDPSGD
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.simulate import Run, Slowness, Work, jittered, simulate
from recipes.suites.figures import require_matplotlib
from recipes.suites.phd import figures
from recipes.suites.phd.training import Task, accuracy_at, reached, train
from recipes.suites.ratios import Ratios, Row, ratio

LOWER_IS_BETTER = frozenset({"phd_samples", "lag"})

GOALS: dict[str, tuple[str, str, float]] = {
    "phd/all_reduce": ("phd", "all_reduce", 1.15),
    "phd_every4/all_reduce": ("phd_every4", "all_reduce", 1.25),
    "phd_async/nosync": ("phd_async", "nosync", 0.95),
    "sdpipe/phd": ("sdpipe", "phd", 0.0),  # measured, without a goal
}
"""By the key of the ratio: whose throughput is divided by whose, and what should come out at least."""

TRAINED = ("all_reduce", "phd", "phd_unbounded", "sdpipe")

CONDITIONS: dict[str, Callable[[int], Slowness]] = {
    "b": lambda seed: condition("B", "resnet", seed=seed),
    "trace": lambda seed: Trace(seed=seed),
}
SECONDS = 0.1
"""Of a mini-batch without delays, for which the paper's conditions are meant."""


def run(
    *,
    times: Sequence[float],
    group_sizes: Sequence[int],
    iterations: int,
    jitter: float,
    staleness: int,
    megabytes: float,
    training: Mapping[str, Any],
    bounds: Mapping[str, Any],
    repeats: int,
    output: str | None,
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Simulate every method on groups of each size, and train with some.

    Args:
        times: seconds of a mini-batch on the devices of each group.
        group_sizes: devices of a group, one shape after another.
        iterations: of each pipeline; what is shown ends when the first has finished.
        jitter: share by which times vary.
        staleness: s of the bounded methods.
        megabytes: of the model, for the bytes that meetings move.
        training: the fields of :class:`~recipes.suites.phd.training.Task`.
        bounds: arguments of :func:`costs_of_bounds`.
        repeats: seeds.
        output: figures are drawn beside this file; None for none.
        seed: of the first repeat; the following ones count up from it.
    """
    if output is not None:
        require_matplotlib()
    task = Task(**training)
    rows: list[Row] = []
    for size in group_sizes:
        for repeat in range(repeats):
            rows += _measured(times, size, iterations, jitter, staleness, megabytes, task, seed + repeat)
    pairs = [_pair(times, partner, iterations, jitter, staleness, seed) for partner in range(1, len(times))]
    if output is not None:
        figures.draw([row for row in rows if row["group_size"] == group_sizes[-1]], pairs, task, Path(output))
    return [*rows, *pairs, *costs_of_bounds(**bounds, seed=seed)], ratios(rows, staleness)


def methods(times: Sequence[float], size: int, staleness: int, seed: int) -> dict[str, PolicyConfig]:
    """The compared ones; each group has ``size`` pipelines of its time."""
    profile = tuple(seconds for seconds in times for _ in range(size))
    ours = partial(PHDPSGD, group_size=size, times=profile, seed=seed)
    return {
        "all_reduce": AllReduceModels(),
        "nosync": NoSync(),
        "phd": ours(staleness=staleness),
        "phd_unbounded": ours(staleness=None),
        "phd_every4": ours(staleness=staleness, every=4),
        "phd_async": ours(staleness=staleness, asynchronous=True),
        "phd_gamma4": ours(staleness=staleness, gamma=4.0),
        "phd_gamma4_unbounded": ours(staleness=None, gamma=4.0),
        "sdpipe": SemiDecentralized(),
    }


def ratios(rows: Sequence[Row], staleness: int) -> Ratios:
    """Return the ratios that have goals, for each shape."""
    found: Ratios = {}
    for shape in dict.fromkeys(row["shape"] for row in rows):
        by_method = {
            method: [row for row in rows if row["shape"] == shape and row["what"] == method]
            for method in dict.fromkeys(row["what"] for row in rows)
        }
        for key, (ours, theirs, goal) in GOALS.items():
            quotients = [
                a["steps_per_s"] / b["steps_per_s"] for a, b in zip(by_method[ours], by_method[theirs], strict=True)
            ]
            found[f"{key}/{shape}"] = ratio(quotients, goal, f"simulated throughput, {ours} over {theirs}")
        lags = [row["lag"] / staleness for row in by_method["phd"]]
        found[f"lag/{shape}"] = ratio(lags, 1.0, f"largest n - V at staleness={staleness}, over that")
        base = by_method["all_reduce"]
        reaching = [(a, b) for a, b in zip(by_method["phd"], base, strict=True) if b["samples"]]
        samples = [(a["samples"] or math.inf) / b["samples"] for a, b in reaching]  # never is infinitely late
        if samples:
            found[f"phd_samples/{shape}"] = ratio(samples, 1.10, "samples to the target, phd over all-reduce")
        if len(base) > 1:
            spread = statistics.stdev(row["final"] for row in base)
            mean = statistics.mean(row["final"] for row in base)
            better = [(row["final"] - mean) / max(spread, 1e-9) for row in by_method["phd"]]
            meaning = "accuracy after as many samples, phd less all-reduce, in standard deviations of all-reduce"
            found[f"phd_final/{shape}"] = ratio([statistics.mean(better)], -1.0, meaning)
    return found


def steps_until(run: Run, end: float) -> int:
    """Mini-batches of all pipelines by then."""
    last = run.work.num_stages - 1
    return sum(isinstance(e, Progress) and e.worker.stage == last and at <= end for at, e, _ in run.entries)


def _work(times: Sequence[float], size: int, iterations: int, jitter: float, seed: int) -> Work:
    vary = jittered(1.0, jitter, seed)

    def seconds(worker: Worker, iteration: int) -> float:
        return times[worker.pipeline // size] * vary(worker, iteration)

    return Work(1, len(times) * size, iterations, seconds, num_micro_batches=1, announce="late")


def _measured(
    times: Sequence[float],
    size: int,
    iterations: int,
    jitter: float,
    staleness: int,
    megabytes: float,
    task: Task,
    seed: int,
) -> list[Row]:
    rows: list[Row] = []
    for name, config in methods(times, size, staleness, seed).items():
        run = simulate(config, _work(times, size, iterations, jitter, seed))
        end = min(run.finished.values())
        steps = steps_until(run, end)
        lags = [(at, lag) for at, lag in run.lags() if at <= end]
        row: Row = {
            "what": name,
            "shape": f"{len(times)}x{size}",
            "group_size": size,
            "seed": seed,
            "steps_per_s": steps / end,
            "waiting": run.waiting_share,
            "lag": max(lag for _, lag in lags),
            "rho": run.rho(),
            "final": None,
            "samples": None,
            "seconds": None,
            "mb_per_step": _megabytes(run, name, size, megabytes),
            "lags": lags,
            "curve": [],
        }
        if name in TRAINED:
            curve = train(run, task, seed)
            found = reached(curve, task.target)
            row |= {"curve": curve, "seconds": found and found[0], "samples": found and found[1]}
        rows.append(row)
        print(f"{row['shape']} {name}, seed {seed}: {row['steps_per_s']:.2f} steps/s, lag {row['lag']}", flush=True)
    trained = [row for row in rows if row["curve"]]
    fewest = min(row["curve"][-1][1] for row in trained)
    for row in trained:
        row["final"] = accuracy_at(row["curve"], fewest)
    return rows


def _megabytes(run: Run, name: str, size: int, megabytes: float) -> float | None:
    """Return what a host sends and receives over the slow links per step of its group: by formula, for the meetings
    that were counted."""
    hosts = run.work.num_pipelines // size
    if name == "all_reduce":  # around a ring (paper §5.4), one of whose hosts' workers has its neighbour elsewhere
        return 4 * megabytes / run.work.num_pipelines * (run.work.num_pipelines - 1)
    if not name.startswith("phd"):
        return None
    meetings = [len({worker.pipeline // size for worker in group.members}) for _, group in run.groups]
    sent = 2 * size * sum(groups - 1 for groups in meetings)  # models, by all members of a meeting
    return 2 * megabytes * sent / (hosts * run.work.iterations)


def _pair(times: Sequence[float], partner: int, iterations: int, jitter: float, staleness: int, seed: int) -> Row:
    """The first group and one other, by themselves."""
    own = (times[0], times[partner])
    work = _work(own, 1, iterations, jitter, seed)
    rates = []
    for asynchronous in (False, True):
        run = simulate(PHDPSGD(staleness=staleness, times=own, asynchronous=asynchronous), work)
        end = min(run.finished.values())
        rates.append(steps_until(run, end) / end)
    return {
        "what": f"{times[0]:g} s with {times[partner]:g} s",
        "phd_steps_per_s": rates[0],
        "phd_async_steps_per_s": rates[1],
        "possible": math.fsum(1 / seconds for seconds in own),
    }


def costs_of_bounds(
    stages: Sequence[int], pipelines: int, iterations: int, bounds: Sequence[int], seed: int
) -> list[Row]:
    """Measure what a bound on staleness costs PHD-PSGD, one pipeline in each group: one row for each number of stages,
    condition and bound, over the same without a bound.

    Args:
        stages: numbers of stages.
        pipelines: N.
        iterations: of each pipeline.
        bounds: values of ``staleness``.
        seed: of the delays and the draws.
    """
    rows: list[Row] = []
    for num_stages, (name, slowness) in product(stages, CONDITIONS.items()):
        seconds = jittered(SECONDS * num_stages / (2 * num_stages - 1), 0.05, seed)
        work = Work(num_stages, pipelines, iterations, seconds, heterogeneity=slowness(seed))
        free: float | None = None
        for bound in (None, *bounds):
            run = simulate(PHDPSGD(group_size=1, staleness=bound, seed=seed), work)
            free = free or run.throughput
            rows.append(
                {
                    "what": "phd, bounded" if bound else "phd, unbounded",
                    "shape": f"{num_stages}x{pipelines}",
                    "heterogeneity": name,
                    "staleness": bound,
                    "steps_per_s": run.throughput,
                    "over_unbounded": run.throughput / free,
                    "lag": max(lag for stage in range(num_stages) for _, lag in run.lags(stage)),
                }
            )
    return rows
