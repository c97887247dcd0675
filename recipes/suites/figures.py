"""The one figure of all suites, drawn from measured rows: PNG and SVG, beside the results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_sdpipe.errors import ConfigurationError
from recipes.suites.grid import Row, chosen, values

COLOURS = {
    **{"sdpipe": "#0072b2", "all_reduce": "#e69f00", "adpsgd": "#009e73", "hetpipe": "#d55e00", "localsgd": "#cc79a7"},
    **{"nosync": "#56b4e9", "preduce": "#117733", "dynamic": "#004949", "eager": "#b66dff", "bsp": "#8c510a"},
    **{"asp": "#dfc27d", "hete": "#80634a", "backup3": "#c51b7d", "phd": "#882255", "phd_async": "#332288"},
    **{"phd_unbounded": "#999933", "bare_torch": "#595959", "lightning_ddp": "#a6a6a6"},
}
"""Of a method in every figure, told apart by the colour-blind too (Okabe and Ito, Tol); outside ones are grey."""
OTHERS = ("#000000", "#8c6d31", "#b5cf6b", "#f0e442", "#cc6677", "#44aa99", "#7f3c8d", "#5ab4ac")
"""For other methods, in their order."""
MAX_COLUMNS = 3


def require_matplotlib(output: str | None) -> None:
    """Look for matplotlib before anything is measured, if there will be a figure.

    Raises:
        ConfigurationError: it is not installed.
    """
    if output is not None and find_spec("matplotlib") is None:
        raise ConfigurationError("Figures need matplotlib; install it: pip install 'lightning-sdpipe[recipes]'")


def plot(
    rows: Sequence[Row],
    output: Path,
    name: str = "",
    *,
    x: str,
    y: Sequence[str],
    by: str = "what",
    panels: Sequence[str] = (),
    each: str | None = None,
    bars: bool = False,
    target: float | None = None,
    kinds: Sequence[str] = (".png", ".svg"),
) -> list[Path]:
    """Draw a panel for each value of some columns and each of ``y``, and a line or bars for each value of ``by``.

    Args:
        rows: measurements; those without a value of ``y`` are left out.
        output: a file; the figure gets its name with an addition.
        name: the addition, if there is one.
        x: the column along the axis.
        y: the columns to show.
        by: the column that has a colour for each of its values.
        panels: columns whose values have panels of their own.
        each: a column whose values have lines of their own; without it medians are drawn, with their spread.
        bars: groups of bars are drawn instead of lines.
        target: a level that is marked.
        kinds: suffixes of the files.
    """
    titled: dict[str, list[Row]] = {}
    for row in rows:
        for column in y:
            if row.get(column) is not None:
                title = " ".join([*(str(row[panel]) for panel in panels), *([column] if len(y) > 1 else [])])
                titled.setdefault(title, []).append({**row, "value": row[column]})
    colours = colours_of(values(rows, by))
    figure, axes = _axes(len(titled))
    for axis, (title, own) in zip(axes, titled.items(), strict=True):
        names, places = values(own, by), values(own, x)
        width = 0.8 / len(names)
        for number, what in enumerate(names):
            of_name = chosen(own, **{by: what})
            for line in (
                [of_name] if each is None else [chosen(of_name, **{each: one}) for one in values(of_name, each)]
            ):
                found = {place: [row["value"] for row in line if row[x] == place] for place in values(line, x)}
                at, middle = [*found], [statistics.median(several) for several in found.values()]
                low, high = [min(several) for several in found.values()], [max(several) for several in found.values()]
                if bars:
                    shift = (number - (len(names) - 1) / 2) * width
                    error = [[m - a for m, a in zip(middle, low, strict=True)]]
                    error.append([b - m for m, b in zip(middle, high, strict=True)])
                    axis.bar([places.index(p) + shift for p in at], middle, width, yerr=error, color=colours[what])
                    continue
                axis.plot(at, middle, color=colours[what], linewidth=1, marker="." if len(at) < 20 else None)
                axis.fill_between(at, low, high, color=colours[what], alpha=0.2)
        if bars:
            axis.set_xticks(range(len(places)), map(str, places), fontsize="small")
        if target is not None:
            axis.axhline(target, color="black", linestyle=":")
        axis.set(title=title, xlabel=x, ylabel=y[0] if len(y) == 1 else "")
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=what) for what, colour in colours.items()]
    across = int(figure.get_figwidth() / 1.5)
    figure.legend(handles=handles, loc="outside upper center", ncols=across, fontsize="small")  # covers no panel
    files = [output.with_suffix(f".{name}{kind}" if name else kind) for kind in kinds]
    for file in files:
        figure.savefig(file, dpi=150)
    return files


def curve_points(rows: Iterable[Row], **columns: int) -> list[Row]:
    """Return a row for each point of the ``curve`` of each row, with the values at these places in it."""
    return [row | {name: point[place] for name, place in columns.items()} for row in rows for point in row["curve"]]


def colours_of(methods: Sequence[str]) -> dict[str, str]:
    """Return the colours of methods, in their order; a method has the same in every figure."""
    others = [method for method in methods if method not in COLOURS]
    own = {method: OTHERS[index % len(OTHERS)] for index, method in enumerate(others)}
    return {method: (COLOURS | own)[method] for method in methods}


def _axes(count: int) -> tuple[Any, Sequence[Any]]:
    """Return a figure with so many panels, beside each other as far as there is room."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = math.ceil(count / MAX_COLUMNS)
    columns = math.ceil(count / lines)
    figure = Figure(figsize=(4.5 * columns, 3.5 * lines + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]
