"""What commands that look at a user's model share: options that say how to cut it, and building it."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import nn

from lightning_sdpipe.command_line import Parser, depths_of, speeds_of
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition import rehearsal
from lightning_sdpipe.partition.apart import apart
from lightning_sdpipe.partition.costs import Costs, rates_of
from lightning_sdpipe.partition.pipeline_cut import Balanced, PipelineCut, cuts_of, in_flight, refuse_lists
from lightning_sdpipe.partition.plan import Plan
from lightning_sdpipe.partition.rehearsal import StepCalls
from lightning_sdpipe.partition.rehearsal_result import RehearsalResult

_T = TypeVar("_T")
_CPU = torch.device("cpu")
_PATIENCE = 86400.0  # seconds that a child may take


def parser(command: str, description: str) -> Parser:
    """Return a parser with the arguments that all these commands take."""
    parser = Parser(command, description)
    parser.add_argument(
        "factory",
        metavar="IMPORT.PATH:NAME",
        help="a function without arguments that returns a LightningModule, or a LightningModule and a micro-batch",
    )
    parser.add_argument(
        "--stages", type=depths_of, default="2", help="number of stages of a pipeline, or of each pipeline, like 1,2,2"
    )
    parser.add_argument(
        "--partition",
        default="auto",
        help="auto, uniform, parameters, balanced, or the number of blocks of each stage, like 3,2,4 (9/4,5/5,4 for "
        "three pipelines)",
    )
    parser.add_argument(
        "--blocks", nargs="+", metavar="PATH", help="paths of the blocks; * stands for one part of a path"
    )
    parser.add_argument(
        "--speeds",
        type=speeds_of,
        help="with balanced: relative speed of each stage's device, like 1,0.5 (1/1,0.5/1,0.5 for three pipelines)",
    )
    parser.add_argument(
        "--bandwidth", type=float, default="1e9", help="with balanced: bandwidth between stages, in bytes per second"
    )
    return parser


def cuts(options: argparse.Namespace) -> list[PipelineCut]:
    """Return how to cut each pipeline; one cut if one number of stages was given.

    Raises:
        ConfigurationError: the options do not fit together.
    """
    depths: Sequence[int] = options.stages
    wanted = _partition(options)
    if len(depths) > 1:
        return cuts_of(depths, wanted, lambda depth: in_flight("1f1b", depth, max(depths)))
    refuse_lists(wanted)
    return [PipelineCut(depths[0], wanted)]


def _partition(options: argparse.Namespace) -> Any:
    """Return the partition that ``--partition``, ``--speeds`` and ``--bandwidth`` ask for."""
    given: str = options.partition
    if given == "balanced":
        return Balanced(options.speeds, options.bandwidth)
    if not given[:1].isdigit():
        return given
    try:
        rows = [[int(size) for size in row.split(",")] for row in given.split("/")]
    except ValueError as error:
        raise ConfigurationError(
            f"--partition {given} is not known. Give auto, uniform, parameters, balanced, or numbers of blocks like "
            "3,2,4."
        ) from error
    return rows if len(rows) > 1 else rows[0]


def by_cut(plans: Sequence[Plan]) -> list[tuple[str, Plan]]:
    """Return each distinct cut with a heading that names its pipelines; the heading is empty if there is one plan."""
    pipelines: dict[tuple[range, ...], list[int]] = {}
    for number, plan in enumerate(plans):
        pipelines.setdefault(plan.spans, []).append(number)
    if len(plans) == 1:
        return [("", plans[0])]
    return [
        (f"Pipeline{'s' if len(those) > 1 else ''} {', '.join(map(str, those))}: ", plans[those[0]])
        for those in pipelines.values()
    ]


def build(path: str) -> tuple[nn.Module, Any]:
    """Return the module and the batch that a factory makes; the batch is None if it makes none.

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
    if isinstance(module, LightningModule):
        _give_trainer(module)
    return module, batch


def step_of(path: str, module: nn.Module, batch: Any) -> Callable[..., Any]:
    """Return the training step of the ``module`` that the factory ``path`` made.

    Raises:
        ConfigurationError: the module has none, or the factory made no batch.
    """
    step: Callable[..., Any] | None = getattr(module, "training_step", None)
    if step is None or batch is None:
        lacks = "no batch" if batch is None else f"a {type(module).__name__} without a training_step"
        raise ConfigurationError(f"{path} returned {lacks}. Let it return (module, batch).")
    return step


def _give_trainer(module: LightningModule) -> None:
    """Give a module what its step may look at in a run: a Trainer that is fitting it, and optimizers."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.WARNING)  # the Trainer lists its devices
    try:
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    finally:
        log.setLevel(level)
    strategy: Any = trainer.strategy
    strategy.connect(module)
    strategy.optimizers, strategy.lr_scheduler_configs = rehearsal.stand_in_optimizers()
    trainer.state.fn, trainer.state.status = TrainerFn.FITTING, TrainerStatus.RUNNING
    trainer.training = True
    module.trainer = trainer


def tried(work: Callable[[], _T]) -> _T:
    """Return what ``work`` returns in a child process, which keeps its changes from this one."""
    return apart(work, _PATIENCE)


def rehearse(module: nn.Module, chain: Sequence[str], batches: Sequence[Any]) -> RehearsalResult:
    """Rehearse ``training_step`` on two batches, or on one twice.

    Raises:
        Exception: the exception that the step raised.
    """
    return rehearsal.rehearse(module, chain, [_training_step(batches)], _CPU)


def count(module: nn.Module, batch: Any) -> Costs:
    """Count the costs of ``training_step``, for a CPU.

    Raises:
        Exception: the exception that the step raised.
    """
    return rehearsal.count_apart(module, _training_step([batch]), rates_of(_CPU), tried)


def _training_step(batches: Sequence[Any]) -> StepCalls:
    return StepCalls("training_step", [(batch, (0,)) for batch in (batches[0], batches[-1])], trains=True)
