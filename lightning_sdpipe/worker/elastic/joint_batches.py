"""Turns of Lightning's loop where all pipelines of an elastic run train one batch together, each as much of it as its
speed allows.

Every turn but the last of a segment is a round of gradients. The flags of a round tell all members which pipelines were
in it, and how fast each is; :mod:`lightning_sdpipe.dealing.joint_rounds` has the rules by which they divide the next
one alike. A pipeline without a share, or one that is held up, takes its turn, too, and gives no gradient.

With several stages, a pipeline that is lost in a round may have been in it on some stages only. Stage 0 tells the
others when to agree on what is missed: what is not in the model of every stage is trained again.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_sdpipe.dealing.joint_rounds import members_of, there
from lightning_sdpipe.dealing.leases import Segment
from lightning_sdpipe.exchange.present_rounds import Round
from lightning_sdpipe.loop.batch_source import Split
from lightning_sdpipe.loop.dealt import SourceInputs, batch_to_show
from lightning_sdpipe.loop.joint import OwnPart
from lightning_sdpipe.pipeline.micro_batches import Portion
from lightning_sdpipe.sync.present_averaging import PresentAveraging
from lightning_sdpipe.worker.elastic.elastic_batches import Duties, ElasticBatchSource, State

_KEPT = 0.5  # weight of the known speed, against that of the last turn


class JointRoundSource(ElasticBatchSource):
    """The batch source of one worker whose pipeline trains its part of a batch that is divided by speed."""

    description = "one batch of all pipelines that are there, divided by speed"
    portion: Portion | None = None  # type: ignore[assignment]

    takes_idle_turns = True

    def __init__(self, inputs: SourceInputs, duties: Duties, rounds: PresentAveraging, own: OwnPart) -> None:
        super().__init__(inputs, duties)
        self._rounds, self._own, self._joint = rounds, own, own.rounds
        rounds.on_round = self._hear
        self._goes_on = False  # where a donor was in a segment
        self._speed = 0.0

    def deal(self, loader: Any, split: Split | None) -> None:
        super().deal(loader, split)
        self._own.deal(loader)

    def change(self) -> None:
        self._own.begin()
        super().change()

    def close(self) -> None:
        super().close()
        self._own.end()
        self.portion = None

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
        self._segment = segment = self._segment_from(self._counters.number)
        self._counters.begin()
        self._trained = self._accumulated = 0
        self._turns.begin_dealt()
        with self._turns.first_failure:
            self._own.batches.begin(segment.epoch, self._inputs.seed())
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

    def _decide(self) -> str:
        joint = self._joint
        agrees = joint.doubts and not self._duties.commands.alone
        divides = there(joint.members) if joint.looks else 0
        return f"{int(agrees)} {divides:x} {int(self._idle)} {int(joint.counts)}"

    def _follow(self, text: str) -> None:
        agrees, divides, idle, counts = text.split(" ")
        self._idle = idle == "1"
        self._joint.settle(counts == "1")
        if agrees == "1":
            self._agree()
        if members := members_of(int(divides, 16)):
            self._divide(members)

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
        self._now, self.portion, self._over = None, None, self._joint.over and not self._idle
        self._closes = not self._over or self._final
        if not self._over and not self._idle:
            with self._turns.first_failure:
                data, self.portion = self._own.take()
        if self.portion is None:
            self._turns.begin_turn(has_batch=False, gives_nothing=not self._over)
            return batch_to_show(self._loader)
        self._turns.begin_turn(has_batch=True)
        return data

    def _end_turn(self) -> None:
        counters, segment, joint = self._counters, self._segment, self._joint
        assert segment is not None
        before = counters.number - 1  # Lightning has counted this turn
        if self.portion is not None:
            last = self._own.computed() / len(self.portion.sizes)
            self._speed = _KEPT * self._speed + (1 - _KEPT) * last if self._speed else last
            self._rounds.seconds = self._speed
        if self._over:
            counters.advance(before, segment.stop)
            self._turns.end_dealt()
        else:
            counters.advance(before, min(max(joint.number, before), segment.stop - 1))
