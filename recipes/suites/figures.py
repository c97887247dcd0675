"""Draws the figures of all suites from measured rows: PNG and SVG, beside the results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_sdpipe.errors import ConfigurationError
from recipes.suites.grid import Row, chosen, values

COLOURS = (
    *("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#117733", "#882255", "#999933", "#595959"),
    *("#000000", "#8c6d31", "#b5cf6b", "#f0e442", "#cc6677", "#44aa99", "#7f3c8d", "#5ab4ac"),
)
"""Colours of the lines, in order, which the colour-blind can tell apart, too (Okabe and Ito, Tol)."""
MAX_COLUMNS = 3


def require_matplotlib(output: str | None) -> None:
    """Check, before anything is measured, that matplotlib is installed if there will be a figure.

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
    panels: Sequence[str] = (),
    kinds: Sequence[str] = (".png", ".svg"),
) -> None:
    """Draw a panel for each value of the columns ``panels`` and each of ``y``. For each value of ``what``, a panel has
    a line, the mean of the rows at each ``x``, and a band from their minimum to their maximum.

    Args:
        rows: measurements; those without a value of ``y`` are left out.
        output: a file, after which the figures are named.
        name: an addition to their names; may be empty.
        x: the column along the axis.
        y: the columns to show.
        panels: columns whose values get separate panels.
        kinds: suffixes of the files.
    """
    titled: dict[str, list[Row]] = {}
    for row in rows:
        for column in y:
            if row.get(column) is not None:
                title = " ".join([*(str(row[panel]) for panel in panels), *([column] if len(y) > 1 else [])])
                titled.setdefault(title, []).append({**row, "value": row[column]})
    colours = dict(zip(values(rows, "what"), cycle(COLOURS), strict=False))
    figure, axes = _axes(len(titled))
    for axis, (title, own) in zip(axes, titled.items(), strict=True):
        for what in values(own, "what"):
            found: dict[Any, list[float]] = {}
            for row in chosen(own, what=what):
                found.setdefault(row[x], []).append(row["value"])
            places, marker = [*found], "." if len(found) < 20 else None
            axis.plot(places, [*map(fmean, found.values())], color=colours[what], linewidth=1, marker=marker)
            axis.fill_between(
                places, [*map(min, found.values())], [*map(max, found.values())], color=colours[what], alpha=0.2
            )
        axis.set(title=title, xlabel=x, ylabel=y[0] if len(y) == 1 else "")
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=what) for what, colour in colours.items()]
    across = int(figure.get_figwidth() / 1.5)
    figure.legend(handles=handles, loc="outside upper center", ncols=across, fontsize="small")  # covers no panel
    for kind in kinds:
        figure.savefig(output.with_suffix(f".{name}{kind}" if name else kind), dpi=150)


def _axes(count: int) -> tuple[Any, Sequence[Any]]:
    """Return a figure with ``count`` panels, up to :data:`MAX_COLUMNS` beside each other."""
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
