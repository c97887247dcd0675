"""Worker's half of DiLoCo in rounds whose members may have different bases: where pipelines come and go, or weigh by
their samples.

A round goes on at once, or with ``overlap="step"`` beside the next mini-batches. Its outcome is put into the model by
the thread that trains, whole, after ``delay`` updates.

Where pipelines come and go, rounds are those of :class:`SurvivingBases`, and the scheduler counts the updates of all.
Heartbeats tell it of them, each eighth of a second where a pipeline has made its share. A worker is ready for the next
round as soon as it has adopted the last one, and trains on. When the scheduler names the members, stage 0 tells the
other stages before a turn, and all begin with the model after it. So no pipeline waits for a slow one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.background import Background, Job
from lightning_sdpipe.exchange.moving import copied
from lightning_sdpipe.exchange.outer_model import Fragments, Nesterov, OuterModel
from lightning_sdpipe.exchange.outer_state import NewBase, OuterState, OwnBase
from lightning_sdpipe.p2p import labelled, waiting_for
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.sync.outer_averaging import OuterAveraging
from lightning_sdpipe.sync.surviving_bases import SurvivingBases
from lightning_sdpipe.sync.synchronizer import Replica


class OwnBaseAveraging(OuterAveraging):
    """Averages in rounds of some replicas. Memory: that of :class:`OuterAveraging`, and the model once more during a
    round; with ``overlap="step"`` a copy of the model besides.

    Args:
        replica: this worker.
        nesterov: options of the outer optimizer.
        schedule: of the rounds, with one fragment.
        by_samples: whether members of a round weigh as much as they have trained samples; else all weigh the same.
    """

    def __init__(self, replica: Replica, nesterov: Nesterov, schedule: Fragments, by_samples: bool) -> None:
        self._late = schedule.delay > 0
        super().__init__(replica, nesterov, schedule, keeps=False)
        self._until = 0
        """The update after which it adopts the outcome of the round that is under way."""
        self.by_samples = by_samples
        self._samples = self._samples_sent = 0.0
        """Samples since the last round, and those that are in the round under way."""
        self._stands = self._takes_part = False
        """Whether it is ready for a round while it trains on, and whether that begins after this turn."""
        self._group: Group | None = None
        """Members of that round, if they are known already."""
        (self._whole,) = self._fragments
        self._state = OuterState(self._whole.common)
        self._bases = None if replica.peers is None else SurvivingBases(replica.peers, self._state)
        self._beside = Background("a round of bases beside training", 2 * replica.timeout.total_seconds())
        self._job: Job | None = None
        self._underway = False
        self._came: NewBase | None = None
        self._sent: list[Tensor] = []
        self._before = 0
        """Number of updates since the round before the last one."""
        self._given: tuple[int, list[Tensor]] | None = None
        self._begins_anew = True
        """Whether the model is the base when training starts next."""

    @classmethod
    def codec(cls, replica: Replica, nesterov: Nesterov, mix: float) -> OuterModel:
        return OwnBase(replica.exchange.payload, replica.pipeline, nesterov, mix)

    @property
    def loose(self) -> int:  # type: ignore[override]
        """Number of updates since the last round that is whole."""
        return self._whole.since + (self._before if self._underway else 0)

    def weigh(self, samples: float) -> None:
        self._samples += samples

    def announce(self, iteration: int) -> None:
        """Tell the scheduler that this worker is ready, and what its base is: if a round begins after this update or,
        where the scheduler says when, unless it has done so."""
        self._update = iteration + 1
        if self._bases is None:
            self.announced = bool(self._schedule.begin(self._update))
        elif not self._stands and not self._underway:
            self._stands = True
        else:
            return
        if self.announced or self._stands:
            self.replica.client.ready(iteration, self._state.base)

    @property
    def called(self) -> bool:
        if self._stands and self._group is None:
            self._group = self.replica.client.group_if_known()
            if self._group is None and self._whole.since >= self._schedule.every:
                self.replica.client.beat_soon()  # the round may be due, and heartbeats tell of updates
        return self._group is not None

    def take_part(self) -> None:
        self._takes_part = True

    @property
    def shares_next(self) -> bool:
        return self.announced or self._takes_part

    def synchronise(self) -> None:
        """Adopt the base of the last round, and run or begin the round that is due."""
        start = time.perf_counter()
        self._whole.since += 1
        waited, members = 0.0, 1
        if self._underway and self._update >= self._until:
            waited = self._adopt()
        if self.shares_next:
            self.announced = self._stands = self._takes_part = False
            asked = time.perf_counter()
            with labelled("group"):
                group, self._group = self._group or self.replica.client.group(), None
            waited += time.perf_counter() - asked
            members = len(group.members)
            self._begin_round(group)
        self.statistics.count(members, waited, time.perf_counter() - start - waited)

    def settle(self) -> None:
        """Take part in a round whose members have been named already, and adopt its outcome, or that of one that is
        under way."""
        if self._stands:
            self._stands = self._takes_part = False
            group, self._group = self._group, None
            if group is None and (group := self.replica.client.withdraw()) is not None:
                self.replica.client.join()
            if group is not None:
                self._begin_round(group)
        self._adopt()

    def start(self) -> None:
        """Begin with the model as the base, unless it only rested; or with the base that another pipeline gave."""
        if not self._begins_anew:
            return
        self._begins_anew = False
        self._samples = 0.0
        super().start()
        self._state.forget()
        given, self._given = self._given, None
        if given is not None and given[1]:  # a donor that has not begun has no base besides its model
            self._state.load(*given)
            self._state.put(self._whole.tensors)

    def make_parameters_equal(self) -> None:
        """Run a round of all that are present."""
        self._begins_anew = True
        if self._bases is None:
            self._base = self._state.base
            super().make_parameters_equal()
            self._state.base = self._base
            return
        self._state.samples = self._samples if self.by_samples else None
        self._bases.meet(self._whole.tensors, self._whole.since)
        self._average_frozen()

    def _weights(self) -> list[float] | None:
        if not self.by_samples:
            return None
        counts = torch.zeros(self.replica.count, dtype=torch.float64, device=self.replica.device)
        counts[self.replica.pipeline] = self._samples
        with waiting_for(self.replica.groups.stage, "the samples that models have moved by"):
            dist.all_reduce(counts, group=self.replica.groups.stage)
        return (counts / counts.sum()).tolist() if counts.any() else None

    def handover(self) -> dict[str, Any]:
        """Return the base, which a newcomer needs."""
        return {"base": self._state.base, "pieces": self._whole.common.copied_base()}

    def take(self, state: Mapping[str, Any]) -> None:
        self._given = state["base"], state["pieces"]

    def _begin_round(self, group: Group) -> None:
        """Run the round of ``group``, or begin it beside training."""
        tensors, self._before, self._whole.since = self._whole.tensors, self._whole.since, 0
        self._underway, self._until = True, self._update + self._schedule.delay
        self._samples, self._samples_sent = 0.0, self._samples
        self._state.samples = self._samples_sent if self.by_samples else None
        if self._late:
            self._sent = copied(tensors, self._sent)
            self._job = self._beside.do(lambda: self._run(self._sent, group))
        else:
            with torch.no_grad():
                self._run(tensors, group)
            self._adopt()

    def _run(self, tensors: Sequence[Tensor], group: Group) -> None:
        """Compute the outcome of a round: None if it was dropped."""
        if group.lineage is None:
            raise ConfigurationError(
                "DiLoCo needs a scheduler that decides by outer_rounds, and this one names no bases in group "
                f"{group.sequence} ({group.reason}). Start it with --policy outer_rounds, or leave --policy out."
            )
        if self._bases is not None:
            self._came = self._bases.run(tensors, group)
        elif group.lineage.goes_on:
            self._came = self._state.make(tensors, group, self._whole.mover, self._replicas)

    def _adopt(self) -> float:
        """Put the outcome of the round that is under way into the model; return the seconds waited for it."""
        if not self._underway:
            return 0.0
        waited, self._underway = 0.0, False
        if self._job is not None:
            waited, self._job = self._job.wait(), None
        new, self._came = self._came, None
        if new is None:  # what was brought is brought again
            self._whole.since += self._before
            self._samples += self._samples_sent
            return waited
        adopt = partial(self._state.adopt, new, self._whole.tensors, self._sent if self._late else None)
        adopt() if self._bases is None else self._bases.accept(new, adopt)
        return waited
