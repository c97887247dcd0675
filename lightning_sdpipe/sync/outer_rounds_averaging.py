"""Worker's half of DiLoCo in rounds that some workers may miss: where pipelines come and go, or weigh by their samples.

A round runs at once, or with ``overlap="step"`` beside the next mini-batches. Its outcome is put into the model by the
thread that trains, whole, after ``delay`` updates. If it breaks off, that thread reports ready again: a worker that has
the new base hands it over, or those that are left make the round again with the same models
(:mod:`~lightning_sdpipe.policies.rounds_of_all`). A worker that has missed rounds gets the newest base in the same way,
and keeps what it has trained since its own.

Where pipelines come and go, the scheduler counts the updates of all. Heartbeats report them, every eighth of a second
once a pipeline has made its share. A worker is ready for the next round as soon as it has adopted the last one, and
trains on. When the scheduler names the members, stage 0 tells the other stages before a turn, and all begin with the
model after it. So no pipeline waits for a slow one.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.exchange.background import Background, Job
from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.moving import copied, pieces_of
from lightning_sdpipe.exchange.outer_model import Fragments, Nesterov, OuterModel
from lightning_sdpipe.exchange.outer_state import NewBase, OuterRoundsModel, OuterState
from lightning_sdpipe.p2p import labelled, waiting_for
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.sync.barriers import Barriers
from lightning_sdpipe.sync.outer_averaging import OuterAveraging
from lightning_sdpipe.sync.peers import gives_outcomes
from lightning_sdpipe.sync.synchronizer import Replica
from lightning_sdpipe.topology.groups import Replicas

log = logging.getLogger(__name__)


class OuterRoundsAveraging(OuterAveraging):
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
        """The update after which the worker adopts the outcome of the round that is under way."""
        self.by_samples = by_samples
        self._samples = self._samples_sent = 0.0
        """Samples since the last round, and those that are in the round under way."""
        self._stands = False
        """Whether the worker is ready for a round while it trains on."""
        self._called: int | None = None
        """Life of the scheduler that has named the round that begins after this turn."""
        self._group: Group | None = None
        """Members of that round, if they are known already."""
        (self._whole,) = self._fragments
        self._state = OuterState(self._whole.common)
        self._peers = peers = replica.peers
        if peers is not None:
            gives_outcomes(peers.client, self._state.hand_over, peers.epochs.replicas)
            own = peers.worker
            self._alone = Replicas(cast(dist.ProcessGroup, None), {own.pipeline: 0}, own.stage, own.pipeline)
        else:
            self._aside = self._replicas if self._is_beside else replica.beside()
            gives_outcomes(replica.client, self._state.hand_over, lambda group: self._aside)
        self._beside = Background("a round of bases beside training", 2 * replica.timeout.total_seconds())
        self._job: Job | None = None
        self._underway = False
        self._came: NewBase | None = None
        self._number = -1
        """Number of the last report of being ready."""
        self._sent: list[Tensor] = []
        self._before = 0
        """Number of updates since the round before the last one."""
        self._given: tuple[int, int, list[Tensor]] | None = None
        self._begins_anew = True
        """Whether the model is the base when training starts next."""

    @classmethod
    def codec(cls, replica: Replica, nesterov: Nesterov, mix: float) -> OuterModel:
        return OuterRoundsModel(replica.exchange.payload, replica.pipeline, nesterov, mix)

    @property
    def loose(self) -> int:  # type: ignore[override]
        """Number of updates since the last round that is whole."""
        return self._whole.since + (self._before if self._underway else 0)

    def weigh(self, samples: float) -> None:
        self._samples += samples

    def announce(self, iteration: int) -> None:
        """Tell the scheduler that this worker is ready, and what its base is, if a round begins after this update;
        where the scheduler says when one begins, unless it was told already."""
        self._update = iteration + 1
        if self._peers is None:
            self.announced = bool(self._schedule.begin(self._update))
        elif not self._stands and not self._underway:
            self._stands = True
        else:
            return
        if self.announced or self._stands:
            self._say_ready()

    def _say_ready(self, again: bool = False) -> None:
        self._number = max(self._update - 1, self._number + 1)
        self.replica.client.ready(self._number, self._state.rounds, again)

    @property
    def called(self) -> int | None:
        self._look()
        if self._stands and self._group is None and self._whole.since >= self._schedule.every:
            self.replica.client.beat_soon()  # the round may be due, and heartbeats tell of updates
        return None if self._group is None else self.replica.client.named_by

    def _look(self) -> None:
        """Note the group of the next round if it is known, or get the base that this worker has missed. Drop a group of
        an earlier scheduler: stage 0 may not have heard of it, and then it would never be begun."""
        client, peers = self.replica.client, self._peers
        if peers is not None and self._group is not None and client.is_of_an_earlier_scheduler(self._group):
            peers.epochs.give_up(self._group)  # another member may have begun it
            self._group = None
            self._say_ready()
        if self._stands and self._group is None:
            self._group = self._round_of(client.group_if_known())

    def _round_of(self, group: Group | None) -> Group | None:
        """Return ``group`` if it is of a round. Else get the base that it hands over, and report ready again."""
        if group is None or group.source is None:
            return group
        self._catch_up(group)
        self._say_ready()
        return None

    def _catch_up(self, group: Group) -> None:
        """Get the base that is handed over in ``group``, and keep what was trained since this worker's own."""
        if (new := self._handed_over(group)) is not None:
            self._adopts(new)

    def take_part(self, called: int) -> None:
        self._called = called

    @property
    def shares_next(self) -> bool:
        return self.announced or self._called is not None

    def synchronise(self) -> None:
        """Adopt the base of the last round, and run or begin the round that is due."""
        start = time.perf_counter()
        self._whole.since += 1
        waited, members = 0.0, 1
        if self._underway and self._update >= self._until:
            waited = self._adopt()
        if not self.shares_next:
            self._look()
        else:
            asked = time.perf_counter()
            with labelled("group"):
                group = self._named_group()
            waited += time.perf_counter() - asked
            self._called = None
            if group is not None:
                self._group, self.announced, self._stands = None, False, False
                members = len(group.members)
                self._begin_round(group)
        self.statistics.count(members, waited, time.perf_counter() - start - waited)

    def _named_group(self) -> Group | None:
        """Wait for the group of the round that begins now. Return None if the scheduler that named it was started again
        before this stage heard of it: then this stage is ready for the next one, and is handed what it has missed."""
        client, called = self.replica.client, self._called
        while self._group is None:
            group = client.group() if called is None else client.group_unless_restarted(called)
            if group is None:
                return None
            self._group = self._round_of(group)
        return self._group if called is None or client.named_by == called else None

    def settle(self) -> None:
        """Take part in a round whose members have been named already, and adopt its outcome, or that of one that is
        under way."""
        if self._stands:
            self._stands, self._called = False, None
            group, self._group = self._group, None
            if group is None and (group := self.replica.client.withdraw()) is not None:
                self.replica.client.join()
            if group is not None and group.source is not None:
                self._catch_up(group)
            elif group is not None:
                self._begin_round(group)
        self._adopt()

    def start(self) -> None:
        """Begin with the model as the base, unless the worker only rested; or with the base that another pipeline
        gave."""
        if not self._begins_anew:
            return
        self._begins_anew = False
        self._samples = 0.0
        super().start()
        given, self._given = self._given, None
        if given is not None and given[-1]:  # a donor that has not begun has no base besides its model
            self._state.load(*given)
            self._state.put(self._whole.tensors)
        self.replica.client.contains(self._state.rounds)

    def make_parameters_equal(self) -> None:
        """Run a round of all that are present."""
        self._begins_anew = True
        if self._peers is None:
            self._base = self._state.rounds
            super().make_parameters_equal()
            self._state.rounds = self._base
        else:
            self._state.samples = self._samples if self.by_samples else None
            meet(self._peers.barriers, self._state, self._whole.tensors, self._whole.since)
            self._average_frozen()
        self.replica.client.contains(self._state.rounds)

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
        state = self._state
        return {"base": state.rounds, "sequence": state.sequence, "pieces": self._whole.common.copied_base()}

    def take(self, state: Mapping[str, Any]) -> None:
        self._given = state["base"], state["sequence"], state["pieces"]

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
        """Compute the outcome of a round: None if it breaks off, where pipelines come and go."""
        self._came = self._reaching(group, lambda replicas, mover: self._state.make(tensors, group, mover, replicas))

    def _handed_over(self, group: Group) -> NewBase | None:
        """Return the base that is handed over in ``group``; None if it does not come."""
        assert group.source is not None
        source = group.source.pipeline
        return self._reaching(group, lambda replicas, mover: self._state.take_over(source, group, replicas), aside=True)

    def _reaching(
        self, group: Group, do: Callable[[Replicas, EncodedMean], NewBase], aside: bool = False
    ) -> NewBase | None:
        """Return what ``do`` makes with the replicas of ``group``, and a mover among them; None if it breaks off, where
        pipelines come and go. Elsewhere, exchanges ``aside`` from a round may need other process groups."""
        peers = self._peers
        if peers is None:
            return do(self._aside if aside else self._replicas, self._whole.mover)
        replicas, hosts, epochs, begun = self._alone, None, peers.epochs, False
        try:
            if len(group.members) > 1:
                epochs.use(group)
                reached = replace(epochs.replicas(group), traffic=peers.traffic)
                replicas = reached if group.source is None else peers.giver(group)
                hosts, begun = epochs.hosts(group), True
            return do(replicas, EncodedMean(replicas, self._state.codec, hosts))
        except WorkerFailedError as error:
            log.info("group %d has broken off: %s", group.sequence, str(error).splitlines()[0])
            if begun:
                epochs.give_up(group)
            epochs.use(None)
            epochs.wait_for_newest()
            return None
        finally:
            epochs.use(None)

    def _adopt(self) -> float:
        """Put the outcome of the round that is under way into the model; return the seconds waited for it."""
        if not self._underway:
            return 0.0
        waited, self._underway = 0.0, False
        if self._job is not None:
            waited, self._job = self._job.wait(), None
        sent = self._sent if self._late else None
        while (new := self._came) is None:
            self._say_ready(again=True)
            with labelled("group"):
                group = self.replica.client.group()
            if group.source is None:
                with torch.no_grad():
                    self._run(sent or self._whole.tensors, group)
            else:
                self._came = self._handed_over(group)
        self._came = None
        if not self._adopts(new, sent):
            self._whole.since += self._before
            self._samples += self._samples_sent
        return waited

    def _adopts(self, new: NewBase, sent: Sequence[Tensor] | None = None) -> bool:
        contained = self._state.adopt(new, self._whole.tensors, sent)
        self.replica.client.contains(self._state.rounds)
        if self._peers is not None:
            self.replica.client.beat_soon()  # others may wait for what this worker has now
        return contained


def meet(barriers: Barriers, state: OuterState, tensors: Sequence[Tensor], since: int) -> None:
    """Run a round of all replicas, which are together, unless none has trained since the last one; ``since`` is
    the number of updates that this worker has made."""
    while True:
        met = barriers.meet(json.dumps([state.rounds, since, 1 if state.samples is None else state.samples]).encode())
        said = dict(zip(met.pipelines, map(json.loads, met.values), strict=True))
        bases = {pipeline: rounds for pipeline, (rounds, *_) in said.items()}
        total = sum(samples for *_, samples in said.values()) or 1  # without samples no replica has moved
        newest = max(bases.values())
        source = min(pipeline for pipeline, rounds in bases.items() if rounds == newest)
        moved = [piece - outer.base for piece, outer in zip(pieces_of(tensors), state.codec.outer, strict=True)]
        given = state.copy()[1] if min(bases.values()) < newest else []
        whole = barriers.weighted_sum(moved, met, {p: samples / total for p, (*_, samples) in said.items()})
        if whole and given:
            whole = barriers.weighted_sum(given, met, {p: float(p == source) for p in bases})
        done = barriers.meet(b"1" if whole else b"0")
        if done.pipelines == met.pipelines and all(value == b"1" for value in done.values):
            break
    trained = any(updates for _, updates, _ in said.values())
    state.adopt(NewBase(newest + trained, moved if trained else [], given), tensors)
