"""Leaders of an elastic run: stage 0 of each pipeline, and the oldest pipeline.

Stage 0 broadcasts commands before every turn, so that all stages of a pipeline act on them after the same update. A
pipeline that is told to end, by a signal to any of its processes, ends where stage 0 says so.

The leader's pipeline has duties for all: its rank 0 logs, and writes checkpoints. When the leader is gone, the next one
goes on writing where it stopped.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.loggers.csv_logs import CSVLogger as FabricCSVLogger
from lightning.fabric.utilities import rank_zero as lightning_rank_zero
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning_utilities.core.rank_zero import rank_zero_only as of_everybody

from lightning_sdpipe import lightning_internals
from lightning_sdpipe.errors import SchedulerError, WorkerFailedError
from lightning_sdpipe.lightning_internals import known_version
from lightning_sdpipe.membership.turn_order import Command, CommandKind
from lightning_sdpipe.p2p import waiting_for
from lightning_sdpipe.scheduler.client.client import CancelledError, SchedulerClient
from lightning_sdpipe.topology.groups import ProcessGroups

log = logging.getLogger(__name__)

_BYTES = 128
_WHOLE_RUN = 1e9  # seconds
_HOLD_EVERY = 1.0  # seconds
_NOT_ZERO = 10**6


class CommandChannel:
    """The command channel of one worker, on stage 0 or another; every stage must call the methods in the same order."""

    def __init__(self, groups: ProcessGroups) -> None:
        mesh = groups.mesh
        stage, pipeline = mesh.locate(groups.rank)
        self.speaks = stage == 0
        self.alone = mesh.num_stages == 1
        self._first = mesh.rank(0, pipeline)
        self._group = groups.pipeline
        self._sent = time.monotonic()

    def send(self, command: Command) -> None:
        """Send a command from stage 0 to the others, without waiting for them to act."""
        self._sent = time.monotonic()
        if not self.alone:
            text = command.text.encode("ascii")
            self._pass_on(torch.tensor([command.kind, len(text), *text.ljust(_BYTES, b"\0")], dtype=torch.uint8))

    def hold(self) -> None:
        """Keep the other stages waiting for a command: each wait would end after the timeout of their process group.
        Call it often."""
        if time.monotonic() - self._sent > _HOLD_EVERY:
            self.send(Command(CommandKind.HOLD))

    def receive(self) -> Command:
        """Wait for the next command of stage 0 that is not a hold."""
        while True:
            heard = self._pass_on(torch.empty(_BYTES + 2, dtype=torch.uint8)).tolist()
            if heard[0] != CommandKind.HOLD:
                return Command(CommandKind(heard[0]), bytes(heard[2 : 2 + heard[1]]).decode("ascii"))

    def least(self, values: torch.Tensor) -> None:
        """Set each of ``values``, on all stages, to the least over the stages."""
        if not self.alone:
            with waiting_for(self._group, "agreeing"):
                dist.all_reduce(values, dist.ReduceOp.MIN, group=self._group)

    def on_any_stage(self, mine: bool) -> bool:
        """Return whether ``mine`` is true on any stage."""
        votes = torch.tensor([int(not mine)])
        self.least(votes)
        return not votes.item()

    def done(self) -> None:
        """Wait until all stages have carried out the command."""
        if not self.alone:
            with waiting_for(self._group, "acting together"):
                dist.barrier(self._group)

    def _pass_on(self, data: torch.Tensor) -> torch.Tensor:
        with waiting_for(self._group, "the command of stage 0"):
            dist.broadcast(data, self._first, group=self._group)
        return data


class LeaveNotice:
    """Notes a SIGTERM to any process of a pipeline, and lets stage 0 know.

    Args:
        client: the scheduler's client. The scheduler's store passes the notice to stage 0: only the run's own processes
            reach it, whereas the pipeline's TCPStore has no keys.
        pipeline: that of this worker.
        commands: knows whether this is stage 0, and whether there are other stages.
    """

    def __init__(self, client: SchedulerClient, pipeline: int, commands: CommandChannel) -> None:
        self._client, self._commands = client, commands
        self._key = f"leaving-{pipeline}-{client.incarnation:x}/now"
        self._closed = False
        self.given = False
        """True if this pipeline was told to end."""

    def listen(self, trainer: Trainer) -> None:
        """Listen for notices; ``trainer`` is about to train."""
        lightning_internals.on_sigterm(trainer, self._note)
        if self._commands.speaks and not self._commands.alone:
            threading.Thread(target=self._hear, name="sdpipe leaving", daemon=True).start()

    def close(self) -> None:
        """Stop listening when training has ended."""
        self._closed = True

    def _note(self, signum: int | signal.Signals, _: FrameType) -> None:
        if not self.given:
            self.given = True
            if not self._commands.speaks:
                threading.Thread(target=self._tell, daemon=True).start()

    def _tell(self) -> None:
        self._client.put(self._key, b"1")

    def _hear(self) -> None:
        """Wait on stage 0, in a thread of its own, for the notice that another stage was told to end."""
        try:
            self._client.wait([self._key], _WHOLE_RUN, cancelled=lambda: self._closed)
        except (CancelledError, SchedulerError, WorkerFailedError) as error:
            log.debug("no word of leaving came: %s", error)
        else:
            self.given = True


def take_place(rank: int, leads: bool) -> None:
    """Tell all code that asks whether this process, of that ``rank`` in its pipeline, is rank zero."""
    said: Any = lightning_rank_zero.rank_zero_only
    everywhere: Any = of_everybody
    said.rank = everywhere.rank = rank if leads else rank + _NOT_ZERO


class Leadership:
    """Tracks whether this process's pipeline leads, and makes the process go on where the leader was when it takes
    over.

    Args:
        rank: that of this process in its pipeline.
        pipeline: number of its pipeline.
    """

    def __init__(self, rank: int, pipeline: int) -> None:
        self._rank, self._pipeline = rank, pipeline
        self._heir: Trainer | None = None  # of a process that did not lead when training began
        self.held = False
        self.say()

    def say(self) -> None:
        """Tell all code that asks whether this is rank zero; repeat it when other code has set that otherwise."""
        take_place(self._rank, self.held)

    def take(self, present: Sequence[int]) -> None:
        """Lead from now on if this pipeline is the first of those that are ``present``, and else do not."""
        leads = present[:1] == [self._pipeline]
        if leads == self.held:
            return
        self.held = leads
        self.say()
        if leads and self._heir is not None:
            go_on(self._heir)
            show_progress(self._heir, underway=True)

    def begin(self, trainer: Trainer) -> None:
        """Note that ``trainer`` is about to train."""
        if self.held:
            show_progress(trainer, underway=False)
        self._heir = None if self.held else trainer


def names(trainer: Trainer) -> dict[str, list[Any]]:
    """Return where ``trainer`` writes, for workers that may have to go on there."""
    return {
        "versions": [v if isinstance(v, int | str) else None for v in map(known_version, trainer.loggers)],
        "directories": [None if each.dirpath is None else str(each.dirpath) for each in _saving(trainer)],
    }


def adopt(trainer: Trainer, found: dict[str, list[Any]]) -> None:
    """Make ``trainer`` write where the leader does, if it ever leads."""
    for logger, version in zip(trainer.loggers, found["versions"], strict=False):
        if version is not None:
            lightning_internals.set_version(logger, version)
    for callback, directory in zip(_saving(trainer), found["directories"], strict=False):
        if directory is not None:
            callback.dirpath = directory


def go_on(trainer: Trainer) -> None:
    """Let this process write from now on, into files that another process has begun."""
    for logger in trainer.loggers:
        if isinstance(logger, FabricCSVLogger) and not lightning_internals.has_writer(logger):
            lightning_internals.set_writer(logger, _appending(logger.log_dir))


def show_progress(trainer: Trainer, underway: bool) -> None:
    """Show the progress bar in this process, where Lightning has switched it off. ``underway`` says that training has
    begun without the bar being told."""
    bar = trainer.progress_bar_callback
    if bar is not None:
        bar.enable()
        if underway:
            bar.on_train_start(trainer, trainer.lightning_module)
            bar.on_train_epoch_start(trainer, trainer.lightning_module)


def _saving(trainer: Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


class _Appending(ExperimentWriter):
    """A writer that keeps the rows in its file, which Lightning's own would delete."""

    def _check_log_dir_exists(self) -> None:
        """Keep the files."""


def _appending(directory: str) -> ExperimentWriter:
    writer = _Appending(directory)
    if os.path.exists(writer.metrics_file_path):
        with open(writer.metrics_file_path) as file:
            writer.metrics_keys = file.readline().strip().split(",")
    return writer
