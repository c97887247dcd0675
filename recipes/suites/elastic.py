"""The elastic runs of suites that kill pipelines; and faults by which a process ends itself in a phase of a step, or of
what pipelines do between steps."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_sdpipe import Exchange, SDPipeStrategy
from lightning_sdpipe.exchange import encoded_mean, moving, outer_state, present_rounds
from lightning_sdpipe.scheduler.client import client
from lightning_sdpipe.sync import background_averaging, barriers, peers
from lightning_sdpipe.worker.elastic import state_transfer
from lightning_sdpipe.worker.options import Schedule
from lightning_sdpipe.worker.training import Phase
from recipes.harness.late_messages import arrive_late
from recipes.harness.pipelines import Diary, Pipelines, Record
from recipes.harness.processes import hook
from recipes.suites.emulated import EmulatedChain, passes
from recipes.suites.trainings import fit, make_trainer, quiet, random_features

HOOKS = {
    "forward": "on_train_batch_start",
    "backward": "on_before_backward",
    "optimizer": "on_before_optimizer_step",
    "step_end": "on_train_batch_end",
    "validation": "on_validation_batch_start",
    "checkpoint": "on_save_checkpoint",
}
"""Of Lightning, by the phases in which it calls them."""
PLACES: dict[str, list[tuple[Any, str]]] = {
    "waiting": [(client.SchedulerClient, "group")],
    "exchange": [
        (peers._Surviving, "wait"),
        (present_rounds.PresentRounds, "outcome"),
        (outer_state.OuterState, "make"),
        (background_averaging, "exchange_whole"),
    ],
    "pause": [(barriers.Barriers, "meet")],
    "donor": [(state_transfer, "send_state")],
    "half_sent": [
        (peers._Surviving, "commit"),
        (present_rounds.PresentRounds, "_reduce"),
        (encoded_mean.EncodedMean, "average"),
        (moving._Pair, "wait"),
    ],
    "newcomer": [(state_transfer, "receive_state")],
}
"""What is called in other phases."""
PHASES = (*HOOKS, *PLACES)


@dataclass(frozen=True)
class Fault:
    """A process kills itself in ``phase`` of the first update from ``after`` on that it makes itself."""

    phase: str
    after: int


def emulated(work: Work, pipeline: int) -> Sequence[Any]:
    """Return a module that sleeps, and its data."""
    module = EmulatedChain(work.num_stages, *passes(work.batch_seconds / work.num_stages), work.num_parameters)
    sizes = [work.batches, work.validation_batches] if work.validation_batches else [work.batches]
    return [module, *(random_features(size, 1) for size in sizes)]


@dataclass(frozen=True)
class Work:
    """The training of every pipeline.

    Args:
        num_stages: M.
        num_pipelines: N.
        sync: a method.
        batches: of all pipelines in an epoch.
        make: returns the module and the loaders of a pipeline, for training and validation.
        batch_seconds: of a mini-batch, emulated.
        num_parameters: of an emulated stage.
        epochs: of the run.
        validation_batches: after each epoch.
        checkpoint_every: so many updates; 0 for never.
        schedule: of the pipelines.
        exchange: of the method; with ``hierarchy="hosts"`` two consecutive pipelines share a machine by name.
        latency: seconds by which messages between workers, and those to and from the scheduler, arrive late, emulated.
        timeout: of the strategy, in seconds.
        seed: of the model.
    """

    num_stages: int
    num_pipelines: int
    sync: Any
    batches: int
    make: Callable[[Any, int], Sequence[Any]] = emulated
    batch_seconds: float = 0.06
    num_parameters: int = 65536
    epochs: int = 1
    validation_batches: int = 0
    checkpoint_every: int = 0
    schedule: Schedule = "1f1b"
    exchange: Exchange = field(default_factory=Exchange)
    latency: float = 0.0
    timeout: float = 60.0
    seed: int = 1


class World(Pipelines):
    """The pipelines of a run, which all do the same ``work``, with more ``terms`` of :class:`Pipelines`."""

    def __init__(self, directory: Path, work: Work, **terms: Any) -> None:
        super().__init__(directory, work.num_stages, work.num_pipelines, latency=work.latency, **terms)
        self.work = work

    def launch(self, pipeline: int, fault: Fault | None = None, rank: int = 0) -> None:
        """Start its processes; ``fault`` is for the one of ``rank``."""
        self.start(pipeline, partial(train, self.work, self.directory, fault, rank))

    def launch_all(self, faults: Mapping[int, Fault] | None = None, rank: int = 0) -> None:
        """Start all pipelines; ``faults``, by pipeline, are for their processes of ``rank``."""
        for pipeline in range(self.work.num_pipelines):
            self.launch(pipeline, (faults or {}).get(pipeline), rank)

    def finish(self, seconds: float) -> list[Record]:
        """Start all pipelines, and return what they have said when all have finished, within so many seconds.

        Raises:
            ChildProcessError: a process failed.
        """
        self.launch_all()
        self.wait(self._has_finished, "all to finish", seconds)
        return self.records()

    def _has_finished(self) -> bool:
        codes = [code for pipeline in self.newest for code in self.exit_codes(pipeline)]
        if any(codes):
            raise ChildProcessError(f"processes ended with exit codes {codes}; {self.said()}")
        return None not in codes

    def updates(self, pipeline: int) -> int:
        """Return how far its newest start is."""
        made = self.records(pipeline, 0)[-1].said("update")
        return int(made[-1]["update"]) if made else 0


class UpdateDiary(Diary):
    """Writes down the samples of each batch that is trained, where they have numbers, and each update with its loss and
    the bytes sent so far; Lightning's loop has turns in which none is made."""

    _batch: Any = None
    _stepped = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.say(started=trainer.global_step)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, *_: Any) -> None:
        self._batch = batch

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        """Say it before the scheduler can be told of it: this process may be killed at any moment."""
        self._stepped, strategy = True, trainer.strategy
        assert isinstance(strategy, SDPipeStrategy)
        own = strategy.training.phase is not Phase.FINISHING  # with the gradients of others
        if own and isinstance(self._batch, Sequence):
            self.say(trained=[int(number) for number in self._batch[0]], epoch=trainer.current_epoch)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        strategy, more = trainer.strategy, dict[str, Any]()
        if isinstance(strategy, SDPipeStrategy):
            if not self._stepped:
                return
            self._stepped = False
            loss = None if outputs is None else float(outputs["loss"])
            more = {"epoch": trainer.current_epoch, "loss": loss, "sent": strategy.statistics.bytes_sent}
        self.say(update=trainer.global_step, processor=time.process_time(), **more)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        sent = trainer.strategy.statistics.bytes_sent if isinstance(trainer.strategy, SDPipeStrategy) else 0
        self.say(ended=trainer.global_step, sent=sent)


def train(work: Work, directory: Path, fault: Fault | None, rank: int) -> None:
    """Be one worker, in a process of its own, whose environment says which; ``fault`` is for the one of ``rank``."""
    quiet()
    logging.getLogger("lightning_sdpipe").setLevel(logging.INFO)
    diary, pipeline = UpdateDiary(), int(os.environ["SDPIPE_PIPELINE"])
    if work.exchange.hierarchy == "hosts":
        os.environ["SDPIPE_HOST"] = f"machine-{pipeline // 2}"
    if work.latency:
        arrive_late(work.latency)
    torch.manual_seed(work.seed)
    module, *loaders = work.make(work, pipeline)
    strategy = SDPipeStrategy(
        sync=work.sync,
        exchange=work.exchange,
        num_micro_batches=None if work.schedule == "pipedream" else 1,
        schedule=work.schedule,
        data="dealt",
        timeout=timedelta(seconds=work.timeout),
    )
    callbacks: list[L.Callback] = [diary]
    if work.checkpoint_every:
        callbacks.append(ModelCheckpoint(directory / "checkpoints", every_n_train_steps=work.checkpoint_every))
    trainer = make_trainer(
        strategy,
        1,
        *callbacks,
        max_epochs=work.epochs,
        limit_val_batches=work.validation_batches,
        num_sanity_val_steps=0,
        enable_checkpointing=bool(work.checkpoint_every),
    )
    if fault is not None and int(os.environ["RANK"]) == rank:
        inject(fault, trainer, diary)
    note_transfers(diary)
    hook(outer_state.OuterState, "adopt", lambda _, new, *__: diary.say(round=new.rounds if new.moved else None))
    fit(trainer, module, loaders)


def note_transfers(diary: Diary) -> None:
    """Make a newcomer say how long its state was on its way, and how large its tensors are."""
    whole = state_transfer.receive_state

    def receive(*arguments: Any) -> dict[str, Any]:
        began = time.monotonic()
        state = whole(*arguments)
        tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
        diary.say(received=time.monotonic() - began, bytes=sum(each.nbytes for each in tensors))
        return state

    setattr(state_transfer, "receive_state", receive)  # noqa: B010  # of another signature


def inject(fault: Fault, trainer: L.Trainer, diary: Diary) -> None:
    """From the update ``fault.after`` on this process ends itself when it comes to ``fault.phase``."""

    def strike(*_: Any) -> None:
        if trainer.global_step >= fault.after or fault.phase == "newcomer":
            diary.say(strikes=trainer.global_step)
            os.kill(os.getpid(), signal.SIGKILL)

    callback = L.Callback()
    if fault.phase in HOOKS:
        setattr(callback, HOOKS[fault.phase], strike)
    trainer.callbacks.append(callback)  # type: ignore[attr-defined]  # after those that note something of a step
    for owner, name in PLACES.get(fault.phase, []):
        hook(owner, name, strike, after=fault.phase in ("half_sent", "newcomer"))
