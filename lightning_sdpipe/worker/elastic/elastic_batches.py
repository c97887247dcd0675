"""Turns of Lightning's loop in an elastic run.

All that changes the pipeline happens between two turns, where Lightning's counters, the model and the optimizer agree:
it gives its state to a newcomer, it leaves, it takes over from the leader. All waiting for batches happens there, too,
so that a worker that waits can still give its state. So the end of a segment is a turn of its own, in which nothing is
trained.

Where all pipelines make every update together (:class:`RoundBatchSource`), every turn but the last of a segment is a
round of gradients. A pipeline without a batch takes its turn, too: it gives no gradient, and steps with those of the
others. So replicas stay equal, and know which batches are in the model. Those batches count. A batch of a pipeline that
is gone is dealt again, and skipped by all if its gradient was in a round. The counters, and with them learning rates,
follow the model as well, alike in all pipelines. With several stages, a pipeline that is lost in a round may have been
in it on some stages only. The stages of each other pipeline then agree on the batches that are in the model of all of
them. A batch that is not is trained again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_sdpipe.dealing.leases import Segment
from lightning_sdpipe.exchange.present_rounds import Batch, Round
from lightning_sdpipe.loop.dealt import DealtBatchSource, SourceInputs, batch_to_show
from lightning_sdpipe.membership.turn_order import Command, CommandKind, turn_order
from lightning_sdpipe.sync.present_averaging import PresentAveraging
from lightning_sdpipe.worker.elastic.leader import CommandChannel, LeaveNotice

State = dict[str, Any]
log = logging.getLogger(__name__)
_SOON = 0.05
"""Seconds that a pipeline waits for a batch before it takes a turn without one, and between looks while it is held
up."""
_IDLE = "idle"


@dataclass(frozen=True)
class Duties:
    """Duties of a worker between two turns.

    Args:
        commands: those of stage 0.
        leaving: the notice that the pipeline was told to end.
        take_lead: makes the pipeline lead, if it is its turn.
        give: gives the state of this stage, with that of its turns, to the newcomer of a transfer.
        leave: makes this stage leave the run.
    """

    commands: CommandChannel
    leaving: LeaveNotice
    take_lead: Callable[[], None]
    give: Callable[[str, State], None]
    leave: Callable[[], None]


class ElasticBatchSource(DealtBatchSource):
    """The batch source of one worker, which carries out ``duties`` between its turns."""

    takes_idle_turns = False
    """True if a pipeline that is held up takes a turn without a batch, since the others may wait for it in theirs."""

    def __init__(self, inputs: SourceInputs, duties: Duties) -> None:
        super().__init__(inputs)
        self._duties = duties
        self._waits_between_turns = self._idle = False
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
        while (command := self._order()) is not None and command.kind is not CommandKind.GO:
            self._duties.commands.send(command)
            self._act(command)
        if command is None:
            self._duties.commands.hold()
        return command is not None

    def _order(self) -> Command | None:
        leaving, client = self._duties.leaving.given, self._client
        return turn_order(leaving, client.donations, "" if leaving else client.held_up)

    def _act(self, command: Command) -> None:
        """Carry out a command. A state that is given has no batch half trained, and a pipeline that leaves has none."""
        if self._turns.underway:
            self._turns.drain()
            self._client.trained(self._trained, self._turns.loose)
        if command.kind is CommandKind.LEAVE:
            self._duties.commands.done()  # when one stage leaves, all of them must end at once
            self._duties.leave()
            raise SIGTERMException
        self._duties.give(command.text, self.state)
        self._duties.commands.done()  # no stage comes to the next barrier before all have reported
        if self._turns.underway:
            self._client.trained(self._trained, self._turns.loose)  # the time that took is no batch's

    @property
    def _lacks_batch(self) -> bool:
        """True if there is none now, and there may be one in this segment."""
        return self._turns.underway and self._next is None and not self._over

    def _between_turns(self) -> None:
        """Do what is due before a turn: stage 0 decides once the turn may begin, and the others follow."""
        commands, self._idle = self._duties.commands, False
        if self._lacks_batch and not self.takes_idle_turns:
            self._rest()
        if commands.speaks:
            self._waits_between_turns = True
            while not self.serve():
                time.sleep(_SOON)
                if self.takes_idle_turns and self._turns.underway:
                    self._idle = True
                    break
            text = self._decide()
            self._waits_between_turns = False
            commands.send(Command(CommandKind.GO, text))
        else:
            while (command := commands.receive()).kind is not CommandKind.GO:
                self._act(command)
            text = command.text
        self._follow(text)
        self._duties.take_lead()
        self._client.has_made(self._trainer.global_step)

    def _decide(self) -> str:
        """Return what all stages are to do before the turn that may begin."""
        if self._lacks_batch:
            self._wait()
        called = self._turns.called
        return "" if called is None else str(called)

    def _follow(self, text: str) -> None:
        """Do, on each stage, what stage 0 has decided."""
        if self._lacks_batch:
            self._wait()
        if text:
            self._turns.take_part(int(text))

    def _segment_from(self, start: int) -> Segment:
        given, self._given = self._given, None
        return super()._segment_from(start) if given is None else Segment(self._run, *given)

    def _run_out(self) -> None:
        """No-op: the wait comes before the next turn begins."""

    def _reached(self, before: int) -> int:
        return before + 1 if self._next is None else super()._reached(before)


class TrainedBatches:
    """The batches of a segment that are in the model of this stage.

    Args:
        segment: the range of batch numbers in each shard.
        shards: number of shards.
        known: value of :attr:`flags` in another pipeline; None to begin with no batch.
    """

    def __init__(self, segment: Segment, shards: int, known: Tensor | None = None) -> None:
        self._start = segment.start
        shape = (shards, segment.stop - segment.start)
        self.flags = torch.zeros(shape, dtype=torch.uint8) if known is None else known

    @property
    def count(self) -> int:
        """Number of these batches."""
        return int(self.flags.sum())

    def add(self, batch: Batch) -> None:
        """Note that ``batch`` is in the model."""
        home, number = batch
        self.flags[home, number - self._start] = 1

    def __contains__(self, batch: Batch) -> bool:
        home, number = batch
        return bool(self.flags[home, number - self._start])


class RoundBatchSource(ElasticBatchSource):
    """The batch source of one worker whose pipeline makes every update together with all others."""

    takes_idle_turns = True

    def __init__(self, inputs: SourceInputs, duties: Duties, rounds: PresentAveraging) -> None:
        super().__init__(inputs, duties)
        self._rounds = rounds
        rounds.on_round = self._hear
        self._in_model: TrainedBatches | None = None
        self._doubts = False
        self._members: set[int] = set()
        self._epoch = 0  # of membership, of the last round
        self._received: Tensor | None = None

    @property
    def state(self) -> State:
        known = self._in_model if self._turns.underway else None
        return super().state | {"in_model": None if known is None else known.flags.clone()}

    def load(self, state: State) -> None:
        super().load(state)
        self._received = state["in_model"]

    def _next_turn(self) -> Any:
        self._between_turns()
        if not self._turns.underway:
            self._begin_segment()
            self._between_turns()
        return self._begin_turn()

    def _begin_segment(self) -> None:
        self._members = set()
        super()._begin_segment()

    def _segment_from(self, start: int) -> Segment:
        segment = super()._segment_from(start)
        received, self._received = self._received, None
        self._in_model = TrainedBatches(segment, self._num_pipelines, received)
        return segment

    def _hear(self, outcome: Round) -> None:
        """Note the outcome of a round, before the optimizer steps."""
        assert self._in_model is not None
        for batch in outcome.batches:
            self._in_model.add(batch)
        # A pipeline that was lost in a round and is back in the next one has come in another epoch.
        self._doubts |= not self._members <= {*outcome.members} or self._epoch not in (0, outcome.epoch)
        self._members, self._epoch = {*outcome.members}, outcome.epoch

    # ------------------------------------------------------------- between turns

    def _act(self, command: Command) -> None:
        if command.kind is CommandKind.AGREE:
            self._agree()
        else:
            super()._act(command)

    def _decide(self) -> str:
        passed = self._pass_over()
        if self._lacks_batch and not self._idle:
            self._ask(_SOON)
            passed += self._pass_over()
        self._idle |= self._lacks_batch
        return f"{passed} {_IDLE if self._idle else ''}"

    def _follow(self, text: str) -> None:
        if self._duties.commands.speaks:
            return
        number, idle = text.split(" ")
        for _ in range(int(number)):
            self._need()
            self._drop()
        self._idle = idle == _IDLE
        if not self._idle:
            self._need()

    def _pass_over(self) -> int:
        """Drop, on stage 0, batches that are in the model already; return how many."""
        passed = 0
        if self._doubts or self._is_known():
            self._doubts = False
            if not self._duties.commands.alone:
                self._duties.commands.send(Command(CommandKind.AGREE))
                self._agree()
        while self._is_known():
            passed += 1
            self._drop()
        return passed

    def _is_known(self) -> bool:
        known, batch = self._in_model, self._next
        return known is not None and batch is not None and (batch.home, batch.number) in known

    def _agree(self) -> None:
        known = self._in_model
        if known is None:
            return
        before = known.count
        self._duties.commands.least(known.flags)
        if known.count < before:
            log.warning(
                "stages had averaged over different pipelines when one was lost; %d of its batches, which not all "
                "stages have in their models, are trained again",
                before - known.count,
            )

    def _drop(self) -> None:
        """Drop the next batch, which is in the model already."""
        self._trained += 1
        self._client.trained(self._trained)
        self._looked = False
        self._look()

    def _ask(self, *seconds: float) -> None:
        """Wait for more batches, or for the end of the segment."""
        with self._turns.first_failure:
            while self._next is None and (more := self._batches.wait(*seconds)):
                self._next = self._batches.take()
        if self._next is None:
            self._over = more is False

    def _need(self) -> None:
        """Wait for a batch: stage 0 has one, or knows that there will be none."""
        if self._lacks_batch:
            self._ask()

    # ---------------------------------------------------------------------- turns

    def _begin_turn(self) -> Any:
        if self._idle:
            self._now, self._closes, self._rounds.batch = None, True, None
            self._turns.begin_turn(has_batch=False, gives_nothing=True)
            return batch_to_show(self._loader)
        batch = super()._begin_turn()
        if self._now is not None:
            self._turns.begin_turn(has_batch=True)  # the turn before it may have had no batch
        self._rounds.batch = None if self._now is None else (self._now.home, self._now.number)
        return batch

    def _run_out(self) -> None:
        """No-op: the pipeline goes on taking turns, without a batch."""

    def _end_turn(self) -> None:
        super()._end_turn()
        known, segment = self._in_model, self._segment
        assert known is not None
        assert segment is not None
        missing = known.flags.numel() - known.count
        if self._over and missing and self._stop == segment.stop:  # else the user has stopped training
            log.warning("%d of %s, by all pipelines, are not in the model", missing, segment)

    def _reached(self, before: int) -> int:
        assert self._in_model is not None
        assert self._segment is not None
        return self._segment.start + math.floor(self._in_model.count / self._num_pipelines + 1e-9)
