"""``python -m lightning_sdpipe.partition IMPORT.PATH:factory``: the chain of a model and where it would be
cut."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.plan import Balanced, Partition, Profile, plan
from lightning_sdpipe.partition.profile import profile
from lightning_sdpipe.partition.report import table


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; the exit status is 2 when the model cannot be cut as asked."""
    options = _parser().parse_args(arguments)
    try:
        print(_report(options))
    except ConfigurationError as error:
        print(f"sdpipe partition: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sdpipe partition",
        description="Shows the chain of blocks of a model, and where it would be cut into stages.",
    )
    parser.add_argument(
        "factory",
        metavar="IMPORT.PATH:NAME",
        help="a function without arguments that returns a LightningModule, or a LightningModule and a "
        "micro-batch; times are measured if there is a batch",
    )
    parser.add_argument("--stages", type=int, default=2, help="M (default: %(default)s)")
    parser.add_argument(
        "--partition",
        default="uniform",
        help="uniform, parameters, balanced, or numbers of blocks like 3,2,4 (default: %(default)s)",
    )
    parser.add_argument("--blocks", nargs="+", metavar="PATH", help="name the blocks; * stands for one part of a path")
    parser.add_argument(
        "--speeds", type=_numbers, help="relative speed of each stage's device, like 1,1,0.5 (balanced)"
    )
    parser.add_argument(
        "--bandwidth", type=float, default=1e9, help="bytes per second (balanced; default: %(default)s)"
    )
    parser.add_argument("--each-block", action="store_true", help="a row for every block, not for every stage")
    return parser


def _report(options: argparse.Namespace) -> str:
    module, batch = build(options.factory)
    measured: list[Profile] = []

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

    chosen = plan(module, options.stages, _partition(options), options.blocks, measure)
    if batch is not None and not measured:
        measure(chosen.blocks)
    return table(module, chosen, measured[0] if measured else None, options.each_block)


def build(path: str) -> tuple[nn.Module, Any]:
    """What the function at ``IMPORT.PATH:NAME`` makes: a module, and a batch or None.

    Raises:
        ConfigurationError: it cannot be imported, or makes something else.
    """
    module_path, _, name = path.partition(":")
    try:
        factory: Any = getattr(import_module(module_path), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"{path!r} cannot be imported: {error}. Give IMPORT.PATH:NAME.") from error
    built = factory()
    module, batch = built if isinstance(built, tuple) else (built, None)
    if not isinstance(module, nn.Module):
        raise ConfigurationError(f"{path} returned a {type(module).__name__}. It must return a module.")
    return module, batch


def _partition(options: argparse.Namespace) -> Partition:
    if options.partition == "balanced":
        return Balanced(options.speeds, options.bandwidth)
    if options.partition[:1].isdigit():
        return [int(size) for size in _numbers(options.partition)]
    name: Partition = options.partition
    return name


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
