"""The figures of SDPipe's evaluation, drawn from measured rows: PNG and SVG, beside the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_sdpipe.errors import ConfigurationError
from recipes.suites.ratios import Row


def require_matplotlib() -> None:
    """Before anything is measured.

    Raises:
        ConfigurationError: it is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigurationError("Figures need matplotlib; install it: pip install 'lightning-sdpipe[recipes]'")


def throughput_figures(summaries: Sequence[Row], output: Path) -> list[Path]:
    """Throughput of each configuration under each condition (the layout of Figure 4), and speed-ups by the number of
    workers (Figure 6).

    Args:
        summaries: of ``suite=throughput``.
        output: a file; the figures get its name with an addition.
    """
    compared = [row for row in summaries if row["panel"] != "headline"]  # whose mini-batches are shorter
    emulated = [row for row in compared if row["workload"] == "emulated"]
    panels = _by(compared, "workload", "shape", "schedule")
    files = save_figure(_grouped_bars(panels, "samples_per_s", "samples/s"), output, "throughput")
    flush = [row for row in emulated if row["schedule"] == "1f1b" and row["shape"].startswith("4x")]
    if len({row["shape"] for row in flush}) > 1:
        files += save_figure(
            _grouped_bars(_by(speedups(flush), "heterogeneity"), "speedup", "speed-up", "shape"), output, "scale"
        )
    return files


def convergence_figures(rows: Sequence[Row], output: Path) -> list[Path]:
    """Learning curves against time and against samples (the layout of Figure 5), one line per seed.

    Args:
        rows: of ``suite=convergence``.
        output: a file; the figures get its name with an addition.
    """
    files = []
    for name, own in _by(rows, "workload", "heterogeneity").items():
        figure, axes = new_axes(2)
        methods = list(dict.fromkeys(_method(row) for row in own))
        for axis, column, label in zip(axes, (0, 1), ("seconds", "samples"), strict=True):
            for row in own:
                points = [(point[column], point[2]) for point in row["curve"]]
                index = methods.index(_method(row))
                label_once = _method(row) if row["repeat"] == 0 else None
                axis.plot(*zip(*points, strict=True), color=f"C{index}", label=label_once, linewidth=1)
            axis.set_xlabel(label)
            axis.set_ylabel(own[0]["target"].split()[0])
            axis.axhline(float(own[0]["target"].split()[-1]), color="grey", linestyle=":")
            axis.set_title(name)
        axes[0].legend(fontsize="small")
        files += save_figure(figure, output, f"convergence.{name.replace(' ', '.')}")
    return files


def speedups(rows: Sequence[Row], base: str = "hetpipe") -> list[Row]:
    """Throughput of each method over that of ``base`` (all-reduce, if it was not measured) with as many workers."""
    base = base if any(_method(row) == base for row in rows) else "all_reduce"
    bases = {(row["shape"], row["heterogeneity"]): row["samples_per_s"] for row in rows if _method(row) == base}
    return [
        {**row, "heterogeneity": f"{row['heterogeneity']}, over {base}", "speedup": row["samples_per_s"] / below}
        for row in rows
        if (below := bases.get((row["shape"], row["heterogeneity"]))) is not None
    ]


def _method(row: Row) -> str:
    return str(row["what"]).removesuffix(", median")


def _by(rows: Sequence[Row], *columns: str) -> dict[str, list[Row]]:
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(" ".join(row[column] for column in columns), []).append(row)
    return panels


def _grouped_bars(panels: Mapping[str, Sequence[Row]], value: str, label: str, along: str = "heterogeneity") -> Any:
    """One panel each, a group of bars for each value of ``along``, and a bar for each method."""
    figure, axes = new_axes(len(panels))
    methods = list(dict.fromkeys(_method(row) for rows in panels.values() for row in rows))
    for axis, (title, rows) in zip(axes, panels.items(), strict=True):
        groups = list(dict.fromkeys(row[along] for row in rows))
        for index, method in enumerate(methods):
            own = [row for row in rows if _method(row) == method]
            width = 0.8 / len(methods)
            places = [groups.index(row[along]) + (index - (len(methods) - 1) / 2) * width for row in own]
            heights = [row[value] for row in own]
            spread = [[row[value] * (1 - row["low"] / row["samples_per_s"]) for row in own]]
            spread.append([row[value] * (row["high"] / row["samples_per_s"] - 1) for row in own])
            axis.bar(places, heights, width, yerr=spread, label=method, color=f"C{index}", capsize=2)
        axis.set_xticks(range(len(groups)), groups)
        axis.set_title(title)
        axis.set_ylabel(label)
    axes[0].legend(fontsize="small")
    return figure


def new_axes(count: int) -> tuple[Any, Sequence[Any]]:
    """A figure with so many panels beside each other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * count, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def save_figure(figure: Any, output: Path, name: str) -> list[Path]:
    """Beside ``output``, under its name with an addition."""
    files = [output.with_suffix(f".{name}{kind}") for kind in (".png", ".svg")]
    for file in files:
        figure.savefig(file)
    return files
