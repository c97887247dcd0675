"""Picture of a placement: the mesh, a box for each device, coloured by host, and the speed of its links."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_sdpipe.placement.cost import group_cost
from lightning_sdpipe.placement.planner import PlacementResult
from lightning_sdpipe.placement.report import shown_seconds, slowest_links

PALETTE = ("#8ecae6", "#ffd166", "#95d5b2", "#f4a6b7", "#cdb4db", "#ffb997", "#a3b1ff", "#d4e09b", "#b8c0c8", "#e6ccb2")
SLOW = "#c1121f"
QUICK_TO_SLOW = ("#a9b2bc", "#f4a261", SLOW)
WIDTH, HEIGHT = 0.62, 0.56
"""Size of a device's box; stages are 1 apart, and so are pipelines."""

LONGEST_NAME = 12
"""Longest name of a device in its box; for longer names only the index is written, and the colour says which host it
is."""


def draw_picture(placed: PlacementResult, path: Path) -> None:
    """Write the picture to ``path``; its ending decides the format.

    Every row is a pipeline, in which activations travel to the right and gradients back; every column is a stage, whose
    devices average. Links between stages are coloured by what they cost, and the slowest of every cut is named.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    stages, pipelines = placed.asked.num_stages, placed.num_pipelines
    size = (max(6.5, 1.5 * stages + 1.5), 0.55 * pipelines + 3.1)
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    axes.set_xlim(-0.95, stages - 0.5)
    axes.set_ylim(pipelines - 0.3, -1.25)
    axes.axis("off")
    colours = _colours(placed)
    _links(figure, axes, placed)
    _devices(axes, placed, colours)
    _stages(axes, placed)
    figure.suptitle(_title(placed), fontsize=10, wrap=True)
    if len(colours) <= len(PALETTE):
        handles = [Patch(facecolor=colour, edgecolor="black", label=host) for host, colour in colours.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, title="host", fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _title(placed: PlacementResult) -> str:
    cost, default = placed.cost, placed.default_cost.total
    gain = f" (default order: {shown_seconds(default)})" if default != cost.total else ""
    return (
        f"{shown_seconds(cost.total)} of communication for a mini-batch of every pipeline{gain}:\n"
        f"{shown_seconds(cost.data)} to average the replicas of a stage (columns),\n"
        f"{shown_seconds(cost.pipeline)} to pass activations and gradients on (rows)"
    )


def _colours(placed: PlacementResult) -> dict[str, str]:
    hosts = dict.fromkeys(device.host for device in placed.network.devices)
    return {host: PALETTE[number % len(PALETTE)] for number, host in enumerate(hosts)}


def _links(figure: Any, axes: Any, placed: PlacementResult) -> None:
    from matplotlib import cm
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    costs = {
        (y, stage): placed.weights.step[stage][a][b] + placed.weights.period[stage][a][b]
        for y, row in enumerate(placed.rows)
        for stage, (a, b) in enumerate(pairwise(row))
    }
    if not costs:
        return
    colours = LinearSegmentedColormap.from_list("links", QUICK_TO_SLOW)
    scale: Any = cm.ScalarMappable(Normalize(0.0, max(costs.values()) or 1.0), colours)
    for (y, stage), cost in costs.items():
        axes.annotate(
            "",
            xy=(stage + 1 - WIDTH / 2, y),
            xytext=(stage + WIDTH / 2, y),
            arrowprops={"arrowstyle": "<|-|>", "color": scale.to_rgba(cost), "lw": 2.4, "shrinkA": 0, "shrinkB": 0},
        )
    for cut in slowest_links(placed.stages, placed.weights):
        seconds = (
            placed.weights.step[cut.stage][cut.above][cut.below]
            + placed.weights.period[cut.stage][cut.above][cut.below]
        )
        axes.text(cut.stage + 0.5, -0.62, shown_seconds(seconds), ha="center", va="center", fontsize=8)
    bar = figure.colorbar(scale, ax=axes, shrink=0.7, pad=0.02)
    bar.set_label("seconds to pass a mini-batch over a link,\nand its gradients back", fontsize=8)
    bar.ax.tick_params(labelsize=8)


def _devices(axes: Any, placed: PlacementResult, colours: dict[str, str]) -> None:
    from matplotlib.patches import FancyBboxPatch

    for y, row in enumerate(placed.rows):
        axes.text(-0.42, y, f"pipeline {y}", ha="right", va="center", fontsize=9)
        for x, number in enumerate(row):
            device = placed.network.devices[number]
            corner, style = (x - WIDTH / 2, y - HEIGHT / 2), "round,pad=0,rounding_size=0.08"
            axes.add_patch(FancyBboxPatch(corner, WIDTH, HEIGHT, style, facecolor=colours[device.host], linewidth=0.8))
            name = str(device) if len(str(device)) <= LONGEST_NAME else f":{device.index}"
            axes.text(x, y, name, ha="center", va="center", fontsize=7.5)


def _averaging(placed: PlacementResult) -> list[float]:
    """Return the seconds of averaging of each stage."""
    groups = zip(placed.stages, placed.weights.exchange, strict=True)
    return [group_cost(group, exchange) for group, exchange in groups]


def _stands_out(spent: Sequence[float]) -> bool:
    return max(spent) > 1.01 * min(spent)


def _stages(axes: Any, placed: PlacementResult) -> None:
    spent = _averaging(placed)
    for stage, seconds in enumerate(spent):
        count = None if placed.spans is None else len(placed.spans[stage])
        blocks = "" if count is None else f"\n{count} block{'s' if count > 1 else ''}"
        axes.text(stage, -1.2, f"stage {stage}{blocks}", ha="center", va="top", fontsize=9.5, fontweight="bold")
        if placed.num_pipelines > 1:
            colour = SLOW if _stands_out(spent) and seconds == max(spent) else "black"
            axes.text(stage, -0.62, shown_seconds(seconds), ha="center", va="center", fontsize=8, color=colour)
    if placed.num_pipelines > 1 or len(placed.stages) > 1:
        axes.text(-0.42, -0.62, "average / pass on", ha="right", va="center", fontsize=7.5, style="italic")
