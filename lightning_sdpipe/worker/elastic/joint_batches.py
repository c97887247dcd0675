"""Turns of Lightning's loop where all pipelines of an elastic run train one batch together, each as much of it as its
speed allows.

Every turn but the last of a segment is a round of gradients. The flags of a round tell all members which pipelines were
in it, and how fast each is; :mod:`lightning_sdpipe.dealing.joint_rounds` has the rules by which they divide the next
one alike. A pipeline without a share, or one that is held up, takes its turn, too, and gives no gradient.

With several stages, a pipeline that goes in a round may have been in it on some stages only. Stage 0 tells the others
when to agree on what is missed: what is not in the model of every stage is trained again.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from lightning_sdpipe.data.joint import PlacedBatches
from lightning_sdpipe.dealing.joint_rounds import JointRounds, members_of, there
from lightning_sdpipe.dealing.leases import Segment
from lightning_sdpipe.exchange.present_rounds import Round
from lightning_sdpipe.heterogeneity.injector import DelayInjector
from lightning_sdpipe.loop.batch_source import Split
from lightning_sdpipe.loop.dealt import SourceInputs, batch_to_show
from lightning_sdpipe.loop.joint import refuse_own_split, refuse_small_last_batch, refuse_to_divide
from lightning_sdpipe.membership.turn_order import Command, CommandKind
from lightning_sdpipe.pipeline.micro_batches import Portion
from lightning_sdpipe.sync.present_averaging import PresentAveraging
from lightning_sdpipe.worker.elastic.elastic_batches import Duties, ElasticBatchSource, State

_SOON = 0.05
"""Seconds that a pipeline that is held up waits before it takes a turn without a batch."""
_KEPT = 0.5  # part of the known speed that counts beside that of the last turn


class JointRoundSource(ElasticBatchSource):
    """The batch source of one worker whose pipeline trains its part of a batch that is divided by speed."""

    description = "one batch of all pipelines that are there, divided by speed"
    portion: Portion | None = None  # type: ignore[assignment]

    def __init__(
        self,
        inputs: SourceInputs,
        duties: Duties,
        rounds: PresentAveraging,
        division: tuple[int, int],
        delays: DelayInjector,
    ) -> None:
        super().__init__(inputs, duties)
        groups = inputs.groups
        self._rounds, self._delays = rounds, delays
        rounds.on_round = self._hear
        self._parts, unit = division
        self._own, bubble = groups.mesh.locate(groups.rank)[1], groups.mesh.num_stages - 1
        self._joint = JointRounds(self._num_pipelines, self._parts, unit, lambda pipeline: bubble)
        self._placed: PlacedBatches | None = None
        self._goes_on = False  # where a donor was in a segment
        self._computed = self._speed = 0.0
        self._share = 0
        self._idle = False

    def deal(self, loader: Any, split: Split | None) -> None:
        super().deal(loader, split)
        if loader.batch_sampler is None:
            raise refuse_to_divide("a loader with batch_size=None gives whole batches")
        refuse_small_last_batch(self._trainer, loader, self._parts)
        self._placed = PlacedBatches(loader, self._num_pipelines, self._parts)

    def change(self) -> None:
        refuse_own_split(self._trainer.lightning_module)
        super().change()
        self._delays.measures = True
        self._computed = self._seconds

    def close(self) -> None:
        super().close()
        if self._placed is not None:
            self._placed.close()
        self._placed = self.portion = None
        self._delays.measures = False

    @property
    def state(self) -> State:
        return super().state | {"joint": self._joint.state()}

    def load(self, state: State) -> None:
        super().load(state)
        self._joint.load(state["joint"])
        self._goes_on = state["segment"] is not None

    def _next_turn(self) -> Any:
        self._between_turns()
        if not self._turns.underway:
            self._begin_segment()
        return self._begin_turn()

    def _begin_segment(self) -> None:
        placed = self._placed
        assert placed is not None
        self._segment = segment = self._segment_from(self._counters.number)
        self._counters.begin()
        self._trained = self._accumulated = 0
        self._turns.begin_dealt()
        with self._turns.first_failure:
            placed.begin(segment.epoch, self._dealing.seed())
        self._over = False

    def _segment_from(self, start: int) -> Segment:
        segment = super()._segment_from(start)
        goes_on, self._goes_on = self._goes_on, False
        if not goes_on:
            self._joint.begin(segment.start, segment.stop)
        return segment

    @property
    def _stop(self) -> int:
        """Number at which the segment ends; there are no leases that could end it sooner."""
        assert self._segment is not None
        return self._segment.stop

    def _hear(self, outcome: Round) -> None:
        """Note the outcome of a round, before the optimizer steps."""
        self._joint.ended(outcome.members, outcome.trained, outcome.seconds, outcome.epoch)

    # ------------------------------------------------------------- between turns

    def _between_turns(self) -> None:
        commands, joint = self._duties.commands, self._joint
        if commands.speaks:
            self._waits_between_turns = True
            self._idle = False
            while not self.serve():
                time.sleep(_SOON)
                if self._turns.underway:  # others may be in their turns, and wait for this one
                    self._idle = True
                    break
            self._waits_between_turns = False
            agrees, divides = joint.doubts and not commands.alone, there(joint.members) if joint.looks else 0
            commands.send(Command(CommandKind.GO, f"{int(agrees)} {divides:x} {int(self._idle)} {int(joint.counts)}"))
        else:
            while (command := commands.receive()).kind is not CommandKind.GO:
                self._act(command)
            said, bits, idle, counts = command.text.split(" ")
            agrees, divides, self._idle = said == "1", int(bits, 16), idle == "1"
            joint.settle(counts == "1")
        if agrees:
            self._agree()
        if divides:
            self._divide(members_of(divides))
        self._duties.between()

    def _agree(self) -> None:
        flags = torch.tensor(self._joint.flags(), dtype=torch.uint8)
        self._duties.commands.least(flags)
        self._joint.agree(flags.tolist())

    def _divide(self, members: list[int]) -> None:
        """Divide later rounds among ``members``, by the slowest stage of each."""
        speeds = -torch.tensor([self._joint.heard.get(pipeline, 0.0) for pipeline in members], dtype=torch.float64)
        self._duties.commands.least(speeds)
        self._joint.divide_by(dict(zip(members, (-speeds).tolist(), strict=True)))

    # ---------------------------------------------------------------------- turns

    def _begin_turn(self) -> Any:
        joint, placed = self._joint, self._placed
        assert placed is not None
        self._now, self.portion, self._share, self._over = None, None, 0, joint.over and not self._idle
        self._closes = not self._over or self._final
        mine = [] if self._over or self._idle else joint.turn().get(self._own, [])
        if not mine:
            self._turns.begin_turn(has_batch=False, gives_nothing=not self._over)
            return batch_to_show(self._loader)
        with self._turns.first_failure:
            data, self.portion = placed.take(mine, joint.ahead(self._own))
        self._turns.begin_turn(has_batch=True)
        self._share = len(mine)
        return data

    def _end_turn(self) -> None:
        counters, segment, joint = self._counters, self._segment, self._joint
        assert segment is not None
        before = counters.number - 1  # Lightning has counted this turn
        if self._share:
            self._measure()
        if self._over:
            counters.advance(before, segment.stop)
            self._turns.end_dealt()
        else:
            counters.advance(before, min(max(joint.number, before), segment.stop - 1))

    def _measure(self) -> None:
        computed, self._computed = self._computed, self._seconds
        last = (self._computed - computed) / self._share
        self._speed = _KEPT * self._speed + (1 - _KEPT) * last if self._speed else last
        self._rounds.seconds = self._speed

    @property
    def _seconds(self) -> float:
        return self._delays.computed_seconds + self._delays.injected_seconds
