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
from lightning_sdpipe.placement.ragged import RaggedResult

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


def rate(placed: PlacementResult | RaggedResult) -> float:
    """Return the mini-batches per second of all pipelines."""
    if isinstance(placed, RaggedResult):
        return placed.rate
    return placed.num_pipelines / placed.seconds if placed.seconds else math.inf


def shape(placed: PlacementResult | RaggedResult) -> str:
    """Return stages × pipelines, or the stages of each pipeline, and how many devices are left out."""
    if isinstance(placed, PlacementResult):
        return f"{placed.asked.num_stages} × {placed.num_pipelines}"
    return placed.shape + (f" without {len(placed.left_out)}" if placed.left_out else "")


def rates(tried: Sequence[PlacementResult | RaggedResult]) -> str:
    """Return a row for each number of stages that was tried."""
    rows = [("stages × pipelines", "mini-batches/s")]
    rows += [(shape(placed), f"{rate(placed):.3g}") for placed in tried]
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"{shape:<{width}}  {speed:>14}" for shape, speed in rows)


def given(placed: PlacementResult | RaggedResult) -> str:
    """Return the strategy's arguments that go with a file."""
    if isinstance(placed, PlacementResult):
        return f"num_stages={placed.asked.num_stages}"
    stages = placed.depths[0] if placed.alike else placed.depths
    return f'num_stages={stages}, num_micro_batches={placed.asked.micro_batches}, partition="placed"'


def report_ragged(placed: RaggedResult) -> list[str]:
    """Report pipelines that may be unlike, which are judged by their rate."""
    network, asked = placed.network, placed.asked
    names = [str(device) for device in network.devices]
    rows = [["pipeline", "blocks", "s/mini-batch", "devices, by stage"]]
    for number, row in enumerate(placed.rows):
        blocks, devices = ", ".join(str(len(span)) for span in row.spans), "  ".join(names[d] for d in row.devices)
        rows.append([str(number), blocks, f"{row.seconds:.3g}", devices])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    used = len(names) - len(placed.left_out)
    lines = [
        f"{used} of {len(names)} devices as pipelines of {', '.join(map(str, placed.depths))} stages; "
        f"{asked.micro_batches} micro-batches",
        "",
        *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
        "",
        f"Together        {placed.rate:.3g} mini-batches/s, {placed.rate / placed.bound:.2f} of the bound that no "
        "pipelines of these devices exceed" + ("" if placed.exact else "; more --seconds may find better ones"),
    ]
    if placed.left_out:
        lines.append(f"Left out        {', '.join(names[device] for device in placed.left_out)}")
    price = f"{placed.price:.3g} mini-batches/s" if placed.price > 1e-9 * placed.rate else "nothing"
    lines.append(f"Rank 0          {names[asked.first]} must be rank 0 and runs a last stage, which costs {price}")
    sync = 'sync="all_reduce", ' if asked.sync == "all_reduce" else ""
    cuts = placed.blocks[0] if placed.alike else placed.blocks
    stages = placed.depths[0] if placed.alike else placed.depths
    lines.append(
        f"Without a file  SDPipeStrategy(num_stages={stages}, {sync}num_micro_batches={asked.micro_batches}, "
        f"partition={cuts}), the ranks in the order of the rows, each row from its end"
    )
    return lines


def report(placed: PlacementResult) -> str:
    """Return a row for each pipeline, the costs by place, how good they are, and the cost of rank 0's rule."""
    network, asked = placed.network, placed.asked
    names = [str(device) for device in network.devices]
    count = len(names)
    lines = [
        f"{count} devices as {asked.num_stages} stages × {placed.num_pipelines} pipelines; cost model {asked.cost}"
        + (f", {asked.micro_batches} micro-batches" if asked.cost == "pipelined" else ""),
        "",
        *_table(["pipeline", *(f"stage {stage}" for stage in range(asked.num_stages))], placed, names),
        "",
        *_costs(placed, names),
        "",
        _rank_zero(placed, names),
    ]
    missing = network.unconnected()
    if missing:
        pairs = ", ".join(f"{a} – {b}" for a, b in missing[:5]) + (", …" if len(missing) > 5 else "")
        lines += [
            "",
            f"No connection  {pairs}: not used between stages or replicas. Training still connects every pair.",
        ]
    return "\n".join(lines)


def _table(heading: list[str], placed: PlacementResult, names: Sequence[str]) -> list[str]:
    rows = [[str(number), *(names[device] for device in row)] for number, row in enumerate(placed.rows)]
    if placed.spans is not None:
        rows.append(["blocks", *(str(len(span)) for span in placed.spans)])
    widths = [max(len(row[column]) for row in (heading, *rows)) for column in range(len(heading))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (heading, *rows)
    ]


def _costs(placed: PlacementResult, names: Sequence[str]) -> list[str]:
    cost, default, lines = placed.cost, placed.default_cost.total, []
    gain = f" (default order: {shown_seconds(default)}, {_times(default, cost.total)})"
    lines.append(f"Communication  {shown_seconds(cost.total)} for a mini-batch of every pipeline{gain}")
    if placed.num_pipelines > 1:
        stage, device = slowest_stage(placed.stages, placed.weights)
        data = shown_seconds(cost.data)
        lines.append(f"  data         {data}: stage {stage} takes longest to average, {names[device]} most of all")
    if placed.asked.num_stages > 1:
        links = slowest_links(placed.stages, placed.weights)
        worst = max(links, key=lambda cut: _link(cut, placed.weights))
        lines.append(
            f"  pipeline     {shown_seconds(cost.pipeline)}: the slowest link is {names[worst.above]} – "
            f"{names[worst.below]}, stage {worst.stage} to {worst.stage + 1}"
        )
    found = placed.found
    if found is not None:
        verdict = "optimal: proved that no placement costs less" if found.optimal else (
            f"no placement costs less than {shown_seconds(found.bound)}; "
            + ("the search was complete" if found.complete else "more --seconds may find a better one")
        )  # fmt: skip
        lines.append(f"  how good     {verdict}")
    if placed.seconds is not None and placed.default_seconds is not None:
        gain = f"{shown_seconds(placed.default_seconds)}, {_times(placed.default_seconds, placed.seconds)}"
        if math.isinf(placed.default_seconds):
            gain = "does not fit into the devices"
        lines.append(f"A mini-batch   {shown_seconds(placed.seconds)} with computing (default order: {gain})")
    if placed.drawn is not None:
        sizes = [len(group) for group in placed.drawn.groups]
        lines.append(
            f"SDPipe's groups have {sum(sizes) / len(sizes):.1f} members and take "
            f"{shown_seconds(placed.drawn.seconds)}; pipelines run at {placed.drawn.efficiency:.2f} of the speed that "
            "they would have alone"
        )
    return lines


def _rank_zero(placed: PlacementResult, names: Sequence[str]) -> str:
    first, price = names[placed.asked.first], placed.price
    text = f"Rank 0         {first} must be rank 0 and runs a last stage, "
    if price <= 1e-9 * placed.cost.total:
        return text + "which costs nothing"
    hosts = " or ".join(placed.free_hosts[:3])
    remedy = f"; start the run with host {hosts} first, and place with --first {placed.free_hosts[0]}:0, to avoid that"
    return text + f"which costs {shown_seconds(price)}" + (remedy if placed.free_hosts else "")


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


def _stages(axes: Any, placed: PlacementResult) -> None:
    spent = _averaging(placed)
    for stage, seconds in enumerate(spent):
        count = None if placed.spans is None else len(placed.spans[stage])
        blocks = "" if count is None else f"\n{count} block{'s' if count > 1 else ''}"
        axes.text(stage, -1.2, f"stage {stage}{blocks}", ha="center", va="top", fontsize=9.5, fontweight="bold")
        if placed.num_pipelines > 1:
            colour = SLOW if seconds == max(spent) > 1.01 * min(spent) else "black"
            axes.text(stage, -0.62, shown_seconds(seconds), ha="center", va="center", fontsize=8, color=colour)
    if placed.num_pipelines > 1 or len(placed.stages) > 1:
        axes.text(-0.42, -0.62, "average / pass on", ha="right", va="center", fontsize=7.5, style="italic")
