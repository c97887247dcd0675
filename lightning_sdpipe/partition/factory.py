"""What the commands that look at a user's model have in common: building it, and saying how it is to be cut."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition import rehearsal
from lightning_sdpipe.partition.pipeline_cut import Balanced, Partition
from lightning_sdpipe.partition.rehearsal import StepCalls
from lightning_sdpipe.partition.rehearsal_result import RehearsalResult

_CPU = torch.device("cpu")


def parser(command: str, description: str) -> argparse.ArgumentParser:
    """With the arguments that all of these commands take."""
    parser = argparse.ArgumentParser(prog=f"sdpipe {command}", description=description)
    parser.add_argument(
        "factory",
        metavar="IMPORT.PATH:NAME",
        help="a function without arguments that returns a LightningModule, or a LightningModule and a micro-batch",
    )
    parser.add_argument("--stages", type=int, default=2, help="M (default: %(default)s)")
    parser.add_argument(
        "--partition",
        default="uniform",
        help="uniform, parameters, balanced, or numbers of blocks like 3,2,4 (default: %(default)s)",
    )
    parser.add_argument("--blocks", nargs="+", metavar="PATH", help="name the blocks; * stands for one part of a path")
    parser.add_argument("--speeds", type=numbers, help="relative speed of each stage's device, like 1,1,0.5 (balanced)")
    parser.add_argument(
        "--bandwidth", type=float, default=1e9, help="bytes per second (balanced; default: %(default)s)"
    )
    return parser


def numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def partition(options: argparse.Namespace) -> Partition:
    """What ``--partition`` and what goes with it say."""
    if options.partition == "balanced":
        return Balanced(options.speeds, options.bandwidth)
    if options.partition[:1].isdigit():
        return [int(size) for size in numbers(options.partition)]
    name: Partition = options.partition
    return name


def build(path: str) -> tuple[nn.Module, Any]:
    """The module and the batch that a factory returns, None if it returns none.

    Raises:
        ConfigurationError: there is no such factory, or it returns something else.
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


def rehearse(module: nn.Module, chain: Sequence[str], batches: Sequence[Any]) -> RehearsalResult:
    """A rehearsal of ``training_step`` on two batches, or on one twice.

    Raises:
        Exception: what the step raised.
    """
    calls = [(batch, (0,)) for batch in (batches[0], batches[-1])]
    return rehearsal.rehearse(module, chain, [StepCalls("training_step", calls, trains=True)], _CPU)
