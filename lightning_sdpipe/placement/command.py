"""``sdpipe place NETWORK``: searches for a placement, explains it, and writes it to a file.

Without ``--stages``, it compares the best rectangle with pipelines of different depths and cuts.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from lightning_sdpipe.command_line import Parser, check_writable, depths_of, seconds
from lightning_sdpipe.errors import ConfigurationError, check_integer, check_number
from lightning_sdpipe.placement.cost import CostModel
from lightning_sdpipe.placement.model import Block, even_stages
from lightning_sdpipe.placement.network import Network, read_network
from lightning_sdpipe.placement.planner import PlacementResult, PlacementTask, place, place_freely
from lightning_sdpipe.placement.report import draw_picture, given, rates, report
from lightning_sdpipe.placement.search import MOVES
from lightning_sdpipe.topology.placement_file import write_placement

GAIN = 1.03
"""Least ratio of rates at which different depths are proposed over the best rectangle, or devices are left out."""


def main(arguments: Sequence[str]) -> None:
    """Print the report, and write the files that are asked for."""
    options = _parser().parse_args(arguments)
    _check(options)
    network = read_network(options.network)
    print(f"searching for {len(network.devices)} devices; --for SECONDS makes it shorter", file=sys.stderr, flush=True)
    placed, instead = _placed(network, options)
    print(report(placed), *instead, sep="\n")
    if options.output is not None:
        write_placement(options.output, placed.placement(f"{options.network}: {network.source}"))
        print(f'\n{options.output}: for SDPipeStrategy({given(placed)}, placement="{options.output}")')
    if options.picture is not None and placed.layout.alike:
        draw_picture(placed, options.picture)
        print(f"{options.picture}: the mesh and its slowest links")
    elif options.picture is not None:
        print(f"{options.picture}: not drawn, because its columns are stages, and these pipelines have different ones")


def _parser() -> Parser:
    parser = Parser(
        "place", "Decides which device runs which stage of which pipeline, so that slow links matter least."
    )
    add = parser.add_argument
    add("network", type=Path, help="the file of `sdpipe measure`, or one written by hand")
    add("--stages", type=depths_of, help="stages of a pipeline, or of each, like 1,2,2 (default: what is fastest)")
    add(
        "--cost",
        choices=get_args(CostModel),
        default="pipelined",
        help="how transfers between stages add up (docs/placement.md)",
    )
    add("--micro-batches", type=int, help="of a mini-batch (default: the number of stages)")
    add("--sync", choices=("groups", "all_reduce"), default="groups", help="average in groups or all together")
    add("--stage-bytes", type=float, metavar="BYTES", help="a stage's parameters, if the file has no model")
    add("--cut-bytes", type=float, metavar="BYTES", help="a mini-batch's activations at a cut, likewise")
    add("--optimizer-state", type=float, default=2.0, metavar="RATIO", help="bytes of state per byte of parameters")
    add("--first", metavar="HOST:INDEX", help="the device that will be rank 0 (default: the first of the file)")
    add("--moves", type=int, default=MOVES, metavar="N", help="length of the search; some 10 s for 64 devices")
    add("--for", dest="seconds", type=seconds, default=math.inf, help="limit of the search (default: none)")
    add("--seed", type=int, default=0, help="the same seed finds the same placement")
    add("-o", "--output", type=Path, metavar="FILE", help="write it, for SDPipeStrategy(placement=…)")
    add("--picture", type=Path, metavar="FILE", help="draw the placement, as SVG")
    return parser


def _placed(network: Network, options: argparse.Namespace) -> tuple[PlacementResult, list[str]]:
    """Return the proposed placement, and the alternatives in words."""
    if options.stages is not None:
        (alone, *others) = options.stages
        asked = _asked(network, options, options.stages if others else alone)
        return place(network, asked, None if others else _stages(options, alone)), []
    if network.model is None or options.stage_bytes is not None:
        raise ConfigurationError("Without a measured model, --stages has to say how many stages there are.")
    tried, refusals = place_freely(network, _asked(network, options, 1))
    print(rates(tried), *refusals, "", sep="\n")
    best: PlacementResult | None = None
    for placed in sorted(tried, key=lambda placed: (not placed.layout.alike, len(placed.left_out))):
        best = placed if best is None or placed.rate >= GAIN * best.rate or _as_simple(placed, best) else best
    assert best is not None
    others = [placed for placed in tried if placed.layout.alike != best.layout.alike]
    if not others:
        return best, []
    other = max(others, key=lambda placed: placed.rate)
    if best.layout.alike:
        gain = other.rate / best.rate
        return best, [
            f"Unlike depths  {other.shape} would make {gain:.2f} times as many mini-batches, too few to be proposed"
        ]
    gain = best.rate / other.rate
    return best, [f"Best rectangle {other.rate:.3g} mini-batches/s, {other.shape}: this is {gain:.2f} times that"]


def _as_simple(placed: PlacementResult, best: PlacementResult) -> bool:
    """Return whether ``placed`` is faster than ``best`` and as simple: it leaves no devices out, and both or neither
    have one cut for all pipelines."""
    return placed.rate > best.rate and placed.layout.alike == best.layout.alike and not placed.left_out


def _asked(network: Network, options: argparse.Namespace, stages: int | tuple[int, ...]) -> PlacementTask:
    names = [str(device) for device in network.devices]
    if options.first is not None and options.first not in names:
        raise ConfigurationError(f"--first {options.first} is none of the devices: {', '.join(names)}.")
    return PlacementTask(
        stages,
        options.cost,
        options.micro_batches,
        options.sync,
        None if options.first is None else names.index(options.first),
        options.optimizer_state,
        options.moves,
        options.seed,
        options.seconds,
    )


def _stages(options: argparse.Namespace, stages: int) -> tuple[Block, ...] | None:
    given = (options.stage_bytes is not None, options.cut_bytes is not None)
    if any(given) and not all(given) and stages > 1:
        raise ConfigurationError(
            "--stage-bytes and --cut-bytes go together: what a stage averages, and what a cut carries."
        )
    amounts = options.stage_bytes or 0.0, options.cut_bytes or 0.0
    for name, amount in zip(("--stage-bytes", "--cut-bytes"), amounts, strict=True):
        check_number(name, amount, "a number, finite and at least 0", least=0, below=math.inf)
    return even_stages(stages, *amounts) if any(given) else None


def _check(options: argparse.Namespace) -> None:
    """Refuse wrong options that would show only after the search, or not at all."""
    check_number("--for", options.seconds, "seconds above 0", above=0)
    check_integer("--moves", options.moves, 0, "moves")
    check_integer("--micro-batches", options.micro_batches, 1, "of a mini-batch", optional=True)
    check_number("--optimizer-state", options.optimizer_state, "a finite number from 0", least=0, below=math.inf)
    for file in (options.output, options.picture):
        if file is not None:
            check_writable(file)
    if options.picture is not None and options.picture.suffix != ".svg":
        raise ConfigurationError(f"--picture {options.picture} must end in .svg.")
