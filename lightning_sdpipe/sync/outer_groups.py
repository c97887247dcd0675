"""Worker's half of DiLoCo by groups, whose members average their bases, momenta and models, in full.

Each then makes the step of the outer optimizer with these means. Averages and step are linear, so if weights are equal,
and every pipeline makes as many rounds as the others of its group, the means over all pipelines move as in rounds of
all, whatever the groups are.

A message has the base, momentum and model of the same coordinates, and they are taken over together: if a member is
lost, each coordinate's three values are still of the same members.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sdpipe.exchange.moving import PIECE, finish, pieces_of
from lightning_sdpipe.exchange.outer_model import Fragments, Nesterov
from lightning_sdpipe.p2p import labelled
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.sync.mover_choice import mover_among_groups
from lightning_sdpipe.sync.outer_averaging import OuterAveraging
from lightning_sdpipe.sync.synchronizer import Replica


class OuterGroups(OuterAveraging):
    """Averages in groups that the scheduler names. Memory: that of :class:`OuterAveraging`, and three times the model
    during a round.

    Args:
        replica: this worker.
        nesterov: options of the outer optimizer.
        every: updates between two rounds.
        late: whether the scheduler hears of this worker after the optimizer's step, rather than during the backward.
    """

    def __init__(self, replica: Replica, nesterov: Nesterov, every: int, late: bool) -> None:
        super().__init__(replica, nesterov, Fragments(every), keeps=False)
        (self._whole,) = self._fragments
        self._mover = mover_among_groups(replica)
        self._late = late
        self._due = False
        self._loose = 0
        self._begins_anew = True
        """Whether the model is the base when training starts next."""
        self._given: list[Tensor] = []

    @property
    def loose(self) -> int:  # type: ignore[override]
        """See the base class: the updates since the last round with other members."""
        return self._loose

    @property
    def shares_next(self) -> bool:
        """See the base class."""
        return self._due

    def announce(self, iteration: int) -> None:
        """Tell the scheduler that this worker is ready if a round begins after this update."""
        self._update = iteration + 1
        self._due = bool(self._schedule.begin(self._update))
        if self._due and not self._late:
            self._ready()

    def synchronise(self) -> None:
        """Make the round that is due, with the group that the scheduler names."""
        start = time.perf_counter()
        self._whole.since += 1
        self._loose += 1
        waited, members = 0.0, 1
        if self._due:
            if self._late:
                self._ready()
            with labelled("group"):
                group = self.replica.client.group()
            self.announced = self._due = False
            waited, members = time.perf_counter() - start, len(group.members)
            waited += self._make_round(group)
        self.statistics.count(members, waited, time.perf_counter() - start - waited)

    def start(self) -> None:
        """Begin with the model as the base, unless it only rested; or with the base that another pipeline gave."""
        if not self._begins_anew:
            return
        self._begins_anew = False
        super().start()
        given, self._given = self._given, []
        if given:  # a donor that has not begun has no base besides its model
            for outer, base in zip(self._whole.common.outer, given, strict=True):
                outer.base.copy_(base)
            for number, piece in enumerate(pieces_of(self._whole.tensors)):
                self._whole.common.take_over(piece, number)  # the donor brings what it has trained since

    def stop(self) -> None:
        """Do nothing: no round is under way between two updates."""

    def make_parameters_equal(self) -> None:
        """Make a round of all replicas, unless none has trained since its last one."""
        self._begins_anew = True
        packed = self._packed()
        since = torch.tensor([self._whole.since], device=self.replica.device)
        self.replica.average([*packed, since])  # of integers the largest
        self._take_means(packed, step=bool(since.item()))
        self._whole.since = self._loose = 0
        self._average_frozen()

    def handover(self) -> dict[str, Any]:
        """See the base class: the base."""
        return {"pieces": self._whole.common.copied_base()}

    def take(self, state: Mapping[str, Any]) -> None:
        self._given = state["pieces"]

    def _ready(self) -> None:
        self.replica.client.ready(self._update - 1)
        self.announced = True

    def _make_round(self, group: Group) -> float:
        """Return the seconds waited for other members."""
        packed = self._packed()
        waited = finish(self._mover.start(packed, group)) if len(group.members) > 1 else 0.0
        self._take_means(packed, step=True)
        self._whole.since = 0
        if len(group.members) > 1:
            self._loose = 0
        return waited

    def _packed(self) -> list[Tensor]:
        """Return copies of base, momentum and model, of which those of the same coordinates are in one piece."""
        packed = []
        for states in self._states():
            chunks = (torch.split(state, PIECE // len(states)) for state in states)
            packed += [torch.cat(each) for each in zip(*chunks, strict=True)]
        return packed

    @torch.no_grad()
    def _take_means(self, packed: Sequence[Tensor], step: bool) -> None:
        """Take over what :meth:`_packed` returned, averaged, and make the step of the outer optimizer."""
        means = iter(packed)
        for states, outer in zip(self._states(), self._whole.common.outer, strict=True):
            for chunks in zip(*(torch.split(state, PIECE // len(states)) for state in states), strict=True):
                for chunk, mean in zip(chunks, torch.chunk(next(means), len(states)), strict=True):
                    chunk.copy_(mean)
            model = states[-1]
            if step:
                outer.step(model - outer.base)
            model.copy_(outer.base)

    def _states(self) -> Iterator[list[Tensor]]:
        """Yield base, momentum if there is one, and model of each piece."""
        for outer, piece in zip(self._whole.common.outer, pieces_of(self._whole.tensors), strict=True):
            yield [*outer.state_dict().values(), piece]
