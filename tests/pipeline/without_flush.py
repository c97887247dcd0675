"""What a pipeline without a flush computes, in one process and in plain PyTorch.

There are turns, in each of which all stages run the forward of one mini-batch. What stage j applies at a turn is the
gradient of an earlier one: that is all that is late here, since in the order of turns every weight has one value, and
the gradient of a mini-batch is that of the whole model at the values of its turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

NEVER = math.inf


@dataclass
class LossScale:
    """Of 16-bit mixed precision; the last stage's."""

    value: float
    growth_interval: int
    tracker: int = 0
    on_the_way: float = NEVER  # the smallest scale that overflowed on other stages and is not known to the last one
    skipped: int = 0  # how many sets of parameters were not updated

    def update(self, overflowed: float) -> None:
        if overflowed < NEVER:
            self.value, self.tracker = min(self.value, overflowed / 2), 0
            return
        self.tracker += 1
        if self.tracker == self.growth_interval:
            self.value, self.tracker = 2 * self.value, 0


@dataclass
class Window:
    """The mini-batches of one update."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    loss_scale: float = 0.0
    last: int = -1  # the turn of its last mini-batch


class WithoutFlush:
    """Trains ``model`` as a pipeline would.

    Args:
        model: whole.
        loss: of the model and a mini-batch.
        optimizer: of the model.
        owners: the stages that hold each parameter.
        num_stages: M.
        accumulate: A.
        clip: the norm above which gradients are clipped.
        loss_scale: as above.
        after_step: called after each step that Lightning counts, for the learning rate.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any], Tensor],
        optimizer: torch.optim.Optimizer,
        owners: Mapping[str, Sequence[int]],
        num_stages: int,
        accumulate: int = 1,
        clip: float | None = None,
        loss_scale: LossScale | None = None,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.named = dict(model.named_parameters())
        self.loss, self.optimizer, self.owners, self.num_stages = loss, optimizer, owners, num_stages
        self.accumulate, self.clip, self.loss_scale, self.after_step = accumulate, clip, loss_scale, after_step
        self.first = {name: owners[name][0] for name in self.named}
        self.turn = 0
        self.begun = 0  # the turn of the first mini-batch since the pipeline was empty
        self.closed: list[Window] = []
        self.open = Window()
        self.applied = [0] * num_stages  # how many windows, of parameters whose first owner is each stage
        self.backwards = [0] * num_stages  # the turn of the next mini-batch that goes backward on each stage
        self._forget()

    def epoch(self, batches: Sequence[Any], pauses: Sequence[int] = ()) -> None:
        """Trains on all, with a pause after each number of ``pauses``, and at the end."""
        for number, batch in enumerate(batches, 1):
            self._forward(batch)
            closes = number % self.accumulate == 0 or number == len(batches)
            if closes:
                self.open.last = self.turn
                self.closed.append(self.open)
                self.open = Window()
            self._step_at_a_turn(closes)
            self.turn += 1
            if number in pauses or number == len(batches):
                self._drain()

    def _forward(self, batch: Any) -> None:
        half: AbstractContextManager[Any] = nullcontext()
        scale = 1.0
        if self.loss_scale is not None:
            half, scale = torch.autocast("cpu", torch.half, cache_enabled=False), self.loss_scale.value
        with half:
            loss = self.loss(batch)
        found = torch.autograd.grad(loss * scale, list(self.named.values()), allow_unused=True)
        for name, gradient in zip(self.named, found, strict=True):
            if gradient is not None:
                before = self.open.gradients.get(name, torch.zeros(()))
                self.open.gradients[name] = before + gradient / scale
        self.open.loss_scale = max(self.open.loss_scale, scale)

    def _lateness(self, stage: int) -> int:
        return self.num_stages - 1 - stage

    def _step_at_a_turn(self, closes: bool) -> None:
        due = [
            closes and count < len(self.closed) and self.closed[count].last + self._lateness(stage) <= self.turn
            for stage, count in enumerate(self.applied)
        ]
        for stage in range(self.num_stages):  # the norms that come with the activations
            self.earlier[stage] = sum(self.squares[:stage])
        reaches_the_last, on_the_way = NEVER, self.loss_scale
        if on_the_way is not None:
            reaches_the_last, on_the_way.on_the_way = on_the_way.on_the_way, NEVER
        ran = {
            stage: [self.turn - self._lateness(stage)]
            for stage in range(self.num_stages)
            if self.turn - self._lateness(stage) >= self.begun
        }
        self._update(due, ran, reaches_the_last)
        if closes:
            self.after_step()

    def _drain(self) -> None:
        while any(count < len(self.closed) for count in self.applied):
            due = [count < len(self.closed) for count in self.applied]
            ran = {}
            for stage in range(self.num_stages):
                if due[stage]:
                    last = self.closed[self.applied[stage]].last
                    ran[stage] = list(range(self.backwards[stage], last + 1))
            self._update(due, ran, NEVER)
        self.begun = self.turn
        self.backwards = [self.turn] * self.num_stages
        self._forget()

    def _forget(self) -> None:
        self.squares, self.earlier, self.later = ([0.0] * self.num_stages for _ in range(3))
        self.told: dict[tuple[int, int], float] = {}  # with the gradient of a mini-batch, by a stage

    def _update(self, due: Sequence[bool], ran: Mapping[int, Sequence[int]], reaches_the_last: float) -> None:
        """Where it is ``due``, of the parameters whose first owner the stage is; ``ran`` are the backwards before."""
        sets: dict[tuple[int, ...], list[str]] = {}
        for name in self.named:
            sets.setdefault(tuple(self.owners[name]), []).append(name)
        overflows = dict.fromkeys(range(self.num_stages), NEVER)
        updating = {stage for owners in sets if due[owners[0]] for stage in owners}
        updating |= {stage for stage in range(self.num_stages) if due[stage]}
        for owners, names in sets.items():
            window = self.closed[self.applied[owners[0]]] if due[owners[0]] else Window()
            gradients = {name: window.gradients[name] / self.accumulate for name in names if name in window.gradients}
            if self.loss_scale is not None and not all(bool(g.isfinite().all()) for g in gradients.values()):
                gradients = {}
                self.loss_scale.skipped += 1
                for stage in owners:
                    overflows[stage] = min(overflows[stage], window.loss_scale)
            for name in names:
                self.named[name].grad = gradients.get(name)
        if self.clip is not None:
            self._clip(updating, ran)
        for stage, is_due in enumerate(due):
            self.applied[stage] += is_due
            if ran.get(stage):
                self.backwards[stage] = ran[stage][-1] + 1
        self.optimizer.step()
        if self.loss_scale is not None:
            self.loss_scale.on_the_way = min(self.loss_scale.on_the_way, *list(overflows.values())[:-1])
            self.pending = min(reaches_the_last, overflows[self.num_stages - 1], getattr(self, "pending", NEVER))
            if self.num_stages - 1 in updating:
                self.loss_scale.update(self.pending)
                self.pending = NEVER

    def _clip(self, updating: set[int], ran: Mapping[int, Sequence[int]]) -> None:
        norms = {}
        for stage in reversed(range(self.num_stages)):
            turns = ran.get(stage, ())
            for turn in turns:
                if (stage + 1, turn) in self.told:
                    self.later[stage] = self.told[stage + 1, turn]
                if turn == turns[-1] and stage in updating:
                    self._own_square(stage)
                self.told[stage, turn] = self.squares[stage] + self.later[stage]
            if not turns and stage in updating:
                self._own_square(stage)
            norms[stage] = math.sqrt(self.earlier[stage] + self.squares[stage] + self.later[stage])
        for name, p in self.named.items():
            if p.grad is not None and self.clip is not None:
                p.grad = p.grad * min(1.0, self.clip / (norms[self.first[name]] + 1e-6))

    def _own_square(self, stage: int) -> None:
        own = [p.grad for name, p in self.named.items() if self.first[name] == stage and p.grad is not None]
        self.squares[stage] = sum(float(g.square().sum()) for g in own)
