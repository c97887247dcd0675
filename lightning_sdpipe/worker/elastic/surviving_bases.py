"""Rounds of an outer optimizer that survive their members: all bases stay in one line.

After a failure a worker asks the scheduler, with ``together``. If a member has the new base, it hands over the base
that it has by then. If none has it, those that are left make the round again, of the same models, if one of them has
the newest base; otherwise the round is dropped, and each keeps what it brought.
:mod:`lightning_sdpipe.policies.outer_rounds` has the rules.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, cast

import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.moving import pieces_of
from lightning_sdpipe.exchange.outer_state import NewBase, OuterState
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.topology.groups import Replicas, Traffic
from lightning_sdpipe.worker.elastic.barriers import Barriers
from lightning_sdpipe.worker.elastic.epoch_process_groups import EpochGroups
from lightning_sdpipe.worker.elastic.hand_overs import HandOvers, TogetherService

log = logging.getLogger(__name__)

_DONE, _NOT = b"\x01", b"\x00"


class TakesPart(Protocol):
    """The scheduler's interface to the thread that trains."""

    def join(self) -> None:
        """Take part from now on."""

    def leave(self) -> None:
        """Take part no longer."""


class SurvivingBases:
    """The rounds of one worker.

    Args:
        worker: this worker.
        client: tells the scheduler whether this worker takes part.
        line: is asked after a failure.
        epochs: the groups of its replicas.
        barriers: returns the barriers of its stage.
        traffic: counts the bytes that this worker sends in rounds.
    """

    def __init__(
        self,
        worker: Worker,
        client: TakesPart,
        line: TogetherService,
        epochs: EpochGroups,
        barriers: Callable[[], Barriers],
        traffic: Traffic,
    ) -> None:
        self._client, self._line, self._epochs, self._barriers = client, line, epochs, barriers
        self._traffic = traffic
        self._alone = Replicas(cast(dist.ProcessGroup, None), {worker.pipeline: 0}, worker.stage, worker.pipeline)
        self.hand_overs = HandOvers(line, epochs, self._give)
        self.dropped = 0
        """Number of rounds that were dropped."""
        self._state: OuterState | None = None
        self._round = -1
        """Sequence of the round whose result this worker has not adopted yet."""

    @property
    def state(self) -> OuterState:
        """State of this worker."""
        assert self._state is not None, "arrange() comes first"
        return self._state

    def arrange(self, state: OuterState) -> None:
        """See :class:`~lightning_sdpipe.sync.synchronizer.RoundsOfBases`, as for the next three methods."""
        self._state = state

    def run(self, tensors: Sequence[Tensor], group: Group) -> NewBase | None:
        new: NewBase | None = None
        while new is None:
            lineage, self._round = group.lineage, group.sequence
            assert lineage is not None
            if not lineage.goes_on:
                self.dropped += 1
                log.warning("the round %d is dropped: no member that is left has the newest base", group.sequence)
                return None
            try:
                new = self._make(tensors, group)
            except WorkerFailedError as error:
                log.info("the round %d has broken: %s", group.sequence, str(error).splitlines()[0])
                self._epochs.use(None)
                broken = group.sequence
                new, group = self.hand_overs.ask(group, self._take)
                if new is None and group.lineage is not None and group.lineage.newest >= broken:
                    log.warning("what this worker brought to round %d is lost: later rounds may have it", broken)
                    new = NewBase(self.state.base)
        self._epochs.use(None)
        return new

    def accept(self, new: NewBase, adopt: Callable[[], None]) -> None:
        if not new.moved and new.base > self._round:  # the scheduler is to count on this base before it is there
            self._client.leave()
            self._client.join()
        adopt()
        self._line.completed(self._round)

    def meet(self, tensors: Sequence[Tensor], since: int) -> None:
        state, barriers = self.state, self._barriers()
        while True:
            met = barriers.meet(json.dumps([state.base, since, 1 if state.samples is None else state.samples]).encode())
            said = dict(zip(met.pipelines, map(json.loads, met.values), strict=True))
            bases = {pipeline: base for pipeline, (base, *_) in said.items()}
            total = sum(samples for *_, samples in said.values()) or 1  # of nobody, who has moved by nothing
            newest = max(bases.values())
            source = min(pipeline for pipeline, base in bases.items() if base == newest)
            moved = [piece - outer.base for piece, outer in zip(pieces_of(tensors), state.codec.outer, strict=True)]
            given = state.copy()[1] if min(bases.values()) < newest else []
            whole = barriers.weighted_sum([moved], met, {p: samples / total for p, (*_, samples) in said.items()})
            if whole and given:
                whole = barriers.weighted_sum([given], met, {p: float(p == source) for p in bases})
            done = barriers.meet(_DONE if whole else _NOT)
            if done.pipelines == met.pipelines and all(value == _DONE for value in done.values):
                break
        trained = any(updates for _, updates, _ in said.values())
        state.adopt(NewBase(newest, moved if trained else [], given), tensors)

    def hand_over(self, sequence: int, group: Group) -> None:
        """Give the other members of ``group`` the base of this worker, which has the result of ``sequence``."""
        self.hand_overs.hand_over(sequence, group)

    def _make(self, tensors: Sequence[Tensor], group: Group) -> NewBase:
        state, replicas, hosts, begun = self.state, self._alone, None, False
        try:
            if len(group.members) > 1:
                self._epochs.use(group)
                replicas = replace(self._epochs.replicas(group), traffic=self._traffic)
                hosts = self._epochs.hosts(group)
                begun = True
            return state.make(tensors, group, EncodedMean(replicas, state.codec, hosts), replicas, self._epochs.moved)
        except WorkerFailedError:
            if begun:
                self._epochs.give_up(group)
            raise

    def _take(self, source: int, broken: Group, group: Group, replicas: Replicas) -> NewBase:
        return self.state.take_over(source, group, replicas)

    def _give(self, sequence: int, group: Group, replicas: Replicas) -> bool:
        self.state.hand_over(group, replicas)
        return True
