"""``python -m lightning_sdpipe.partition IMPORT.PATH:factory``: the chain of a model and where it would be cut."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition import factory
from lightning_sdpipe.partition.plan import Profile, plan, with_crossing
from lightning_sdpipe.partition.profile import profile
from lightning_sdpipe.partition.rehearsed import Rehearsed
from lightning_sdpipe.partition.report import table


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; the exit status is 2 when the model cannot be cut as asked."""
    parser = factory.parser("partition", "Shows the chain of blocks of a model, and where it would be cut into stages.")
    parser.add_argument("--each-block", action="store_true", help="a row for every block, not for every stage")
    options = parser.parse_args(arguments)
    try:
        print(_report(options))
    except ConfigurationError as error:
        print(f"sdpipe partition: {error}", file=sys.stderr)
        return 2
    return 0


def _report(options: argparse.Namespace) -> str:
    module, batch = factory.build(options.factory)
    measured: list[Profile] = []
    rehearsals: list[Rehearsed] = []

    def measure(blocks: Sequence[tuple[str, ...]]) -> Profile:
        if batch is None:
            raise ConfigurationError(
                f"{options.factory} returned no batch to measure with. Let it return (module, batch)."
            )
        step: Any = getattr(module, "training_step", None)
        if step is None:
            raise ConfigurationError(f"{type(module).__name__} has no training_step to measure.")
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        measured.append(profile(module, blocks, lambda: step(batch, 0), device))
        return measured[0]

    def rehearse(chain: Sequence[str]) -> Rehearsed | None:
        if batch is None:
            return None
        rehearsals.append(factory.rehearse(module, chain, [batch]))
        return rehearsals[-1]

    chosen = plan(module, options.stages, factory.partition(options), options.blocks, measure, rehearse)
    if batch is None:
        return table(module, chosen, None, options.each_block)
    if not measured:
        measure(chosen.blocks)
    rehearsed = rehearsals[-1] if rehearsals else None
    return table(module, chosen, with_crossing(measured[0], chosen.blocks, rehearsed), options.each_block)


if __name__ == "__main__":
    sys.exit(main())
