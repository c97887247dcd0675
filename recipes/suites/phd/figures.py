"""The figures of PHD-PSGD's evaluation in the layout of the paper's Figures 6 to 11, and models' lag over time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from recipes.suites.figures import COLOURS, OTHERS, add_legend, colours_of, new_axes, save_figure
from recipes.suites.phd.training import Task
from recipes.suites.ratios import Row

COMPARED = ("all_reduce", "phd", "phd_unbounded", "sdpipe")
LAGGING = ("phd_gamma4_unbounded", "phd_unbounded", "phd", "sdpipe")


def draw(rows: Sequence[Row], pairs: Sequence[Row], task: Task, output: Path) -> list[Path]:
    """All of them.

    Args:
        rows: of one shape.
        pairs: of two groups by themselves.
        task: what was trained.
        output: a file; the figures get its name with an addition.
    """
    return [
        *_learning(rows, task, output),
        *_throughput(rows, pairs, output),
        *_steps_of_all_reduce(rows, output),
        *_lags(rows, output),
    ]


def _of(rows: Sequence[Row], method: str, column: str) -> list[float]:
    return [row[column] for row in rows if row["what"] == method and row[column] is not None]


def _learning(rows: Sequence[Row], task: Task, output: Path) -> list[Path]:
    """Figures 6 to 8: accuracy over time, and what it took to reach the target."""
    figure, axes = new_axes(3)
    colours = colours_of(row for row in rows if row["what"] in COMPARED)
    for method, colour in colours.items():
        for row in (row for row in rows if row["what"] == method):
            axes[0].plot(
                [point[0] for point in row["curve"]],
                [100 * point[2] for point in row["curve"]],
                color=colour,
                linewidth=1,
            )
    axes[0].axhline(100 * task.target, color="black", linestyle=":")
    axes[0].set(xlabel="seconds (simulated)", ylabel="accuracy (%)", title="accuracy over time (Fig. 6)")
    axes[0].set_ylim(bottom=60)
    _bars(axes[1], rows, "seconds", f"seconds to {100 * task.target:g} % (Fig. 7)")
    _bars(axes[2], rows, "samples", f"samples to {100 * task.target:g} % (Fig. 8)")
    add_legend(figure, colours)
    return save_figure(figure, output, "phd.learning")


def _throughput(rows: Sequence[Row], pairs: Sequence[Row], output: Path) -> list[Path]:
    """Figures 9 and 10: steps per second of all, of two groups by themselves, and what goes over slow links."""
    figure, axes = new_axes(3)
    methods = ("all_reduce", "phd", "phd_every4", "phd_async", "sdpipe", "nosync")
    _bars(axes[0], rows, "steps_per_s", "mini-batches/s (Fig. 9)", methods)
    colours = colours_of(row for row in rows if row["what"] in methods)
    colours["possible"] = COLOURS["bare_torch"]
    for index, column in enumerate(("phd_steps_per_s", "phd_async_steps_per_s", "possible")):
        places = [k + (index - 1) * 0.27 for k in range(len(pairs))]
        heights = [row[column] for row in pairs]
        axes[1].bar(places, heights, 0.25, color=COLOURS.get(column.removesuffix("_steps_per_s"), colours["possible"]))
    axes[1].set_xticks(range(len(pairs)), [row["what"].replace(" with ", "\n") for row in pairs], fontsize="small")
    axes[1].set(title="two groups alone (Fig. 10a)", ylabel="mini-batches/s")
    names = ("all_reduce", "phd", "phd_every4")
    heights = [statistics.mean(_of(rows, method, "mb_per_step")) for method in names]
    axes[2].bar(range(3), heights, 0.6, color=[COLOURS[name] for name in names])
    axes[2].set_xticks(range(3), names, fontsize="small")
    axes[2].set(title="MB per step over slow links, by formula (Fig. 10b)", ylabel="MB")
    axes[2].title.set_fontsize("medium")
    add_legend(figure, colours)
    return save_figure(figure, output, "phd.throughput")


def _steps_of_all_reduce(rows: Sequence[Row], output: Path) -> list[Path]:
    """Figure 11: what a worker has sent and received after each step of an all-reduce around a ring."""
    figure, axes = new_axes(1)
    (whole, *_) = _of(rows, "all_reduce", "mb_per_step")
    workers = math.prod(map(int, rows[0]["shape"].split("x")))
    steps = 2 * (workers - 1)
    moved = [whole * (k + 1) / steps for k in range(steps)]
    axes[0].bar(range(workers - 1), moved[: workers - 1], color=COLOURS["all_reduce"])
    axes[0].bar(range(workers - 1, steps), moved[workers - 1 :], color=OTHERS[1])
    axes[0].set(xlabel=f"step of {steps}", ylabel="MB sent and received", title="all-reduce, by formula (Fig. 11)")
    add_legend(figure, {"(a) reduced": COLOURS["all_reduce"], "(b) handed round": OTHERS[1]})
    return save_figure(figure, output, "phd.all_reduce")


def _lags(rows: Sequence[Row], output: Path) -> list[Path]:
    figure, axes = new_axes(1, width=9.0)
    seed = rows[0]["seed"]
    colours = colours_of(row for row in rows if row["what"] in LAGGING)
    for method in (method for method in LAGGING if method in colours):  # the largest lags first, behind the others
        for row in rows:
            if row["what"] == method and row["seed"] == seed:
                at, lag = zip(*row["lags"], strict=True)
                axes[0].step(at, lag, where="post", color=colours[method], linewidth=0.8)
    axes[0].set(xlabel="seconds (simulated)", ylabel="steps", title="steps of a group that the oldest model lacks")
    add_legend(figure, colours)
    return save_figure(figure, output, "phd.lag")


def _bars(axis: object, rows: Sequence[Row], column: str, title: str, methods: Sequence[str] = COMPARED) -> None:
    """Means over the seeds, with their range."""
    for index, method in enumerate(methods):
        values = _of(rows, method, column)
        if values:
            mean = statistics.mean(values)
            spread = [[mean - min(values)], [max(values) - mean]]
            axis.bar(index, mean, 0.6, yerr=spread, capsize=2, color=COLOURS[method])  # type: ignore[attr-defined]
    axis.set_xticks(range(len(methods)), methods, fontsize="small", rotation=20)  # type: ignore[attr-defined]
    axis.set_title(title)  # type: ignore[attr-defined]
