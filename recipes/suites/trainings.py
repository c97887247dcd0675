"""One training of a suite, emulated or with real compute, as a user would run it, in forked processes."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import hydra
import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.heterogeneity import Delays, Heterogeneity, Slowed
from recipes.suites import machine
from recipes.suites.emulated import FEATURES, EmulatedChain, EmulatedRivals, passes
from recipes.suites.grid import Grid, refuse_unknown
from recipes.suites.probe import Probe, Report, read_reports

TRANSFER_TIMEOUT = timedelta(minutes=5)
CALIBRATION_ITERATIONS = 20
NOMINAL_ITERATION_SECONDS = 0.1
"""The length of a mini-batch for which delays are meant; for others, delays are proportional. This is our choice, since
neither the paper nor its published code gives the length of a mini-batch."""


@dataclass(frozen=True)
class Named:
    """A method, a condition or a workload: its name in a suite's configuration, and its specification for Hydra
    (without seeds)."""

    name: str
    specification: Mapping[str, Any]


EMULATED = Named("emulated", {})
UNDELAYED = Named("none", {"_target_": "lightning_sdpipe.heterogeneity.Delays", "probability": 0.0})
ALL_REDUCE = Named("all_reduce", {"_target_": "lightning_sdpipe.AllReduce"})


@dataclass(frozen=True, kw_only=True)
class Training:
    """The parameters that determine a training.

    Args:
        method: method of synchronisation, or an outside reference.
        num_stages: M; a list for pipelines of different depths.
        num_pipelines: N.
        batches: number of batches of all pipelines in an epoch.
        seed: seed of the delays and the weights.
        condition: the heterogeneity that slows workers down.
        workload: the ``model`` and ``data``; by default a model that sleeps instead of computing.
        schedule: schedule of the pipelines.
        num_micro_batches: m.
        warm_up: number of each pipeline's first mini-batches that do not count.
        epochs: number of epochs.
        validation_batches: number of validation batches of all pipelines, after each epoch.
        data: as for the strategy; ``"by_speed"`` for ``batch_by_speed``.
        exchange: specification for Hydra; None for full precision without overlap.
        partition: as for the strategy.
        pace: factor of the computation time of each worker's device, or one factor for each rank.
        scale: multiplies emulated times and delays.
        num_blocks: number of blocks of an emulated model; None for one for each stage.
        block_seconds: seconds of one micro-batch on a block, forward and backward, without delays.
        block_parameters: parameters of a block.
        features: features of a sample of an emulated model.
        by_hand: whether the halves of an emulated model have an optimizer each, which the training step steps.
    """

    method: Named
    num_stages: int | Sequence[int]
    num_pipelines: int
    batches: int
    seed: int
    condition: Named = UNDELAYED
    workload: Named = EMULATED
    schedule: str = "1f1b"
    num_micro_batches: int = 1
    warm_up: int = 0
    epochs: int = 1
    validation_batches: int = 0
    data: str = "sharded"  # equally many iterations of each pipeline, so that all methods meet the same delays
    exchange: Mapping[str, Any] | None = None
    partition: Any = "uniform"
    pace: float | Sequence[float] | None = None
    scale: float = 1.0
    num_blocks: int | None = None
    block_seconds: float = 0.0
    block_parameters: int = 1024
    features: int = FEATURES
    by_hand: bool = False

    @property
    def shape(self) -> str:
        """M × N, or the depths, as in the keys of ratios."""
        if isinstance(self.num_stages, int):
            return f"{self.num_stages}x{self.num_pipelines}"
        return "+".join(map(str, self.num_stages))

    @property
    def workers(self) -> int:
        """The number of workers of all pipelines."""
        return self.num_stages * self.num_pipelines if isinstance(self.num_stages, int) else sum(self.num_stages)

    @property
    def iterations(self) -> int:
        """Mini-batches of each pipeline in an epoch."""
        return self.batches // self.num_pipelines

    @property
    def slowness(self) -> Heterogeneity:
        """The condition with its delays multiplied by the scale; speeds are relative and need not be."""
        built: Heterogeneity = seeded(self.condition.specification, self.seed)
        if isinstance(built, Delays):
            built = replace(built, scale=built.scale * self.scale)
        return built if self.pace is None else Slowed(built, self.pace)

    def emulated(self) -> tuple[L.LightningModule, list[DataLoader[Any]]]:
        """Make an emulated model and its data."""
        parts = 1 if self.schedule == "pipedream" else self.num_micro_batches  # it does not split
        seconds = self.block_seconds * self.scale * self.num_micro_batches / parts
        torch.manual_seed(self.seed)
        count = self.num_blocks or self.num_stages
        assert isinstance(count, int)
        module = (EmulatedRivals if self.by_hand else EmulatedChain)(count, *passes(seconds), self.block_parameters)
        sizes = [self.batches, self.validation_batches] if self.validation_batches else [self.batches]
        return module, [random_features(size, self.num_micro_batches, self.features) for size in sizes]

    def real(self) -> tuple[L.LightningModule, list[DataLoader[Any]]]:
        """Make the workload's module and a loader with at least ``batches`` batches in one epoch: the data, repeated
        and shuffled, so that no end of an epoch is a barrier for all pipelines. The seed is for the weights and the
        order."""
        L.seed_everything(self.seed, verbose=False)
        module, data = (hydra.utils.instantiate(self.workload.specification[name]) for name in ("model", "data"))
        data.prepare_data()
        data.setup("fit")
        loader = data.train_dataloader()
        size = loader.batch_size or 1
        times: Any = ConcatDataset([loader.dataset] * -(-self.batches * size // len(loader.dataset)))
        return module, [DataLoader(times, size, shuffle=True, drop_last=True, collate_fn=loader.collate_fn)]


def seeded(specification: Mapping[str, Any], seed: int) -> Any:
    """Return what Hydra builds from a specification, with ``seed`` if the specification has one."""
    return hydra.utils.instantiate({**specification, **({"seed": seed} if "seed" in specification else {})})


def named(specifications: Mapping[str, Mapping[str, Any]], kind: str, name: str) -> Named:
    """Return one of a suite's ``methods``, ``heterogeneity`` or ``workloads``.

    Raises:
        ConfigurationError: the name is unknown.
    """
    refuse_unknown(f"among suite.{kind}", [name], specifications[kind])
    return Named(name, specifications[kind][name])


def train(
    case: Training,
    *callbacks: L.Callback,
    strategy: DDPStrategy | None = None,
    probe: Mapping[str, Any] | None = None,
    links: AbstractContextManager[None] | None = None,
) -> list[Report]:
    """Train, and return the workers' reports.

    Args:
        case: the training.
        callbacks: callbacks of the Trainer, besides the probe.
        strategy: a strategy in place of the case's.
        probe: options of :class:`~recipes.suites.probe.Probe`.
        links: a context that emulates the links between workers.
    """
    module, loaders = case.emulated() if case.workload is EMULATED else case.real()
    limit = {} if case.workload is EMULATED else {"limit_train_batches": case.iterations}
    with tempfile.TemporaryDirectory() as directory, links or nullcontext():
        trainer = make_trainer(
            strategy or strategy_of(case),
            case.workers,
            Probe(Path(directory), **(probe or {})),
            *callbacks,
            max_epochs=case.epochs,
            num_sanity_val_steps=0,
            **limit,
        )
        fit(trainer, module, loaders)
        return read_reports(Path(directory))


def strategy_of(case: Training, **options: Any) -> SDPipeStrategy:
    """Return the strategy that trains this case, with additional ``options``."""
    exchange = hydra.utils.instantiate(case.exchange) if case.exchange else None
    return SDPipeStrategy(
        num_stages=case.num_stages if isinstance(case.num_stages, int) else [*case.num_stages],
        sync=seeded(case.method.specification, case.seed),
        exchange=exchange,
        on_nonfinite="stop" if exchange is None else "continue",  # how few bits affect a model is a result
        schedule=case.schedule,  # type: ignore[arg-type]
        num_micro_batches=None if case.schedule == "pipedream" else case.num_micro_batches,
        partition=case.partition,
        data="sharded" if case.data == "by_speed" else case.data,  # type: ignore[arg-type]
        batch_by_speed=case.data == "by_speed",
        delays=case.slowness,
        timeout=TRANSFER_TIMEOUT,
        start_method="fork",
        **options,
    )


def fit(trainer: L.Trainer, module: L.LightningModule, loaders: Sequence[DataLoader[Any]]) -> None:
    """Train with the first loader, and validate with the second, if there is one."""
    trainer.fit(module, loaders[0], loaders[1] if len(loaders) > 1 else None)


def make_trainer(strategy: DDPStrategy | str, workers: int, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    """Return a Trainer on CPUs that prints and writes nothing, unless ``options`` ask for it."""
    quietly = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    chosen: dict[str, Any] = {"max_epochs": 1, **quietly, **options}
    return L.Trainer(accelerator="cpu", devices=workers, strategy=strategy, callbacks=[*callbacks], **chosen)


def calibrated_scale(case: Training, grid: Grid) -> float:
    """Return the factor by which to stretch times for ``case`` and similar ones, measured with all-reduce and without
    delays. Emulated times are stretched until the cores are less than half busy; with real compute, delays are
    stretched by the ratio of its mini-batch to :data:`NOMINAL_ITERATION_SECONDS`.

    Args:
        case: any of the cases that should have the same scale.
        grid: keeps the measurement.
    """
    probe = replace(
        case,
        method=ALL_REDUCE,
        condition=UNDELAYED,
        batches=CALIBRATION_ITERATIONS * case.num_pipelines,
        warm_up=CALIBRATION_ITERATIONS // 4,
        scale=1.0,
    )
    if case.workload is EMULATED:
        assert isinstance(case.num_stages, int)
        slots = case.num_micro_batches + case.num_stages - 1
        probe = replace(probe, schedule="1f1b", block_seconds=NOMINAL_ITERATION_SECONDS / slots)
    row = grid.measured(probe, pace)
    if case.workload is EMULATED:
        return machine.needed_scale(row["processor_s"], NOMINAL_ITERATION_SECONDS, machine.cores())
    return float(round(row["seconds"] / NOMINAL_ITERATION_SECONDS, 2))


def pace(case: Training, strategy: DDPStrategy | None = None) -> dict[str, float]:
    """Return the seconds of a mini-batch, a mean over the workers, and its processor seconds in all workers."""
    reports, counted = train(case, strategy=strategy), case.iterations - case.warm_up
    used = [report.used(case.warm_up) for report in reports]
    seconds = sum(each.clock for each in used) / len(used)
    return {"seconds": seconds / counted, "processor_s": sum(each.processor for each in used) / counted}


def random_features(batches: int, size: int, features: int = FEATURES) -> DataLoader[Any]:
    """Return data for an :class:`~recipes.suites.emulated.EmulatedChain`, from torch's global generator."""
    return DataLoader(TensorDataset(torch.rand(batches * size, features)), size, collate_fn=_features)


def _features(samples: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    return torch.stack([features for (features,) in samples])


def quiet() -> None:
    """Silence Lightning, which prints a greeting in each of a suite's hundred trainings."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive the fork
