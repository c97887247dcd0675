"""The figures of the suites, drawn from measured rows: PNG and SVG, beside the results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_sdpipe.errors import ConfigurationError
from recipes.suites.ratios import Row

COLOURS = {
    "sdpipe": "#0072b2",
    "all_reduce": "#e69f00",
    "adpsgd": "#009e73",
    "hetpipe": "#d55e00",
    "localsgd": "#cc79a7",
    "nosync": "#56b4e9",
    "preduce": "#117733",
    "dynamic": "#004949",
    "preduce5": "#7fbf7b",
    "dynamic5": "#5ab4ac",
    "eager": "#b66dff",
    "bsp": "#8c510a",
    "ssp": "#bf812d",
    "asp": "#dfc27d",
    "hete": "#80634a",
    "backup3": "#c51b7d",
    "backup": "#c51b7d",
    "phd": "#882255",
    "phd_every4": "#cc6677",
    "phd_async": "#332288",
    "phd_unbounded": "#999933",
    "phd_gamma4_unbounded": "#44aa99",
    "bare_torch": "#595959",
    "lightning_ddp": "#a6a6a6",
    "joint batch": "#e69f00",
    "models averaged": "#7f3c8d",
    "averaged, corrected": "#0072b2",
}
"""Of each method in every figure, told apart by the colour-blind too (Okabe and Ito, Tol); outside ones are grey."""
OTHERS = ("#000000", "#8c6d31", "#b5cf6b", "#f0e442")
"""For methods of a user's own, in their order."""
MAX_COLUMNS = 3


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
    files = save_figure(_grouped_bars(panels, "samples_per_s", "samples/s"), output, "throughput") if panels else []
    flush = [row for row in emulated if row["schedule"] == "1f1b" and row["shape"].startswith("4x")]
    panels = _by(speedups(flush), "heterogeneity")
    scales = {title: rows for title, rows in panels.items() if len({row["shape"] for row in rows}) > 1}
    if scales:
        files += save_figure(_grouped_bars(scales, "speedup", "speed-up", "shape"), output, "scale")
    return files


def convergence_figures(rows: Sequence[Row], output: Path) -> list[Path]:
    """Learning curves against time and against samples (the layout of Figure 5), one line per seed.

    Args:
        rows: of ``suite=convergence``.
        output: a file; the figures get its name with an addition.
    """
    files = []
    colours = colours_of(rows)
    for name, own in _by(rows, "workload", "heterogeneity").items():
        figure, axes = new_axes(2)
        metric, _, target = own[0]["target"].split()
        for axis, (column, label) in zip(axes, enumerate(("seconds", "samples")), strict=True):
            for row in own:
                points = [(point[column], point[2]) for point in row["curve"]]
                axis.plot(*zip(*points, strict=True), color=colours[_method(row)], linewidth=1)
            axis.set_xlabel(label)
            axis.set_ylabel(metric)
            axis.axhline(float(target), color="black", linestyle=":")
        add_legend(figure, {_method(row): colours[_method(row)] for row in own}, f"{name}; dotted: {own[0]['target']}")
        files += save_figure(figure, output, f"convergence.{name.replace(' ', '.')}")
    return files


def variance_figure(rows: Sequence[Row], output: Path) -> list[Path]:
    """Validation loss against samples: means over the seeds, with their spread.

    Args:
        rows: of the training of ``suite=variance``.
        output: a file; the figure gets its name.
    """
    figure, (axis,) = new_axes(1, width=7.0)
    colours = colours_of(rows)
    for method, own in _by(rows, "what").items():
        samples = list(own[0]["curve"])
        losses = list(zip(*(row["curve"].values() for row in own), strict=True))
        axis.plot(samples, [statistics.fmean(at) for at in losses], marker=".", color=colours[method])
        axis.fill_between(samples, [*map(min, losses)], [*map(max, losses)], color=colours[method], alpha=0.2)
    axis.set_xlabel("samples of all pipelines")
    axis.set_ylabel("validation loss")
    axis.grid(alpha=0.3)
    add_legend(figure, colours)
    return save_figure(figure, output)


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


def colours_of(rows: Iterable[Row]) -> dict[str, str]:
    """Return the colours of the methods of ``rows``, in their order; a method has the same in every figure."""
    methods = list(dict.fromkeys(map(_method, rows)))
    others = [method for method in methods if method not in COLOURS]
    own = {method: OTHERS[index % len(OTHERS)] for index, method in enumerate(others)}
    return {method: (COLOURS | own)[method] for method in methods}


def _grouped_bars(panels: Mapping[str, Sequence[Row]], value: str, label: str, along: str = "heterogeneity") -> Any:
    """One panel each, a group of bars for each value of ``along``, and a bar for each method of the panel."""
    figure, axes = new_axes(len(panels))
    colours = colours_of(row for rows in panels.values() for row in rows)
    for axis, (title, rows) in zip(axes, panels.items(), strict=True):
        groups = list(dict.fromkeys(row[along] for row in rows))
        methods = _by(rows, "what")
        width = 0.8 / len(methods)
        for index, own in enumerate(methods.values()):
            places = [groups.index(row[along]) + (index - (len(methods) - 1) / 2) * width for row in own]
            heights = [row[value] for row in own]
            spread = [[row[value] * (1 - row["low"] / row["samples_per_s"]) for row in own]]
            spread.append([row[value] * (row["high"] / row["samples_per_s"] - 1) for row in own])
            axis.bar(places, heights, width, yerr=spread, color=colours[_method(own[0])], capsize=2)
        axis.set_xticks(range(len(groups)), groups)
        axis.set_title(title)
        axis.set_ylabel(label)
    add_legend(figure, colours)
    return figure


def new_axes(count: int, width: float = 4.5) -> tuple[Any, Sequence[Any]]:
    """A figure with so many panels of ``width`` inches, beside each other as far as there is room."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = math.ceil(count / MAX_COLUMNS)
    columns = math.ceil(count / lines)
    figure = Figure(figsize=(width * columns, 3.5 * lines + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def add_legend(figure: Any, colours: Mapping[str, str], title: str | None = None) -> None:
    """Above all panels, where it covers nothing."""
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=method) for method, colour in colours.items()]
    across = int(figure.get_figwidth() / 1.5)
    figure.legend(handles=handles, loc="outside upper center", ncols=across, title=title, fontsize="small")


def save_figure(figure: Any, output: Path, name: str | None = None) -> list[Path]:
    """Beside ``output``, under its name with an addition if there is one."""
    addition = "" if name is None else f".{name}"
    files = [output.with_suffix(f"{addition}{kind}") for kind in (".png", ".svg")]
    for file in files:
        figure.savefig(file, dpi=150)
    return files
