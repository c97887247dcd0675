"""Reports a placement as text, and as an SVG picture of the mesh: a box for each device, coloured by host, and the
times of its links."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from lightning_sdpipe.errors import counted, shape
from lightning_sdpipe.placement.planner import Communication, PlacementResult

WIDTH, HEIGHT = 150, 44
"""Distances between stages and between pipelines in the picture, boxes included."""

LEFT, TOP = 130, 140
"""Centre of the first device's box."""

SLOW = "#c1121f"


def _largest(rows: Sequence[Sequence[float]]) -> tuple[int, int]:
    """Return the row and column of the largest number; of equals, the first."""
    top = max(map(max, rows))
    return next((number, list(row).index(top)) for number, row in enumerate(rows) if top in row)


def rates(tried: Sequence[PlacementResult]) -> str:
    """Return a row for each shape that was tried."""
    rows = [("stages × pipelines", "mini-batches/s")]
    rows += [(placed.shape, f"{placed.rate:.3g}") for placed in tried]
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"{shape:<{width}}  {speed:>14}" for shape, speed in rows)


def given(placed: PlacementResult) -> str:
    """Return the strategy's arguments that go with the placement's file."""
    deepest = max(placed.layout.depths)
    micro_batches = f", num_micro_batches={placed.micro_batches}" if placed.micro_batches != deepest else ""
    cut = ', partition="placed"' if deepest > 1 and placed.network.model is not None else ""
    return f"num_stages={placed.num_stages}{micro_batches}{cut}"


def report(placed: PlacementResult) -> str:
    """Return the report: a row for each pipeline, the costs and where they arise, and the cost of rank 0's rule."""
    names = [str(device) for device in placed.network.devices]
    used = len(names) - len(placed.left_out)
    devices = f"{used} of {len(names)}" if placed.left_out or not placed.layout.alike else str(used)
    mesh = f"pipelines of {', '.join(map(str, placed.layout.depths))} stages"
    if placed.layout.alike:
        mesh = shape(placed.layout.depths[0], placed.num_pipelines)
    cost = f"cost model {placed.job.cost}" + (
        f", {counted(placed.micro_batches, 'micro-batch')}" if placed.job.cost == "pipelined" else ""
    )
    lines = [f"{devices} devices as {mesh}; {cost}", "", *_table(placed, names), "", *_costs(placed, names)]
    found = placed.found
    end = "" if found.complete else ": cut short, so a longer --for, or another machine, may find a better one"
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
    if (links := placed.communication) is not None:
        rows = placed.layout.rows
        gain = f"default order: {shown_seconds(links.default)}, {_times(links.default, links.total)}"
        if math.isinf(links.default):
            gain = "the default order and uniform cut are impossible"
        lines.append(f"Communication  {shown_seconds(links.total)} for a mini-batch of every pipeline ({gain})")
        if placed.num_pipelines > 1:
            row, stage = _largest(links.averaging)
            data, device = shown_seconds(links.data), names[rows[row][stage]]
            lines.append(f"  data         {data}: stage {stage} takes longest to average, {device} most of all")
        if len(rows[0]) > 1:
            row, stage = _largest(links.links)
            ends, passing = " – ".join(names[d] for d in rows[row][stage : stage + 2]), shown_seconds(links.pipeline)
            lines.append(f"  pipeline     {passing}: the slowest link is {ends}, stage {stage} to {stage + 1}")
    if placed.job.computes:
        gain = f"default order and uniform cut: {shown_seconds(placed.default_seconds)}, "
        gain += _times(placed.default_seconds, placed.seconds)
        if math.isinf(placed.default_seconds):
            gain = "the default order and uniform cut do not fit into the devices"
        lines.append(f"A mini-batch   {shown_seconds(placed.seconds)} with computing ({gain})")
        lines.append(f"Together       {placed.rate:.3g} mini-batches/s")
    if placed.drawn is not None:
        lines.append(
            f"SDPipe's groups have {placed.drawn.members:.1f} members and take {shown_seconds(placed.drawn.seconds)}; "
            f"pipelines run at {placed.drawn.efficiency:.2f} of the speed that they would have alone"
        )
    return lines


def _rank_zero(placed: PlacementResult, names: Sequence[str]) -> str:
    text = f"Rank 0         {names[placed.first]} must be rank 0 and runs a last stage, "
    if placed.price <= 1e-9 * placed.seconds:
        return text + "which costs nothing"
    text += f"which costs {shown_seconds(placed.price)}"
    if not placed.free_hosts:
        return text
    hosts = " or ".join(placed.free_hosts[:3])
    return (
        f"{text}; start the run with host {hosts} first, and place with --first {placed.free_hosts[0]}:0, to avoid that"
    )


def shown_seconds(seconds: float) -> str:
    """Format a duration with its unit."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.3g} µs"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def _times(default: float, placed: float) -> str:
    return f"{default / placed:.2f} times as long" if placed else "which costs nothing either"


def draw_picture(placed: PlacementResult, path: Path) -> None:
    """Write the picture of pipelines that have one cut to ``path``, as SVG.

    Every row is a pipeline, in which activations travel to the right and gradients back; every column is a stage, whose
    devices average. The more a link between stages costs, the redder it is; above each cut is the time of the slowest.
    """
    links = placed.communication
    assert links is not None
    width = LEFT + WIDTH * max(4, len(placed.layout.stages))
    height = TOP + HEIGHT * placed.num_pipelines
    size = f'width="{width}" height="{height}" font-family="sans-serif" font-size="12" text-anchor="middle"'
    shapes = (*_title(links), *_links(links), *_devices(placed), *_stages(placed, links))
    picture = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', '<rect width="100%" height="100%" fill="white"/>']
    path.write_text("\n".join([*picture, *shapes, "</svg>\n"]), encoding="utf-8")


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{more}>{escape(text)}</text>'


def _title(links: Communication) -> Iterator[str]:
    compared = links.default not in (links.total, math.inf)
    gain = f" (default order: {shown_seconds(links.default)})" if compared else ""
    lines = (
        f"{shown_seconds(links.total)} of communication for a mini-batch of every pipeline{gain}:",
        f"{shown_seconds(links.data)} to average the replicas of a stage (columns),",
        f"{shown_seconds(links.pipeline)} to pass activations and gradients on (rows)",
    )
    yield from (_text(10, 20 + 18 * number, line, ' text-anchor="start"') for number, line in enumerate(lines))


def _links(links: Communication) -> Iterator[str]:
    slowest = [max(cut) for cut in zip(*links.links, strict=True)]
    for row, costs in enumerate(links.links):
        for stage, cost in enumerate(costs):
            x, y, share = LEFT + WIDTH * stage, TOP + HEIGHT * row, cost / (max(slowest) or 1.0)
            yield (
                f'<line x1="{x + 50}" x2="{x + WIDTH - 50}" y1="{y}" y2="{y}" stroke-width="3" '
                f'stroke="hsl(0 {80 * share:.0f}% {70 - 30 * share:.0f}%)"><title>{shown_seconds(cost)}</title></line>'
            )
    for stage, seconds in enumerate(slowest):
        yield _text(LEFT + WIDTH * (stage + 0.5), TOP - 30, shown_seconds(seconds))


def _devices(placed: PlacementResult) -> Iterator[str]:
    hosts = list(dict.fromkeys(device.host for device in placed.network.devices))
    for row, devices in enumerate(placed.layout.rows):
        y = TOP + HEIGHT * row
        yield _text(LEFT - 58, y + 4, f"pipeline {row}", ' text-anchor="end" font-size="10"')
        for stage, device in enumerate(placed.network.devices[number] for number in devices):
            x, hue = LEFT + WIDTH * stage, 360 * hosts.index(device.host) // len(hosts)
            box = f'<rect x="{x - 50}" y="{y - 15}" width="100" height="30" rx="5" fill="hsl({hue} 60% 80%)"/>'
            yield box + _text(x, y + 4, str(device), ' textLength="94"' if len(str(device)) > 14 else "")


def _stages(placed: PlacementResult, links: Communication) -> Iterator[str]:
    spent = [max(stage) for stage in zip(*links.averaging, strict=True)]
    for stage, seconds in enumerate(spent):
        count, x = placed.blocks[0][stage], LEFT + WIDTH * stage
        blocks = "" if placed.network.model is None else f", {count} block{'s' * (count > 1)}"
        yield _text(x, TOP - 50, f"stage {stage}{blocks}", ' font-weight="bold"')
        if placed.num_pipelines > 1:
            colour = SLOW if seconds == max(spent) > 1.01 * min(spent) else "black"
            yield _text(x, TOP - 30, shown_seconds(seconds), f' fill="{colour}"')
