"""Commands that stage 0 broadcasts before every turn, so that all stages of a pipeline act on them after the same
update. A pipeline that is told to end, by a signal to any of its processes, ends where stage 0 says so."""

from __future__ import annotations

import logging
import signal
import threading
import time
from types import FrameType

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_sdpipe import lightning_internals
from lightning_sdpipe.errors import SchedulerError, WorkerFailedError
from lightning_sdpipe.membership.turn_order import Command, CommandKind
from lightning_sdpipe.p2p import waiting_for
from lightning_sdpipe.scheduler.client.membership_client import CancelledError, MembershipClient
from lightning_sdpipe.topology.groups import ProcessGroups

log = logging.getLogger(__name__)

_BYTES = 128
_WHOLE_RUN = 1e9  # seconds
_HOLD_EVERY = 1.0  # seconds


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
        """Let the other stages wait on for a command, each of whose waits ends after the timeout of their process
        group. Call it often."""
        if time.monotonic() - self._sent > _HOLD_EVERY:
            self.send(Command(CommandKind.HOLD))

    def receive(self) -> Command:
        """Wait for the command of stage 0, for as long as that holds."""
        while True:
            heard = self._pass_on(torch.empty(_BYTES + 2, dtype=torch.uint8)).tolist()
            if heard[0] != CommandKind.HOLD:
                return Command(CommandKind(heard[0]), bytes(heard[2 : 2 + heard[1]]).decode("ascii"))

    def least(self, values: torch.Tensor) -> None:
        """Set ``values`` on all stages to the least of each of them."""
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
    """Notes SIGTERM, on whichever process of a pipeline it comes, and lets stage 0 know.

    Args:
        line: client of the scheduler, whose store passes the notice to stage 0: the run's own processes alone reach it,
            and the pipeline's TCPStore has no keys.
        pipeline: that of this worker.
        commands: knows whether this is stage 0, and whether there are other stages.
    """

    def __init__(self, line: MembershipClient, pipeline: int, commands: CommandChannel) -> None:
        self._line, self._commands = line, commands
        self._key = f"leaving-{pipeline}-{line.incarnation:x}/now"
        self._closed = False
        self.given = False
        """True if this pipeline was told to end."""

    def listen(self, trainer: Trainer) -> None:
        """Listen for notices; ``trainer`` is about to train."""
        lightning_internals.on_sigterm(trainer, self._note)
        if self._commands.speaks and not self._commands.alone:
            threading.Thread(target=self._hear, name="sdpipe leaving", daemon=True).start()

    def close(self) -> None:
        """Stop listening when training is over."""
        self._closed = True

    def _note(self, signum: int | signal.Signals, _: FrameType) -> None:
        if not self.given:
            self.given = True
            if not self._commands.speaks:
                threading.Thread(target=self._tell, daemon=True).start()

    def _tell(self) -> None:
        self._line.store.put(self._key, b"1")

    def _hear(self) -> None:
        """Wait on stage 0, in a thread of its own, for the notice that another stage was told to end."""
        try:
            self._line.store.wait([self._key], _WHOLE_RUN, cancelled=lambda: self._closed)
        except (CancelledError, SchedulerError, WorkerFailedError) as error:
            log.debug("no word of leaving came: %s", error)
        else:
            self.given = True
