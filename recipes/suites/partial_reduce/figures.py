"""The figures of the P-Reduce paper, drawn from measured rows: PNG and SVG, beside the results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.suites.figures import COLOURS, new_axes, save_figure
from recipes.suites.ratios import Row

LABELS = {
    "all_reduce": "AR",
    "eager": "ER",
    "adpsgd": "AD",
    "bsp": "PS BSP",
    "ssp": "PS SSP",
    "asp": "PS ASP",
    "hete": "PS HETE",
    "backup3": "PS BK-3",
    "backup": "PS BK",
    "preduce": "CON",
    "dynamic": "DYN",
    "preduce5": "CON (P=5)",
    "dynamic5": "DYN (P=5)",
    "sdpipe": "SDPipe",
}


def draw(measured: Mapping[str, Sequence[Row]], output: Path) -> list[Path]:
    """The figures of the parts that were measured; they get the name of ``output`` with an addition."""
    drawers = {"virtual": convergence, "sweep": group_sizes, "production": production, "scaling": scaling}
    files = []
    for name, drawer in drawers.items():
        if measured.get(name):
            files += save_figure(drawer(measured[name]), output, name)
    return files


def convergence(rows: Sequence[Row]) -> Any:
    """Loss against time, a panel for each condition and a line for each method (the layout of Figure 7)."""
    conditions = list(dict.fromkeys(row["heterogeneity"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure, axes = new_axes(len(conditions))
    for axis, condition in zip(axes, conditions, strict=True):
        for method in methods:
            (row, *_) = [r for r in rows if (r["method"], r["heterogeneity"]) == (method, condition)]
            seconds, losses = zip(*[(point[0], point[3]) for point in row["curve"]], strict=True)
            axis.plot(seconds, losses, label=LABELS[method], linewidth=1.2, color=COLOURS[method])
        reached = [r["seconds"] for r in rows if r["heterogeneity"] == condition and r["seconds"] is not None]
        axis.set_xlim(0, 1.1 * max(reached, default=1.0))
        axis.axhline(rows[0]["target"], color="grey", linestyle=":")
        axis.set_yscale("log")
        axis.set_xlabel("run time (virtual s)")
        axis.set_ylabel("loss")
        axis.set_title(condition)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=7, fontsize="small")
    return figure


def group_sizes(rows: Sequence[Row]) -> Any:
    """Run time, updates and time of an update by P (the layout of Figure 8)."""
    figure, axes = new_axes(3)
    sizes = {row["method"]: int(row["method"].removeprefix("p")) for row in rows}
    for axis, (column, label) in zip(axes, _METRICS, strict=True):
        for index, condition in enumerate(dict.fromkeys(row["heterogeneity"] for row in rows)):
            medians = {
                size: _median(rows, method, condition, column)
                for method, size in sorted(sizes.items(), key=lambda item: item[1])
            }
            shown = {size: value for size, value in medians.items() if value is not None}
            axis.plot([*shown], [*shown.values()], marker="o", color=f"C{index}", label=condition)
        axis.set_xlabel("P")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=5, fontsize="small")
    return figure


def production(rows: Sequence[Row]) -> Any:
    """Run time, updates and time of an update of each method on traced devices (the layout of Figure 9)."""
    figure, axes = new_axes(3)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    condition = rows[0]["heterogeneity"]
    for axis, (column, label) in zip(axes, _METRICS, strict=True):
        heights = [_median(rows, method, condition, column) or 0.0 for method in methods]
        bars = axis.bar([LABELS[m] for m in methods], heights, color=[COLOURS[m] for m in methods])
        axis.bar_label(bars, fmt="%.3g")
        axis.set_ylabel(label)
    figure.suptitle(f"{rows[0]['pipelines']} workers, {condition}", fontsize="medium")
    return figure


def scaling(rows: Sequence[Row]) -> Any:
    """Speed-up over one worker by the number of workers (the layout of Figure 11)."""
    figure, (axis,) = new_axes(1)
    counts = sorted({row["pipelines"] for row in rows})
    speeds: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        speeds.setdefault((row["method"], row["pipelines"]), []).append(row["steps_per_s"])
    alone = statistics.median(speeds["all_reduce", 1]) if 1 in counts else 1.0
    for method in dict.fromkeys(row["method"] for row in rows):
        present = [count for count in counts if (method, count) in speeds]
        heights = [statistics.median(speeds[method, count]) / alone for count in present]
        axis.plot(present, heights, marker="o", color=COLOURS[method], label=LABELS[method])
    axis.plot(counts, counts, color="grey", linestyle=":", label="linear")
    axis.set_xticks(counts)
    axis.set_xlabel("workers")
    axis.set_ylabel("speed-up" if 1 in counts else "mini-batches/s")
    axis.legend(fontsize="small")
    return figure


_METRICS = (("seconds", "run time (virtual s)"), ("updates", "updates"), ("per_update_s", "time of an update (s)"))


def _median(rows: Sequence[Row], method: str, condition: str, column: str) -> float | None:
    own = [row[column] for row in rows if (row["method"], row["heterogeneity"]) == (method, condition)]
    return None if None in own else statistics.median(own)
