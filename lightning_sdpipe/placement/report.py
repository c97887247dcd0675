"""Report of a placement for people: as text, and as a picture of the mesh, with a box for each device, coloured by
host, and the speed of its links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_sdpipe.placement.cost import Stages, Weights, group_cost
from lightning_sdpipe.placement.planner import PlacementResult

PALETTE = ("#8ecae6", "#ffd166", "#95d5b2", "#f4a6b7", "#cdb4db", "#ffb997", "#a3b1ff", "#d4e09b", "#b8c0c8", "#e6ccb2")
SLOW = "#c1121f"
QUICK_TO_SLOW = ("#a9b2bc", "#f4a261", SLOW)
WIDTH, HEIGHT = 0.62, 0.56
"""Size of a device's box; stages are 1 apart, and so are pipelines."""
LONGEST_NAME = 12
"""Longest name of a device in its box; for longer names only the index is written, and the colour says which host it
is."""


@dataclass(frozen=True)
class Cut:
    """The slowest link between stage ``stage`` and the next: from ``above`` to ``below``, in pipeline ``pipeline``."""

    stage: int
    pipeline: int
    above: int
    below: int


def slowest_links(stages: Stages, weights: Weights) -> list[Cut]:
    """Return the slowest link of each cut; the first of equally slow ones."""
    found = []
    for stage, (above, below) in enumerate(pairwise(stages)):
        step, period = weights.step[stage], weights.period[stage]
        pairs = list(enumerate(zip(above, below, strict=True)))
        pipeline, (a, b) = max(pairs, key=lambda pair: step[pair[1][0]][pair[1][1]] + period[pair[1][0]][pair[1][1]])
        found.append(Cut(stage, pipeline, a, b))
    return found


def slowest_stage(stages: Stages, weights: Weights) -> tuple[int, int]:
    """Return the stage whose averaging takes longest, and its member that spends most on it."""
    spent = [
        (sum(exchange[a][b] for b in group if b != a), stage, a)
        for stage, (group, exchange) in enumerate(zip(stages, weights.exchange, strict=True))
        for a in group
    ]
    _, stage, device = max(spent, key=lambda entry: (entry[0], -entry[1], -entry[2]))
    return stage, device


def rates(tried: Sequence[PlacementResult]) -> str:
    """Return a row for each shape that was tried."""
    rows = [("stages × pipelines", "mini-batches/s")]
    rows += [(placed.shape, f"{placed.rate:.3g}") for placed in tried]
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"{shape:<{width}}  {speed:>14}" for shape, speed in rows)


def given(placed: PlacementResult) -> str:
    """Return the strategy's arguments that go with a file."""
    more = "" if placed.layout.alike else f', num_micro_batches={placed.micro_batches}, partition="placed"'
    return f"num_stages={placed.num_stages}{more}"


def report(placed: PlacementResult) -> str:
    """Return a row for each pipeline, the costs by place, and the cost of rank 0's rule."""
    names = [str(device) for device in placed.network.devices]
    used = len(names) - len(placed.left_out)
    devices = f"{used} of {len(names)}" if placed.left_out or not placed.layout.alike else str(used)
    shape = f"pipelines of {', '.join(map(str, placed.layout.depths))} stages"
    if placed.layout.alike:
        shape = f"{placed.num_stages} stages × {placed.num_pipelines} pipelines"
    cost = f"cost model {placed.job.cost}" + (
        f", {placed.micro_batches} micro-batches" if placed.job.cost == "pipelined" else ""
    )
    lines = [f"{devices} devices as {shape}; {cost}", "", *_table(placed, names), "", *_costs(placed, names)]
    found = placed.found
    end = "" if found.complete else ": cut short, so more --seconds, or another machine, may find a better one"
    lines.append(f"Search         {found.moves} moves{end}")
    if placed.left_out:
        lines.append(f"Left out       {', '.join(names[device] for device in placed.left_out)}")
    lines.append(_rank_zero(placed, names))
    if not placed.layout.alike:
        sync = 'sync="all_reduce", ' if placed.job.sync == "all_reduce" else ""
        lines.append(
            f"Without a file SDPipeStrategy(num_stages={placed.num_stages}, {sync}num_micro_batches="
            f"{placed.micro_batches}, partition={placed.blocks}), the ranks in the order of the rows, each row from "
            "its end"
        )
    missing = placed.network.unconnected()
    if missing:
        pairs = ", ".join(f"{a} – {b}" for a, b in missing[:5]) + (", …" if len(missing) > 5 else "")
        lines.append(
            f"No connection  {pairs}: not used between stages or replicas. Training still connects every pair."
        )
    return "\n".join(lines)


def _table(placed: PlacementResult, names: Sequence[str]) -> list[str]:
    stages = range(max(placed.layout.depths))
    rows = [["pipeline", "s/mini-batch", *(f"stage {stage}" for stage in stages)]]
    for number, (row, blocks) in enumerate(zip(placed.layout.rows, placed.blocks, strict=True)):
        here = [names[device] for device in row]
        if not placed.layout.alike:
            here = [f"{name} ({count})" for name, count in zip(here, blocks, strict=True)]
        rows.append([str(number), f"{placed.times.pipelines[0, number]:.3g}", *here])
    if placed.layout.alike and placed.network.model is not None:
        rows.append(["blocks", "", *map(str, placed.blocks[0])])
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]


def _costs(placed: PlacementResult, names: Sequence[str]) -> list[str]:
    lines = []
    cost, default, costs = placed.cost, placed.default_cost, placed.weights
    if cost is not None and default is not None and costs is not None:
        stages = placed.layout.stages
        gain = f" (default order: {shown_seconds(default.total)}, {_times(default.total, cost.total)})"
        lines.append(f"Communication  {shown_seconds(cost.total)} for a mini-batch of every pipeline{gain}")
        if placed.num_pipelines > 1:
            stage, device = slowest_stage(stages, costs)
            data = shown_seconds(cost.data)
            lines.append(f"  data         {data}: stage {stage} takes longest to average, {names[device]} most of all")
        if len(stages) > 1:
            worst = max(slowest_links(stages, costs), key=lambda cut: _link(cut, costs))
            lines.append(
                f"  pipeline     {shown_seconds(cost.pipeline)}: the slowest link is {names[worst.above]} – "
                f"{names[worst.below]}, stage {worst.stage} to {worst.stage + 1}"
            )
    if placed.job.computes:
        gain = f"default order and uniform cut: {shown_seconds(placed.default_seconds)}, "
        gain += _times(placed.default_seconds, placed.seconds)
        if math.isinf(placed.default_seconds):
            gain = "the default order and uniform cut do not fit into the devices"
        lines.append(f"A mini-batch   {shown_seconds(placed.seconds)} with computing ({gain})")
        lines.append(f"Together       {placed.rate:.3g} mini-batches/s")
    if placed.drawn is not None:
        sizes = [len(group) for group in placed.drawn.groups]
        lines.append(
            f"SDPipe's groups have {sum(sizes) / len(sizes):.1f} members and take "
            f"{shown_seconds(placed.drawn.seconds)}; pipelines run at {placed.drawn.efficiency:.2f} of the speed that "
            "they would have alone"
        )
    return lines


def _rank_zero(placed: PlacementResult, names: Sequence[str]) -> str:
    text = f"Rank 0         {names[placed.first]} must be rank 0 and runs a last stage, "
    if placed.price <= 1e-9 * placed.seconds:
        return text + "which costs nothing"
    hosts = " or ".join(placed.free_hosts[:3])
    remedy = f"; start the run with host {hosts} first, and place with --first {placed.free_hosts[0]}:0, to avoid that"
    return text + f"which costs {shown_seconds(placed.price)}" + (remedy if placed.free_hosts else "")


def _link(cut: Cut, weights: Weights) -> float:
    return weights.step[cut.stage][cut.above][cut.below] + weights.period[cut.stage][cut.above][cut.below]


def shown_seconds(seconds: float) -> str:
    """Format a duration for people."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.3g} µs"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def _times(default: float, placed: float) -> str:
    return f"{default / placed:.2f} times as long" if placed else "which costs nothing either"


def draw_picture(placed: PlacementResult, path: Path) -> None:
    """Write the picture of pipelines that have one cut to ``path``; its ending decides the format.

    Every row is a pipeline, in which activations travel to the right and gradients back; every column is a stage, whose
    devices average. Links between stages are coloured by what they cost, and the slowest of every cut is named.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    stages, pipelines = len(placed.layout.stages), placed.num_pipelines
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
    cost, default = placed.cost, placed.default_cost
    assert cost is not None
    assert default is not None
    gain = f" (default order: {shown_seconds(default.total)})" if default.total != cost.total else ""
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

    weights = placed.weights
    assert weights is not None
    costs = {
        (y, stage): _link(Cut(stage, y, a, b), weights)
        for y, row in enumerate(placed.layout.rows)
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
    for cut in slowest_links(placed.layout.stages, weights):
        seconds = _link(cut, weights)
        axes.text(cut.stage + 0.5, -0.62, shown_seconds(seconds), ha="center", va="center", fontsize=8)
    bar = figure.colorbar(scale, ax=axes, shrink=0.7, pad=0.02)
    bar.set_label("seconds to pass a mini-batch over a link,\nand its gradients back", fontsize=8)
    bar.ax.tick_params(labelsize=8)


def _devices(axes: Any, placed: PlacementResult, colours: dict[str, str]) -> None:
    from matplotlib.patches import FancyBboxPatch

    for y, row in enumerate(placed.layout.rows):
        axes.text(-0.42, y, f"pipeline {y}", ha="right", va="center", fontsize=9)
        for x, number in enumerate(row):
            device = placed.network.devices[number]
            corner, style = (x - WIDTH / 2, y - HEIGHT / 2), "round,pad=0,rounding_size=0.08"
            axes.add_patch(FancyBboxPatch(corner, WIDTH, HEIGHT, style, facecolor=colours[device.host], linewidth=0.8))
            name = str(device) if len(str(device)) <= LONGEST_NAME else f":{device.index}"
            axes.text(x, y, name, ha="center", va="center", fontsize=7.5)


def _stages(axes: Any, placed: PlacementResult) -> None:
    assert placed.weights is not None
    stages = placed.layout.stages
    spent = [group_cost(group, exchange) for group, exchange in zip(stages, placed.weights.exchange, strict=True)]
    for stage, seconds in enumerate(spent):
        count = None if placed.network.model is None else placed.blocks[0][stage]
        blocks = "" if count is None else f"\n{count} block{'s' if count > 1 else ''}"
        axes.text(stage, -1.2, f"stage {stage}{blocks}", ha="center", va="top", fontsize=9.5, fontweight="bold")
        if placed.num_pipelines > 1:
            colour = SLOW if seconds == max(spent) > 1.01 * min(spent) else "black"
            axes.text(stage, -0.62, shown_seconds(seconds), ha="center", va="center", fontsize=8, color=colour)
    if placed.num_pipelines > 1 or len(stages) > 1:
        axes.text(-0.42, -0.62, "average / pass on", ha="right", va="center", fontsize=7.5, style="italic")
