"""Rounds that survive their members: a member that has the result of a round that broke off hands it over, or those
without try again. After a failure a worker asks the scheduler, with ``together``.

Rounds of gradients: every pipeline that goes on has the same mean. A worker reports ready as its turn begins, so the
members are known before the backward has filled a bucket. If a member has the mean, it hands it over, bit for bit. If
none has, the members that are left compute one of the same gradients.

Rounds of an outer optimizer: all bases stay in one line. If a member has the new base, it hands over the base that it
has by then. If none has it, those that are left make the round again, of the same models, if one of them has the newest
base; otherwise the round is dropped, and each keeps what it brought. :mod:`lightning_sdpipe.policies.outer_rounds` has
the rules.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch.distributed as dist
from torch import Tensor, nn

from lightning_sdpipe import meter
from lightning_sdpipe.errors import ConfigurationError, WorkerFailedError
from lightning_sdpipe.exchange.background import Background
from lightning_sdpipe.exchange.collectives import SumInPlace
from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.encoded_rounds import EncodedPresentRounds
from lightning_sdpipe.exchange.moving import pieces_of
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.exchange.outer_state import NewBase, OuterState
from lightning_sdpipe.exchange.present_rounds import Batch, PresentRounds, Round
from lightning_sdpipe.p2p import labelled
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler.client.client import SchedulerClient
from lightning_sdpipe.topology.groups import Replicas, Traffic
from lightning_sdpipe.worker.elastic.barriers import Barriers
from lightning_sdpipe.worker.elastic.epoch_process_groups import EpochGroups

log = logging.getLogger(__name__)

_MARKS = 2**24
_DONE, _NOT = b"\x01", b"\x00"
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Connections:
    """The connections of one worker to others, over which rounds go."""

    worker: Worker
    client: SchedulerClient
    """That of the scheduler, which is asked after a failure."""
    epochs: EpochGroups
    """Groups of its replicas."""
    barriers: Callable[[], Barriers]
    """Returns the barriers of its stage."""
    traffic: Traffic
    """Counts the bytes that this worker sends in rounds."""


class HandOvers:
    """Base of one worker's rounds: gives the results of groups to members that lack them, and receives those that this
    worker lacks."""

    def __init__(self, connections: Connections) -> None:
        self._worker, self._client = connections.worker, connections.client
        self._epochs, self._barriers, self._traffic = connections.epochs, connections.barriers, connections.traffic
        self.retried = self.taken = 0
        """Number of groups that were tried again, and of those whose result was handed over."""
        self._given: set[tuple[int, int]] = set()

    def _give(self, sequence: int, group: Group, replicas: Replicas) -> bool:
        """Send the result of the group ``sequence`` to the other members of ``group``; return False if it is not kept.

        Raises:
            WorkerFailedError: one of them is gone.
        """
        raise NotImplementedError

    def _ask(
        self, group: Group, take: Callable[[int, Group, Group, Replicas], _Result]
    ) -> tuple[_Result | None, Group]:
        """Return what ``take`` makes of the result of ``group``, if a member has it; else the members that try again.

        ``take`` is called with the source, the broken group, the group in which the source sends, and its replicas.
        """
        while True:
            self._epochs.wait_for_newest()
            again = self._client.regroup(group)
            if again.source < 0:
                self.retried += 1
                return None, again.group
            self._epochs.use(again.group)
            try:
                result = take(again.source, group, again.group, self._epochs.replicas(again.group))
            except WorkerFailedError as error:
                log.info("the result of group %d did not come: %s", group.sequence, str(error).splitlines()[0])
                self._epochs.give_up(again.group)
                self._epochs.use(None)
            else:
                self.taken += 1
                return result, group

    def hand_over(self, sequence: int, group: Group) -> None:
        """Give the other members of ``group`` the result of the group ``sequence``, which this worker has. Does not
        wait; any thread may call it, and again."""
        if (sequence, group.epoch) not in self._given:
            self._given.add((sequence, group.epoch))
            threading.Thread(target=self._hand, args=[sequence, group], name="handing over", daemon=True).start()

    def _hand(self, sequence: int, group: Group) -> None:
        try:
            if not self._give(sequence, group, self._epochs.replicas(group)):
                log.warning("the result of group %d is asked for, and not kept any more", sequence)
        except WorkerFailedError as error:  # members that did not get it ask again
            log.info("the result of group %d was not taken: %s", sequence, str(error).splitlines()[0])


class SurvivingRounds(HandOvers):
    """The rounds of gradients of one worker.

    Args:
        on_any_stage: returns whether it is so on any stage of this pipeline; every stage asks at the same point.
        timeout: seconds of a transfer.
    """

    def __init__(self, connections: Connections, on_any_stage: Callable[[bool], bool], timeout: float) -> None:
        super().__init__(connections)
        self.on_any_stage = on_any_stage
        self._beside = Background("averaging gradients", 2 * timeout)
        self.batch: Batch | None = None
        """Batch that the next round is trained on, if any."""
        self.seconds = 0.0
        """Seconds of a micro-batch, which the others learn in the next round; 0 if they are not known."""
        self.on_round: Callable[[Round], None] = lambda outcome: None
        """Called with each outcome, before the optimizer steps."""
        self._rounds: PresentRounds | None = None
        self._sums: SumInPlace | None = None
        self._group: Group | None = None
        self._number = -1  # of the round; pipelines differ in how many rounds they took part in without a batch
        self._waits = False
        self._thread = 0

    def arrange(
        self,
        parameters: Sequence[nn.Parameter],
        cap: int,
        watch: bool,
        exchange: Exchange,
        loss_scale: Callable[[], float],
    ) -> None:
        """Take the gradients of ``parameters`` from now on."""
        rounds = parameters, self._worker, cap, watch, self._look
        self._rounds = (
            PresentRounds(*rounds)
            if exchange.is_plain
            else EncodedPresentRounds(*rounds, exchange.payload, self._beside, loss_scale)
        )

    @property
    def rounds(self) -> PresentRounds:
        """Rounds that take the gradients."""
        assert self._rounds is not None, "arrange() comes first"
        return self._rounds

    def begin(self, update: int, weight: float) -> None:
        """Begin the turn of ``update``, with a batch of that ``weight``, if it is known already."""
        self.rounds.mark, self.rounds.batch, self.rounds.weight = update % _MARKS, self.batch, weight
        self.rounds.seconds = self.seconds
        self._group, self._waits, self._thread = None, True, threading.get_ident()
        self._number += 1
        self._client.ready(self._number)

    def finish(self) -> tuple[Round, float]:
        """Wait for the outcome; return it, and the seconds until the members were known.

        Raises:
            ConfigurationError: replicas are at different updates.
            WorkerFailedError: the run is over, or goes on without this process.
        """
        start = time.perf_counter()
        if self._group is None:
            with labelled("group"), meter.current().waiting():
                self._known(self._client.group())
        assert self._group is not None
        group, waited = self._group, time.perf_counter() - start
        outcome: Round | None = None
        while outcome is None:
            try:
                if not self.rounds.begun:
                    self._begin(group)
                outcome = self.rounds.outcome()
            except WorkerFailedError as error:
                log.info("the round %d has broken: %s", group.sequence, str(error).splitlines()[0])
                self._break_off(group)
                self.rounds.begin_again()
                outcome, group = self._ask(
                    group, lambda source, broken, _, replicas: self.rounds.take_over(source, broken, replicas)
                )
        self._epochs.use(None)
        if len(group.members) > 1:
            self._client.completed(group.sequence)
        self._check(outcome)
        self.on_round(outcome)
        return outcome, waited

    def check_equal(self, digest: int) -> None:
        """End the run if replicas, which are all together, are not equal.

        Raises:
            ConfigurationError: names the pipelines that differ.
        """
        met = self._barriers().meet(b"%x" % digest)
        others = [i for i, said in zip(met.pipelines, met.values, strict=True) if said != b"%x" % digest]
        if others:
            raise ConfigurationError(
                f"The parameters of stage {self._worker.stage} are not the same in pipelines {self._worker.pipeline} "
                f"and {others}, though all have averaged the same gradients. Something has changed them on some ranks "
                "only: change parameters in all pipelines alike, or not at all."
            )

    def _look(self) -> None:
        """Send a full bucket if the members are known."""
        if self._waits and threading.get_ident() == self._thread:
            group = self._client.group_if_known()
            if group is not None:
                self._known(group)
                try:
                    self._begin(group)
                except WorkerFailedError:  # tried again when all gradients are there
                    log.debug("the process group of round %d is gone", group.sequence)

    def _known(self, group: Group) -> None:
        self._group, self._waits = group, False

    def _give(self, sequence: int, group: Group, replicas: Replicas) -> bool:
        return self.rounds.hand_over(sequence, group, replicas)

    def _begin(self, group: Group) -> None:
        if len(group.members) == 1:
            self.rounds.begin(group, None)
            return
        self._epochs.use(group)
        replicas = self._epochs.replicas(group)
        if self._sums is None or self._sums.replicas.group is not replicas.group:
            self._sums = SumInPlace(replace(replicas, traffic=self._traffic))
        self.rounds.begin(group, self._sums, self._epochs.hosts(group))

    def _break_off(self, group: Group) -> None:
        if self.rounds.begun:
            self._epochs.give_up(group)
        self._epochs.use(None)

    def _check(self, outcome: Round) -> None:
        mine = outcome.marks[self._worker.pipeline]
        others = {i: mark for i, mark in outcome.marks.items() if mark != mine}
        if others:
            raise ConfigurationError(
                f"Pipeline {self._worker.pipeline} has averaged gradients of its update {mine}, and others of another "
                f"one ({others}, by pipeline). All must make the same updates: whether a batch is trained must not "
                "depend on the rank."
            )


class SurvivingBases(HandOvers):
    """The rounds of an outer optimizer of one worker."""

    def __init__(self, connections: Connections) -> None:
        super().__init__(connections)
        worker = self._worker
        self._alone = Replicas(cast(dist.ProcessGroup, None), {worker.pipeline: 0}, worker.stage, worker.pipeline)
        self._state: OuterState | None = None
        self._round = -1
        """Sequence of the round whose result this worker has not adopted yet."""

    @property
    def state(self) -> OuterState:
        """State of this worker."""
        assert self._state is not None, "arrange() comes first"
        return self._state

    def arrange(self, state: OuterState) -> None:
        self._state = state

    def run(self, tensors: Sequence[Tensor], group: Group) -> NewBase | None:
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
                new, group = self._ask(
                    group, lambda source, _, again, replicas: self.state.take_over(source, again, replicas)
                )
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
        self._client.completed(self._round)

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
                replicas = replace(self._epochs.replicas(group), traffic=self._traffic)
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
