"""``sdpipe place NETWORK``: searches for a placement, explains it, and writes it to a file.

Without ``--stages`` the best rectangle is compared with pipelines of unlike depths and cuts.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from lightning_sdpipe.errors import ConfigurationError, carried_out
from lightning_sdpipe.placement.cost import CostModel
from lightning_sdpipe.placement.model import StageTraffic
from lightning_sdpipe.placement.network import Network, read_network
from lightning_sdpipe.placement.planner import PlacementResult, PlacementTask, place
from lightning_sdpipe.placement.ragged import RaggedResult, best_rectangle, place_ragged
from lightning_sdpipe.placement.report import draw_picture, given, rate, rates, report, report_ragged, shape
from lightning_sdpipe.topology.mesh import depths_of
from lightning_sdpipe.topology.placement_file import write_placement

GAIN = 1.03
"""Least gain over the best rectangle for which unlike depths are proposed; the same holds for leaving devices out."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; the exit status is 2 when nothing can be placed as asked."""
    options = _parser().parse_args(arguments)
    return carried_out(lambda: _place(options), "sdpipe place")


def _place(options: argparse.Namespace) -> None:
    _check(options)
    network = read_network(options.network)
    placed, instead = _placed(network, options)
    print(*(report_ragged(placed) if isinstance(placed, RaggedResult) else [report(placed)]), *instead, sep="\n")
    if options.output is not None:
        write_placement(options.output, placed.placement(f"{options.network}: {network.source}"))
        print(f"\n{options.output}: for SDPipeStrategy({given(placed)}, placement=…)")
    if options.picture is not None:
        _draw(placed, options.picture)


def _draw(placed: PlacementResult | RaggedResult, path: Path) -> None:
    if isinstance(placed, RaggedResult):
        print(
            f"{path}: not drawn, since a picture has a column for each stage, and these pipelines are no replicas there"
        )
        return
    draw_picture(placed, path)
    print(f"{path}: the mesh and its slowest links")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sdpipe place",
        description="Decides which device runs which stage of which pipeline, so that slow links matter least.",
    )
    add = parser.add_argument
    add("network", type=Path, help="as `sdpipe measure` wrote it, or sites written by hand")
    add(
        "--stages",
        type=depths_of,
        help="M, the stages of a pipeline, or those of each pipeline, like 1,2,2 (default: what trains fastest)",
    )
    add(
        "--cost",
        choices=get_args(CostModel),
        default="pipelined",
        help="how transfers between stages add up: overlapping with a flush, as in DT-FM, or as in PipeDream "
        "(default: %(default)s)",
    )
    add("--micro-batches", type=int, help="of a mini-batch (default: as many as stages)")
    add(
        "--sync",
        choices=("groups", "all_reduce"),
        default="groups",
        help="how pipelines wait for each other (default: %(default)s)",
    )
    add("--stage-bytes", type=float, help="of a stage's parameters, if the network has no model")
    add("--cut-bytes", type=float, help="of a mini-batch's activations between stages, likewise")
    add("--optimizer-state", type=float, default=2.0, help="bytes for each byte of parameters: 2 for Adam")
    add("--first", metavar="HOST:INDEX", help="the device that will be rank 0 (default: the network's first)")
    add("--seconds", type=float, default=10.0, help="to search for (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--output", type=Path, metavar="FILE", help="writes the placement, for SDPipeStrategy")
    add("--picture", type=Path, metavar="FILE", help="draws it; PNG or SVG (needs matplotlib)")
    return parser


def _placed(network: Network, options: argparse.Namespace) -> tuple[PlacementResult | RaggedResult, list[str]]:
    """Return the proposed placement, and the alternatives in words."""
    if options.stages is not None and len(options.stages) > 1:
        if options.cost == "pipedream":
            raise ConfigurationError(
                "--cost pipedream is for a schedule that needs pipelines of one depth and cut. Give one number of "
                "--stages, or another cost."
            )
        return place_ragged(network, _asked(network, options, max(options.stages), options.seconds), options.stages), []
    if options.stages is not None:
        (stages,) = options.stages
        return place(network, _asked(network, options, stages, options.seconds), _traffic(options, stages)), []
    if network.model is None or options.stage_bytes is not None:
        raise ConfigurationError("Without a measured model, --stages has to say how many stages there are.")
    numbers = [m for m in range(1, len(network) + 1) if len(network) % m == 0 and m <= len(network.model.chain)]
    tried: list[PlacementResult] = []
    refusals: list[str] = []
    for stages in numbers:
        try:
            tried.append(place(network, _asked(network, options, stages, options.seconds / len(numbers))))
        except ConfigurationError as error:
            refusals.append(f"{stages} stages: {error}")
    asked = _asked(network, options, 1, options.seconds)
    smaller, ragged = None, None
    if options.cost != "pipedream":
        smaller = best_rectangle(network, asked)
        try:
            ragged = place_ragged(network, asked)
        except ConfigurationError as error:
            refusals.append(f"unlike depths: {error}")
    rectangles: list[PlacementResult | RaggedResult] = [*tried]
    if smaller is not None and smaller.left_out:
        rectangles.append(smaller)
    unlike = [ragged] if ragged is not None and not ragged.alike else []
    print(rates([*rectangles, *unlike]), *refusals, "", sep="\n")
    best: PlacementResult | RaggedResult | None = max(rectangles[: len(tried)], key=rate, default=None)
    for other in rectangles[len(tried) :]:
        best = other if best is None or rate(other) >= GAIN * rate(best) else best
    if unlike:
        return _proposed(best, *unlike)
    if best is None:
        raise ConfigurationError("Nothing that was tried is possible.")
    return best, []


def _proposed(
    rectangle: PlacementResult | RaggedResult | None, ragged: RaggedResult
) -> tuple[PlacementResult | RaggedResult, list[str]]:
    """Return unlike depths if they gain enough over the best rectangle, else the rectangle; and in words what the
    other would give."""
    if rectangle is None:
        return ragged, ["Best rectangle  none fits into these devices"]
    gain = rate(ragged) / rate(rectangle)
    if gain >= GAIN:
        return ragged, [
            f"Best rectangle  {rate(rectangle):.3g} mini-batches/s, {shape(rectangle)}: this is {gain:.2f} times that"
        ]
    return rectangle, [
        f"Unlike depths  {shape(ragged)} would make {gain:.2f} times as many mini-batches, too few to be proposed"
    ]


def _asked(network: Network, options: argparse.Namespace, stages: int, seconds: float) -> PlacementTask:
    names = [str(device) for device in network.devices]
    if options.first is not None and options.first not in names:
        raise ConfigurationError(f"--first {options.first} is none of the devices: {', '.join(names)}.")
    return PlacementTask(
        stages,
        options.cost,
        options.micro_batches,
        options.sync,
        0 if options.first is None else names.index(options.first),
        options.optimizer_state,
        seconds,
        options.seed,
    )


def _traffic(options: argparse.Namespace, stages: int) -> StageTraffic | None:
    given = (options.stage_bytes is not None, options.cut_bytes is not None)
    if any(given) and not all(given) and stages > 1:
        raise ConfigurationError(
            "--stage-bytes and --cut-bytes go together: what a stage averages, and what a cut carries."
        )
    return StageTraffic.even(stages, options.stage_bytes or 0.0, options.cut_bytes or 0.0) if any(given) else None


def _check(options: argparse.Namespace) -> None:
    """Refuse options whose errors would only be noticed after the search, or not at all."""
    if not 0 < options.seconds < math.inf:
        raise ConfigurationError(f"--seconds {options.seconds} must be a number above 0.")
    if options.micro_batches is not None and options.micro_batches < 1:
        raise ConfigurationError(f"--micro-batches {options.micro_batches} must be 1 or more.")
    if not 0 <= options.optimizer_state < math.inf:
        raise ConfigurationError(f"--optimizer-state {options.optimizer_state} must be a number of at least 0.")
    for file in (options.output, options.picture):
        if file is not None and not os.access(file.parent, os.W_OK):
            raise ConfigurationError(f"{file} cannot be written: {file.parent.absolute()} is no such directory.")
    if options.picture is None:
        return
    if options.picture.suffix not in (".png", ".svg"):
        raise ConfigurationError(f"--picture {options.picture} must end in .png or .svg.")
    if find_spec("matplotlib") is None:
        raise ConfigurationError("--picture needs matplotlib; install it: pip install 'lightning-sdpipe[recipes]'")


if __name__ == "__main__":
    sys.exit(main())
