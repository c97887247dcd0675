"""One training of ``suite=throughput``: what determines it, how to run it, and the command that does so again."""

from __future__ import annotations

import logging
import os
import shlex
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast, get_args

import hydra
import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity import Delays, Heterogeneity, Slowed
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.simulate import Schedule, Work, simulate
from recipes.suites import machine
from recipes.suites.emulated import FEATURES, EmulatedChain
from recipes.suites.ratios import Row
from recipes.suites.references import DelayedProbe, bare_torch, lightning_ddp
from recipes.suites.worker_reports import Probe, WorkerReport, read_reports, summary

EMULATED = "emulated"
PAPERS_ITERATION_SECONDS = 0.1
"""The length of a mini-batch that delays are meant for: other mini-batches get theirs in proportion."""

BACKWARD_SHARE = 2 / 3
"""Of the time of a micro-batch: a backward takes about twice as long as its forward."""

REFERENCES = ("lightning_ddp", "bare_torch")
TRANSFER_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Case:
    """A training, exactly.

    Args:
        panel: the part of the grid that it belongs to.
        method: name of the synchronisation.
        sync: its specification, for Hydra; None for an outside reference.
        condition: name of the heterogeneity.
        heterogeneity: its specification, for Hydra, without the seed.
        workload: ``"emulated"``, or the name of a real one.
        model: the specifications of a real one's module and data, for Hydra.
        num_stages: M.
        num_pipelines: N.
        schedule: of the pipelines.
        num_micro_batches: m.
        micro_batch_seconds: of one micro-batch on one stage, forward and backward, without delays; emulated only.
        num_parameters: of a stage; emulated only.
        iterations: in all.
        warm_up: how many of them do not count.
        pace: how many times slower than a core each worker's device is; real compute only, see
            :class:`~lightning_sdpipe.heterogeneity.Slowed`.
        scale: multiplies ``micro_batch_seconds`` and the delays.
        seed: of the delays and the weights.
        variance_correction: of Adam, in the methods that average models; real compute only.
    """

    panel: str
    method: str
    sync: Mapping[str, Any] | None
    condition: str
    heterogeneity: Mapping[str, Any]
    workload: str
    model: Mapping[str, Any] | None
    num_stages: int
    num_pipelines: int
    schedule: str
    num_micro_batches: int
    micro_batch_seconds: float
    num_parameters: int
    iterations: int
    warm_up: int
    pace: float
    scale: float
    seed: int
    variance_correction: bool = False

    @property
    def shape(self) -> str:
        """M × N, as the keys of the ratios have it."""
        return f"{self.num_stages}x{self.num_pipelines}"

    @property
    def iteration_seconds(self) -> float:
        """Of a mini-batch without delays; emulated only."""
        slots = self.num_micro_batches + (0 if self.schedule == "pipedream" else self.num_stages - 1)
        return slots * self.micro_batch_seconds * self.scale

    @property
    def slowness(self) -> Heterogeneity:
        """Delays are multiplied by the scale; speeds need not be, since they are relative."""
        built: Heterogeneity = hydra.utils.instantiate(_seeded(self.heterogeneity, self.seed))
        scaled = replace(built, scale=built.scale * self.scale) if isinstance(built, Delays) else built
        return scaled if self.workload == EMULATED else Slowed(scaled, self.pace)

    def bound(self, policy: PolicyConfig) -> float | None:
        """Mini-batches per second of all pipelines that are possible under ``policy``, by simulation, where only
        computing takes time; None if it is not simulated."""
        if self.workload != EMULATED or self.schedule not in get_args(Schedule):
            return None
        m = 1 if self.schedule == "pipedream" else self.num_micro_batches
        work = Work(
            self.num_stages,
            self.num_pipelines,
            self.iterations,
            m * self.micro_batch_seconds * self.scale,
            cast(Schedule, self.schedule),
            m,
            self.slowness,
        )
        return sum(simulate(policy, work).rates(self.warm_up))


def run(case: Case) -> Row:
    """Trains, and reports throughput, shares and bounds.

    Raises:
        ConfigurationError: a reference under heterogeneity that it cannot be given.
    """
    reports, samples = _emulated(case) if case.workload == EMULATED else _real(case)
    row = summary(reports, samples, machine.cores())
    for name, policy in (("bound", NoSync()), ("all_reduce_bound", AllReduceModels())):
        limit = case.bound(policy)
        row[name] = limit and samples * limit
    return row


def command(case: Case) -> str:
    """Runs this case alone."""
    # fmt: off
    panel = {name: asdict(case)[name] for name in (
        "workload", "num_stages", "num_pipelines", "schedule", "num_micro_batches", "micro_batch_seconds",
        "num_parameters", "iterations", "warm_up", "pace",
    )}
    # fmt: on
    panel |= {"heterogeneity": [case.condition], "methods": [case.method], "repeats": 1, "once": []}
    settings: dict[str, Any] = {"scale": case.scale, "only": [case.panel], f"grid.{case.panel}": panel}
    return suite_command("throughput", case.seed, settings | specifications(case))


def specifications(case: Case) -> dict[str, Any]:
    """Those of the method, the condition and the workload, as settings of a suite."""
    method = {} if case.sync is None else {f"methods.{case.method}": case.sync}
    workload = {} if case.model is None else {f"workloads.{case.workload}": case.model}
    return {f"heterogeneity.{case.condition}": case.heterogeneity, **method, **workload}


def _seeded(specification: Mapping[str, Any], seed: int) -> dict[str, Any]:
    return {**specification, **({"seed": seed} if "seed" in specification else {})}


def suite_command(suite: str, seed: int, settings: Mapping[str, Any]) -> str:
    """Runs a suite with these settings."""
    overrides = [f"suite.{name}={value}" for name, value in _flat(settings)]
    return shlex.join(["python", "-m", "recipes.bench", f"suite={suite}", f"seed={seed}", *overrides])


def _flat(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    flat: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat += [(f"{name}.{inner}", text) for inner, text in _flat(value)]
        elif name not in ("_target_", "seed"):
            shown = f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
            flat.append((name, "null" if value is None else shown))
    return flat


def _emulated(case: Case) -> tuple[list[WorkerReport], int]:
    """Reports of the workers, and the samples of a mini-batch: one per micro-batch."""
    parts = 1 if case.schedule == "pipedream" else case.num_micro_batches
    seconds = case.micro_batch_seconds * case.scale * case.num_micro_batches / parts
    times = (1 - BACKWARD_SHARE) * seconds, BACKWARD_SHARE * seconds
    if case.method == "bare_torch":
        reports = bare_torch(
            case.num_stages,
            case.num_pipelines,
            case.num_micro_batches,
            *times,
            case.num_parameters,
            only_delays(case),
            case.iterations,
            case.warm_up,
        )
        return reports, case.num_micro_batches
    torch.manual_seed(case.seed)
    module = EmulatedChain(case.num_stages, *times, num_parameters=case.num_parameters)
    count = case.iterations * case.num_pipelines * case.num_micro_batches
    loader = DataLoader(TensorDataset(torch.rand(count, FEATURES)), case.num_micro_batches, collate_fn=stacked)
    return _fit(case, module, loader), case.num_micro_batches


def stacked(samples: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """The features of samples that have nothing else, as a batch."""
    return torch.stack([features for (features,) in samples])


def _real(case: Case) -> tuple[list[WorkerReport], int]:
    """Reports of the workers, and the samples of a mini-batch."""
    module, loader = real_training(case)
    return _fit(case, module, loader), loader.batch_size or 1


def real_training(case: Case) -> tuple[L.LightningModule, DataLoader[Any]]:
    """The module, and batches for all iterations in one epoch; the seed is that of the weights and of the order."""
    assert case.model is not None
    L.seed_everything(case.seed, verbose=False)
    module, data = hydra.utils.instantiate(case.model["model"]), hydra.utils.instantiate(case.model["data"])
    data.prepare_data()
    data.setup("fit")
    return module, long_epoch(data.train_dataloader(), case.iterations * case.num_pipelines)


def long_epoch(loader: DataLoader[Any], batches: int) -> DataLoader[Any]:
    """A loader of at least so many batches over all pipelines: the data set several times in one epoch, shuffled, so
    that no end of an epoch makes everybody wait for everybody."""
    size = loader.batch_size or 1
    times = -(-batches * size // len(loader.dataset))  # type: ignore[arg-type]
    return DataLoader(
        ConcatDataset([loader.dataset] * times), size, shuffle=True, drop_last=True, collate_fn=loader.collate_fn
    )


def _fit(case: Case, module: L.LightningModule, loader: DataLoader[Any]) -> list[WorkerReport]:
    with tempfile.TemporaryDirectory() as directory:
        if case.method == "lightning_ddp":
            if case.num_stages != 1 or case.workload != EMULATED:
                raise ConfigurationError("lightning_ddp has no stages: use it with num_stages=1, emulated.")
            compute = case.num_micro_batches * case.micro_batch_seconds * case.scale
            probe: Probe = DelayedProbe(Path(directory), case.warm_up, only_delays(case), compute)
        else:
            probe = Probe(Path(directory), case.warm_up)
        fit(module, loader, strategy(case), case.num_stages * case.num_pipelines, case.iterations, probe)
        return read_reports(Path(directory))


def strategy(case: Case) -> DDPStrategy:
    """What trains this case."""
    if case.method == "lightning_ddp":
        return lightning_ddp()
    return SDPipeStrategy(
        num_stages=case.num_stages,
        sync=hydra.utils.instantiate(_seeded(case.sync or {}, case.seed)),
        schedule=case.schedule,  # type: ignore[arg-type]
        num_micro_batches=case.num_micro_batches,
        variance_correction=case.variance_correction,
        delays=case.slowness,
        timeout=TRANSFER_TIMEOUT,
        start_method="fork",
    )


def fit(
    module: L.LightningModule,
    loader: DataLoader[Any],
    strategy: DDPStrategy,
    workers: int,
    iterations: int,
    callback: L.Callback,
) -> None:
    """One epoch of so many iterations of each pipeline, on forked processes, as a user would train."""
    trainer = L.Trainer(
        accelerator="cpu",
        devices=workers,
        strategy=strategy,
        max_epochs=1,
        limit_train_batches=iterations,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)


def quiet() -> None:
    """Lightning greets in every training; a suite runs a hundred of them."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive the fork


def only_delays(case: Case) -> Delays:
    """What an outside reference is given: it can sleep before the forward of a mini-batch.

    Raises:
        ConfigurationError: another heterogeneity.
    """
    slowness = case.slowness
    if not isinstance(slowness, Delays) or slowness.draws != "iteration":
        raise ConfigurationError(
            f"{case.method} can only be delayed once per iteration, which is not what suite.heterogeneity."
            f"{case.condition} asks; leave it out of suite.grid.{case.panel}.methods."
        )
    return slowness
