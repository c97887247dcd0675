"""Rounds of an outer optimizer that survive their members, in which all bases stay in one line.

If a member has the new base of a round that broke off, it hands over the base that it has by then. If none has it,
those that are left make the round again, of the same models, if one of them has the newest base; otherwise the round is
dropped, and each keeps what it brought. :mod:`lightning_sdpipe.policies.outer_rounds` has the rules.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.moving import pieces_of
from lightning_sdpipe.exchange.outer_state import NewBase, OuterState
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.sync.hand_overs import HandOvers
from lightning_sdpipe.sync.peers import Peers
from lightning_sdpipe.topology.groups import Replicas

log = logging.getLogger(__name__)

_DONE, _NOT = b"\x01", b"\x00"


class SurvivingBases:
    """The rounds of an outer optimizer of one worker, whose base is in ``state``."""

    def __init__(self, peers: Peers, state: OuterState) -> None:
        self._peers, self.state = peers, state
        self._epochs, worker = peers.epochs, peers.worker
        self._alone = Replicas(cast(dist.ProcessGroup, None), {worker.pipeline: 0}, worker.stage, worker.pipeline)
        self._hand_overs = HandOvers(peers, self._give)
        self._round = -1
        """Sequence of the round whose result this worker has not adopted yet."""

    def run(self, tensors: Sequence[Tensor], group: Group) -> NewBase | None:
        """Compute the outcome of the round of ``group`` for the model ``tensors``; None if the round was dropped. Any
        thread may call it."""
        new: NewBase | None = None
        while new is None:
            lineage, self._round = group.lineage, group.sequence
            assert lineage is not None
            if not lineage.goes_on:
                log.warning("the round %d is dropped: no member that is left has the newest base", group.sequence)
                return None
            try:
                new = self._make(tensors, group)
            except WorkerFailedError as error:
                log.info("the round %d has broken: %s", group.sequence, str(error).splitlines()[0])
                self._epochs.use(None)
                broken = group.sequence
                new, group = self._hand_overs.ask(
                    group, lambda source, _, again, replicas: self.state.take_over(source, again, replicas)
                )
                if new is None and group.lineage is not None and group.lineage.newest >= broken:
                    log.warning("what this worker brought to round %d is lost: later rounds may have it", broken)
                    new = NewBase(self.state.base)
        self._epochs.use(None)
        return new

    def accept(self, new: NewBase, adopt: Callable[[], None]) -> None:
        """Call ``adopt``, by which this worker takes over the outcome of the last round; the thread that trains calls
        it."""
        if not new.moved and new.base > self._round:  # the scheduler is to count on this base before it is there
            self._peers.client.leave()
            self._peers.client.join()
        adopt()
        self._peers.client.completed(self._round)

    def meet(self, tensors: Sequence[Tensor], since: int) -> None:
        """Run a round of all replicas, which are together, unless none has trained since the last one; ``since`` is
        the number of updates that this worker has made."""
        state, barriers = self.state, self._peers.barriers
        while True:
            met = barriers.meet(json.dumps([state.base, since, 1 if state.samples is None else state.samples]).encode())
            said = dict(zip(met.pipelines, map(json.loads, met.values), strict=True))
            bases = {pipeline: base for pipeline, (base, *_) in said.items()}
            total = sum(samples for *_, samples in said.values()) or 1  # without samples no replica has moved
            newest = max(bases.values())
            source = min(pipeline for pipeline, base in bases.items() if base == newest)
            moved = [piece - outer.base for piece, outer in zip(pieces_of(tensors), state.codec.outer, strict=True)]
            given = state.copy()[1] if min(bases.values()) < newest else []
            whole = barriers.weighted_sum(moved, met, {p: samples / total for p, (*_, samples) in said.items()})
            if whole and given:
                whole = barriers.weighted_sum(given, met, {p: float(p == source) for p in bases})
            done = barriers.meet(_DONE if whole else _NOT)
            if done.pipelines == met.pipelines and all(value == _DONE for value in done.values):
                break
        trained = any(updates for _, updates, _ in said.values())
        state.adopt(NewBase(newest, moved if trained else [], given), tensors)

    def _make(self, tensors: Sequence[Tensor], group: Group) -> NewBase:
        state, replicas, hosts, begun = self.state, self._alone, None, False
        try:
            if len(group.members) > 1:
                self._epochs.use(group)
                replicas = replace(self._epochs.replicas(group), traffic=self._peers.traffic)
                hosts = self._epochs.hosts(group)
                begun = True
            return state.make(tensors, group, EncodedMean(replicas, state.codec, hosts), replicas)
        except WorkerFailedError:
            if begun:
                self._epochs.give_up(group)
            raise

    def _give(self, sequence: int, group: Group, replicas: Replicas) -> bool:
        self.state.hand_over(group, replicas)
        return True
