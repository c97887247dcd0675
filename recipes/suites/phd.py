"""PHD-PSGD's evaluation in virtual time: groups of different speeds, with and without the bound on staleness.

The policies are real, and so is the training: models of a small network follow every decision. Workers and links are
simulated, so nothing here depends on the machine; transfers take no time.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lightning_sdpipe.policies import Progress
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.policies.phd_psgd import PHDPSGD
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.simulate import Work, jittered, simulate
from recipes.suites.grid import Ratios, Row, chosen, ratio, ratios, values, versus
from recipes.suites.virtual import Network, Point, by_time

LOWER_IS_BETTER = frozenset({"phd_samples", "lag"})

GOALS: dict[str, tuple[str, str, str, float | None, str]] = {
    "phd/all_reduce": ("steps_per_s", "phd", "all_reduce", 1.15, "simulated throughput, phd over all_reduce"),
    "phd_every4/all_reduce": ("steps_per_s", "phd_every4", "all_reduce", 1.25, "the same, meeting every 4 steps"),
    "phd_async/nosync": ("steps_per_s", "phd_async", "nosync", 0.95, "simulated throughput, phd_async over nosync"),
    "sdpipe/phd": ("steps_per_s", "sdpipe", "phd", None, "simulated throughput, sdpipe over phd"),
    "phd_samples": ("samples", "phd", "all_reduce", 1.10, "samples to the target, phd over all-reduce"),
}
"""By the ratio's key: the column, the numerator's and the denominator's method, the goal, and the meaning."""
TRAINED = ("all_reduce", "phd", "phd_unbounded", "sdpipe")


def run(
    *,
    times: Sequence[float],
    group_sizes: Sequence[int],
    iterations: int,
    jitter: float,
    staleness: int,
    training: Mapping[str, Any],
    repeats: int,
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Simulate every method on groups of each size, and train with some.

    Args:
        times: seconds of a mini-batch on the devices of each group.
        group_sizes: numbers of devices in a group, one for each shape.
        iterations: iterations of each pipeline; results end when the first pipeline has finished.
        jitter: share by which times vary.
        staleness: s of the bounded methods.
        training: fields of :class:`~recipes.suites.virtual.Network`, the ``target`` accuracy, and the number of
            ``points`` of a learning curve.
        repeats: number of seeds.
        seed: seed of the first repeat; later ones count up from it.
    """
    rows: list[Row] = []
    for size in group_sizes:
        for repeat in range(repeats):
            work = partial(_work, times, size, iterations, jitter, seed + repeat)
            policies = methods(times, size, staleness, seed + repeat)
            rows += _measured(policies, work(), size, training, seed + repeat)
    return rows, ratios_of(rows, staleness)


def methods(times: Sequence[float], size: int, staleness: int, seed: int) -> dict[str, PolicyConfig]:
    """Return the methods that are compared, for groups of ``size`` pipelines with these times."""
    profile = tuple(seconds for seconds in times for _ in range(size))
    ours = partial(PHDPSGD, group_size=size, times=profile, seed=seed)
    return {
        "all_reduce": AllReduceModels(),
        "nosync": NoSync(),
        "phd": ours(staleness=staleness),
        "phd_unbounded": ours(staleness=None),
        "phd_every4": ours(staleness=staleness, every=4),
        "phd_async": ours(staleness=staleness, asynchronous=True),
        "sdpipe": SemiDecentralized(),
    }


def ratios_of(rows: Sequence[Row], staleness: int) -> Ratios:
    """Return the ratios that have goals, for each shape."""
    found: Ratios = {}
    for shape in values(rows, "shape"):
        own = chosen(rows, shape=shape)
        goals = {
            f"{key}/{shape}": versus(meaning, column, ours, theirs, value)
            for key, (column, ours, theirs, value, meaning) in GOALS.items()
        }
        found |= ratios(own, goals, ("seed",))
        lags = [row["lag"] / staleness for row in chosen(own, what="phd")]
        found[f"lag/{shape}"] = ratio(lags, 1.0, f"largest n - V at staleness={staleness}, over that")
        base = [row["final"] for row in chosen(own, what="all_reduce")]
        if len(base) > 1:
            deviation = max(statistics.stdev(base), 1e-9)
            better = [(row["final"] - statistics.mean(base)) / deviation for row in chosen(own, what="phd")]
            meaning = "accuracy after as many samples, phd less all-reduce, in standard deviations of all-reduce"
            found[f"phd_final/{shape}"] = ratio([statistics.mean(better)], -1.0, meaning)
    return found


def _work(times: Sequence[float], size: int, iterations: int, jitter: float, seed: int) -> Work:
    vary = jittered(1.0, jitter, seed)

    def seconds(worker: Worker, iteration: int) -> float:
        return times[worker.pipeline // size] * vary(worker, iteration)

    return Work(1, len(times) * size, iterations, seconds, num_micro_batches=1, announce="late")


def _measured(
    policies: Mapping[str, PolicyConfig],
    work: Work,
    size: int,
    training: Mapping[str, Any],
    seed: int,
) -> list[Row]:
    rows: list[Row] = []
    options = {name: value for name, value in training.items() if name not in ("target", "points")}
    for name, config in policies.items():
        run = simulate(config, work)
        end = min(run.finished.values())
        lag = max(lag for at, lag in run.lags() if at <= end)
        row: Row = {"what": name, "shape": f"{work.num_pipelines // size}x{size}", "group_size": size, "seed": seed}
        steps = sum(isinstance(event, Progress) and at <= end for at, event, _ in run.entries)  # of all pipelines
        row |= {"steps_per_s": steps / end, "lag": lag}
        row |= {"final": None, "samples": None, "seconds": None, "curve": []}
        if name in TRAINED:
            due = [end * (k + 1) / training["points"] for k in range(training["points"])]
            curve = by_time(config, work, Network(work.num_pipelines, seed=seed, **options), due)
            found, batch = reached(curve, training["target"]), training["batch_size"]
            row["curve"] = [(point.seconds, point.steps * batch, point.value) for point in curve]
            row |= {"seconds": found and found.seconds, "samples": found and found.steps * batch}
        rows.append(row)
        print(f"{row['shape']} {name}, seed {seed}: {row['steps_per_s']:.2f} steps/s, lag {row['lag']}", flush=True)
    trained = [row for row in rows if row["curve"]]
    fewest = min(row["curve"][-1][1] for row in trained)
    for row in trained:
        last_tenth = [value for _, samples, value in row["curve"] if 0.9 * fewest <= samples <= fewest]
        row["final"] = statistics.fmean(last_tenth)
    return rows


def reached(curve: Sequence[Point], target: float) -> Point | None:
    """Return the middle of the first three successive points whose mean value reaches ``target``; None if none does."""
    for before, point, after in zip(curve, curve[1:], curve[2:], strict=False):
        if (before.value + point.value + after.value) / 3 >= target:
            return point
    return None
