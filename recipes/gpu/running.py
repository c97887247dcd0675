"""Runs a trial's trainings on forked ranks of this machine, which may share a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.worker.launching.environment import free_port
from recipes.gpu.models import Kind, Samples, loss_of
from recipes.harness.processes import be_rank, in_processes

Precision = Literal["32-true", "bf16-mixed"]
NEVER = 3600.0
"""Seconds; each trial has its own, shorter limit."""


@dataclass(frozen=True)
class Machine:
    """The machine on which trials run.

    Args:
        device: torch's name of the type of device.
        count: number of devices.
        folder: folder for the trials' files.
        dry: whether everything has a tiny size.
        accelerator: the accelerator for Lightning, if it does not know it by the device's name.
    """

    device: str
    count: int
    folder: Path
    dry: bool = False
    accelerator: Any = None

    def devices(self, ranks: int) -> list[torch.device]:
        """Return a device for each rank."""
        if self.device == "cpu":
            return [torch.device("cpu")] * ranks
        return [torch.device(self.device, rank % self.count) for rank in range(ranks)]

    def shares(self, ranks: int) -> bool:
        """Return whether some ranks share a device, which NCCL refuses."""
        return self.device == "cpu" or ranks > self.count

    def settle(self) -> None:
        """Wait for the current device."""
        if self.device != "cpu":
            torch.accelerator.synchronize()


def on_ranks(
    count: int,
    work: Callable[..., Any],
    *arguments: Any,
    own: Sequence[Mapping[str, str]] | None = None,
    limit: float = NEVER,
) -> list[Any]:
    """Return what ``work(rank, *arguments)`` returns on each rank, in the environment that torchrun would set.

    Args:
        count: number of ranks.
        work: the function, which must return no tensors.
        arguments: arguments of ``work`` after the rank.
        own: additional environment variables of each rank.
        limit: limit of time, in seconds.
    """
    port = free_port()
    return in_processes(count, _rank, count, port, own or [{}] * count, work, arguments, timeout=limit)


def _rank(
    rank: int,
    count: int,
    port: int | None,
    own: Sequence[Mapping[str, str]],
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    own_threads = {"OMP_NUM_THREADS": 1}  # else Lightning would start more in a forked process
    be_rank(rank, count, port, **own[rank], **own_threads)
    return work(rank, *arguments)


class Trial(L.LightningModule):
    """A network that learns to classify pictures, or to predict a text's words.

    Args:
        net: the network.
        optimizer: makes an optimizer of parameters.
        pause: seconds to sleep before each step, which make this device slower.
    """

    def __init__(self, net: nn.Module, optimizer: Callable[[Any], Any], pause: float = 0.0) -> None:
        super().__init__()
        self.net, self.optimizer, self.pause = net, optimizer, pause

    def forward(self, inputs: Tensor) -> Tensor:
        pictures = inputs.dtype is torch.uint8
        scores: Tensor = self.net(inputs.float() / 127.5 - 1 if pictures else inputs)
        return scores

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        time.sleep(self.pause)
        return loss_of(self(inputs), labels)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return AdamW with its default options."""
    return torch.optim.AdamW(parameters, 1e-3)


@dataclass
class Watch(L.Callback):
    """Records a rank's training: its losses, the mean time of a step in its second half, when epochs begin and end (by
    a clock that all processes share), and its device's peak memory."""

    machine: Machine
    steps: int
    losses: list[Any] = field(default_factory=list)
    stamps: list[float] = field(default_factory=list)
    epochs: list[tuple[float, float]] = field(default_factory=list)
    began: float = 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.began = time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["loss"].detach())
        if len(self.losses) in (self.steps - self.steps // 2, self.steps):
            self.machine.settle()
            self.stamps.append(time.monotonic())

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.machine.settle()
        self.epochs.append((self.began, time.monotonic()))

    def found(self) -> dict[str, Any]:
        """Return the record."""
        cuda = self.machine.device == "cuda"
        seconds = (self.stamps[-1] - self.stamps[0]) / (self.steps // 2) if len(self.stamps) == 2 else None
        return {
            "losses": [float(loss) for loss in self.losses],
            "ms": None if seconds is None else 1e3 * seconds,
            "MiB": torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0,
            "epochs": self.epochs,
        }


def ours(machine: Machine, ranks: int, stages: int, **options: Any) -> SDPipeStrategy:
    """Return our strategy for ``ranks`` ranks in pipelines of ``stages``."""
    return SDPipeStrategy(num_stages=stages, parallel_devices=machine.devices(ranks), **options)


def ddp(machine: Machine, ranks: int) -> DDPStrategy:
    """Return Lightning's DDP strategy for ``ranks`` ranks."""
    backend = "gloo" if machine.shares(ranks) else None
    return DDPStrategy(parallel_devices=machine.devices(ranks), process_group_backend=backend)


def trainer_of(
    machine: Machine, strategy: Strategy | str, ranks: int, precision: Precision = "32-true", **options: Any
) -> L.Trainer:
    """Return a Trainer that prints and writes nothing."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    devices: Any = ranks if machine.device == "cpu" or isinstance(strategy, str) else "auto"
    return L.Trainer(
        accelerator=machine.accelerator or machine.device,
        devices=devices,
        strategy=strategy,
        precision=precision,
        default_root_dir=machine.folder,
        num_sanity_val_steps=0,
        **{**quiet, **options},
    )


def fit(
    machine: Machine,
    strategy: Strategy | str,
    ranks: int,
    module: L.LightningModule,
    kind: Kind,
    steps: int,
    precision: Precision = "32-true",
) -> dict[str, Any]:
    """Train ``steps`` steps on this rank, and return what its :class:`Watch` recorded. The order of batches depends on
    their number."""
    watch = Watch(machine, steps)
    if machine.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer = trainer_of(machine, strategy, ranks, precision, max_steps=steps, callbacks=[watch])
    pipelines = ranks // strategy.num_stages if isinstance(strategy, SDPipeStrategy) else ranks
    trainer.fit(module, loader(kind.samples(steps * pipelines), kind.batch))
    return watch.found()


def loader(samples: Samples, batch: int) -> DataLoader[Any]:
    """Return a loader of whole batches."""
    return DataLoader(samples, batch, drop_last=True, collate_fn=lambda whole: whole)
