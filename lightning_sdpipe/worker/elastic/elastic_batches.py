"""Turns of Lightning's loop in an elastic job.

All that changes the pipeline happens between two turns, where Lightning's counters, the model and the optimizer belong
together: it gives its state to a newcomer, it leaves, it takes over from the leader. All waiting for batches happens
there, too, so that a worker that waits can still give its state. So the end of a segment is a turn of its own, in which
nothing is trained.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from lightning.pytorch import Trainer

from lightning_sdpipe.dealing.leases import Segment
from lightning_sdpipe.loop.batch_source import Turns
from lightning_sdpipe.loop.dealt import Dealing, DealtBatchSource
from lightning_sdpipe.loop.loop import ClockChecks
from lightning_sdpipe.membership.turn_order import Command, CommandKind
from lightning_sdpipe.scheduler.client.client import SchedulerClient
from lightning_sdpipe.topology.groups import ProcessGroups
from lightning_sdpipe.worker.elastic.stage_commands import CommandChannel

_GLANCE = 0.02  # seconds between two checks whether there are enough pipelines

State = dict[str, Any]


class Duties(Protocol):
    """Duties of a worker between two turns."""

    commands: CommandChannel

    def order(self) -> Command | None:
        """Return the command of stage 0, by :func:`~lightning_sdpipe.membership.turn_order.turn_order`."""

    def act(self, command: Command, turns: State) -> None:
        """Carry out a command other than to train; ``turns`` is the source's state."""

    def between(self) -> None:
        """Perform all else that happens between two turns, on each stage when it comes there."""


class ElasticBatchSource(DealtBatchSource):
    """The batch source of one worker, which carries out ``duties`` between its turns. See
    :class:`~lightning_sdpipe.loop.dealt.DealtBatchSource` for methods without a docstring."""

    def __init__(
        self,
        trainer: Trainer,
        turns: Turns,
        client: SchedulerClient,
        groups: ProcessGroups,
        checks: ClockChecks,
        run: int,
        dealing: Dealing,
        duties: Duties,
    ) -> None:
        super().__init__(trainer, turns, client, groups, checks, run, dealing)
        self._duties = duties
        self._waits_between_turns = False
        self._given: list[int] | None = None

    @property
    def run(self) -> int:
        """Number of this fit, which a newcomer gets from its donor."""
        return self._run

    @property
    def state(self) -> State:
        """State that a newcomer needs to take its turns in the same segment."""
        segment = self._segment if self._turns.underway else None
        where = None if segment is None else [segment.epoch, segment.start, segment.stop]
        return {"run": self._run, "segment": where, "look": self._checks.next}

    def load(self, state: State) -> None:
        """Go on where the donor of ``state`` was."""
        self._run = state["run"]
        self._given = state["segment"]
        self._checks.start_at(state["look"])

    def _next_turn(self) -> Any:
        self._between_turns()
        if not self._turns.underway:
            self._begin_segment()
            if self._next is None:
                self._between_turns()
        return self._begin_turn()

    def serve(self) -> bool:
        """Carry out commands while stage 0 waits between two turns. Return whether a turn may begin now."""
        if not self._waits_between_turns:
            return False
        while (command := self._duties.order()) is not None and command.kind is not CommandKind.GO:
            self._duties.commands.send(command)
            self._act(command)
        if command is None:
            self._duties.commands.hold()
        return command is not None

    def _act(self, command: Command) -> None:
        """Carry out a command. A state that is given has no batch half trained, and a pipeline that leaves has none."""
        if self._turns.underway:
            self._turns.drain()
            self._client.trained(self._trained, self._turns.loose)
        self._duties.act(command, self.state)

    def _between_turns(self) -> None:
        waits = self._turns.underway and self._next is None and not self._over
        if waits:
            self._rest()
        if self._duties.commands.speaks:
            self._waits_between_turns = True
            while not self.serve():
                time.sleep(_GLANCE)
            if waits:
                self._wait()
            self._waits_between_turns = False
            self._duties.commands.send(Command(CommandKind.GO))
        else:
            while (command := self._duties.commands.receive()).kind is not CommandKind.GO:
                self._act(command)
            if waits:
                self._wait()
        self._duties.between()

    def _segment_from(self, start: int) -> Segment:
        given, self._given = self._given, None
        return super()._segment_from(start) if given is None else Segment(self._run, *given)

    def _run_out(self) -> None:
        """No-op: the wait comes before the next turn begins."""

    def _reached(self, before: int) -> int:
        return before + 1 if self._next is None else super()._reached(before)
