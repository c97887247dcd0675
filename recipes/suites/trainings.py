"""Running one training of ``suite=throughput`` or ``suite=convergence``, as a user would, on forked processes."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import hydra
import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.local_sgd import NoSync
from recipes.suites import machine
from recipes.suites.cases import AnyCase, EmulatedCase, RealCase, only_delays
from recipes.suites.emulated import FEATURES, EmulatedChain, passes
from recipes.suites.ratios import Row
from recipes.suites.references import DelayedProbe, bare_torch, lightning_ddp
from recipes.suites.worker_reports import Probe, WorkerReport, read_reports, summary

TRANSFER_TIMEOUT = timedelta(minutes=5)


def measure(case: AnyCase) -> Row:
    """Train, and report throughput, shares and bounds.

    Raises:
        ConfigurationError: a reference under heterogeneity that it cannot be given.
    """
    reports, samples = _emulated(case) if isinstance(case, EmulatedCase) else _real(case)
    row = summary(reports, samples, machine.cores())
    for name, policy in (("bound", NoSync()), ("all_reduce_bound", AllReduceModels())):
        limit = case.bound(policy) if isinstance(case, EmulatedCase) else None
        row[name] = limit and samples * limit
    return row


def _emulated(case: EmulatedCase) -> tuple[list[WorkerReport], int]:
    """Report of the workers, and the samples of a mini-batch: one per micro-batch."""
    parts = 1 if case.schedule == "pipedream" else case.num_micro_batches
    seconds = case.micro_batch_seconds * case.scale * case.num_micro_batches / parts
    if case.method.name == "bare_torch":
        return bare_torch(case, seconds), case.num_micro_batches
    torch.manual_seed(case.seed)
    module = EmulatedChain(case.num_stages, *passes(seconds), num_parameters=case.num_parameters)
    loader = random_features(case.iterations * case.num_pipelines, case.num_micro_batches)
    return _fit(case, module, loader), case.num_micro_batches


def random_features(batches: int, size: int, features: int = FEATURES) -> DataLoader[Any]:
    """For an :class:`EmulatedChain`, from torch's global stream of random numbers."""
    return DataLoader(TensorDataset(torch.rand(batches * size, features)), size, collate_fn=_features)


def _features(samples: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    return torch.stack([features for (features,) in samples])


def _real(case: RealCase) -> tuple[list[WorkerReport], int]:
    """Report of the workers, and the samples of a mini-batch."""
    module, loader = real_training(case)
    return _fit(case, module, loader), loader.batch_size or 1


def real_training(case: RealCase) -> tuple[L.LightningModule, DataLoader[Any]]:
    """The module, and batches for all iterations in one epoch; the seed is that of the weights and of the order."""
    specification = case.workload.specification
    assert specification is not None
    L.seed_everything(case.seed, verbose=False)
    module, data = hydra.utils.instantiate(specification["model"]), hydra.utils.instantiate(specification["data"])
    data.prepare_data()
    data.setup("fit")
    return module, long_epoch(data.train_dataloader(), case.iterations * case.num_pipelines)


def long_epoch(loader: DataLoader[Any], batches: int) -> DataLoader[Any]:
    """A loader of at least so many batches over all pipelines: the data set several times in one epoch, shuffled, so
    that no end of an epoch is a barrier for all of them."""
    size = loader.batch_size or 1
    times = -(-batches * size // len(loader.dataset))  # type: ignore[arg-type]
    return DataLoader(
        ConcatDataset([loader.dataset] * times), size, shuffle=True, drop_last=True, collate_fn=loader.collate_fn
    )


def _fit(case: AnyCase, module: L.LightningModule, loader: DataLoader[Any]) -> list[WorkerReport]:
    with tempfile.TemporaryDirectory() as directory:
        if case.method.name == "lightning_ddp":
            delays = only_delays(case)
            assert isinstance(case, EmulatedCase)
            compute = case.num_micro_batches * case.micro_batch_seconds * case.scale
            probe: Probe = DelayedProbe(Path(directory), case.warm_up, delays, compute)
        else:
            probe = Probe(Path(directory), case.warm_up)
        fit(module, [loader], strategy(case), case.workers, probe, limit_train_batches=case.iterations)
        return read_reports(Path(directory))


def strategy(case: AnyCase, log_dir: Path | None = None) -> DDPStrategy:
    """Return the strategy that trains this case; its scheduler's log goes into ``log_dir``."""
    if case.method.name == "lightning_ddp":
        return lightning_ddp()
    exchange = hydra.utils.instantiate(case.exchange) if isinstance(case, RealCase) and case.exchange else None
    return SDPipeStrategy(
        num_stages=list(case.depths) if isinstance(case, RealCase) and case.depths else case.num_stages,
        sync=case.seeded(case.method),
        exchange=exchange,
        on_nonfinite="stop" if exchange is None else "continue",  # what few bits make of a model is a result
        schedule=case.schedule,  # type: ignore[arg-type]
        num_micro_batches=None if case.schedule == "pipedream" else case.num_micro_batches,  # it does not split
        variance_correction=isinstance(case, RealCase) and case.variance_correction,
        # by default equally many iterations of each pipeline, so that all methods meet the same delays
        data=case.data if isinstance(case, RealCase) else "sharded",
        delays=case.slowness,
        log_dir=log_dir,
        timeout=TRANSFER_TIMEOUT,
        start_method="fork",
    )


def fit(
    module: L.LightningModule,
    loaders: Sequence[DataLoader[Any]],
    strategy: DDPStrategy,
    workers: int,
    *callbacks: L.Callback,
    **options: Any,
) -> None:
    """Train as a user would, for one epoch unless ``options`` of the Trainer say otherwise.

    Args:
        module: what is trained.
        loaders: of training, and of validation if there is any.
        strategy: how.
        workers: processes of this machine.
        callbacks: of the Trainer.
        options: of :func:`make_trainer`.
    """
    validation = loaders[1] if len(loaders) > 1 else None
    make_trainer(strategy, workers, *callbacks, **options).fit(module, loaders[0], validation)


def make_trainer(strategy: DDPStrategy | str, workers: int, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    """Return a Trainer on CPUs that says and writes nothing, unless ``options`` want it."""
    quietly = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    chosen: dict[str, Any] = {"max_epochs": 1, **quietly, **options}
    return L.Trainer(accelerator="cpu", devices=workers, strategy=strategy, callbacks=[*callbacks], **chosen)


def quiet() -> None:
    """Lightning greets in every training; a suite runs a hundred of them."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive the fork
