"""Rounds of gradients that survive their members: every pipeline that goes on has the same mean.

A worker reports ready as its turn begins, so the members are known before the backward has filled a bucket. After a
failure it asks the scheduler, with ``together``. If a member has the mean, it hands it over, bit for bit. If none has,
the members that are left compute one of the same gradients.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from torch import nn

from lightning_sdpipe import meter
from lightning_sdpipe.errors import ConfigurationError, WorkerFailedError
from lightning_sdpipe.exchange.background import Background
from lightning_sdpipe.exchange.collectives import SumInPlace
from lightning_sdpipe.exchange.encoded_rounds import EncodedPresentRounds
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.exchange.present_rounds import Batch, PresentRounds, Round
from lightning_sdpipe.membership.members import Met
from lightning_sdpipe.p2p import labelled
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.topology.groups import Replicas, Traffic
from lightning_sdpipe.worker.elastic.epoch_process_groups import EpochGroups
from lightning_sdpipe.worker.elastic.hand_overs import HandOvers, TogetherService

log = logging.getLogger(__name__)

_MARKS = 2**24


class Readiness(Protocol):
    """The scheduler's interface to the thread that trains."""

    def ready(self, iteration: int) -> None:
        """Report that this worker takes part in that round."""

    def group(self) -> Group:
        """Wait for the members of the round."""

    def group_if_known(self) -> Group | None:
        """Return the members of the round, if they are known."""


class SurvivingRounds:
    """The rounds of one worker.

    Args:
        worker: this worker.
        client: names the members of rounds.
        line: is asked after a failure.
        epochs: the groups of its replicas.
        meet: waits for the other replicas at a barrier, with what each says.
        on_any_stage: returns whether it is so on any stage of this pipeline; every stage asks at the same point.
        timeout: seconds of a transfer.
        traffic: counts the bytes that this worker sends in rounds.
    """

    def __init__(
        self,
        worker: Worker,
        client: Readiness,
        line: TogetherService,
        epochs: EpochGroups,
        meet: Callable[[bytes], Met],
        on_any_stage: Callable[[bool], bool],
        timeout: float,
        traffic: Traffic,
    ) -> None:
        self._worker, self._client, self._line, self._epochs = worker, client, line, epochs
        self._meet, self.on_any_stage, self._traffic = meet, on_any_stage, traffic
        self._beside = Background("averaging gradients", 2 * timeout)
        self.batch: Batch | None = None
        """Batch that the next round is trained on, if any."""
        self.seconds = 0.0
        """Seconds of a micro-batch, which the others learn in the next round; 0 if they are not known."""
        self.on_round: Callable[[Round], None] = lambda outcome: None
        """Called with each outcome, before the optimizer steps."""
        self.hand_overs = HandOvers(line, epochs, self._give)
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
                outcome, group = self.hand_overs.ask(group, self._take)
        self._epochs.use(None)
        if len(group.members) > 1:
            self._line.completed(group.sequence)
        self._check(outcome)
        self.on_round(outcome)
        return outcome, waited

    def hand_over(self, sequence: int, group: Group) -> None:
        """Give the other members of ``group`` the mean of the group ``sequence``, which this worker has. Do not wait;
        any thread may call it, and again."""
        self.hand_overs.hand_over(sequence, group)

    def check_equal(self, digest: int) -> None:
        """End the run if replicas, which are all together, are not equal.

        Raises:
            ConfigurationError: names the pipelines that differ.
        """
        met = self._meet(b"%x" % digest)
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

    def _take(self, source: int, broken: Group, group: Group, replicas: Replicas) -> Round:
        return self.rounds.take_over(source, broken, replicas)

    def _give(self, sequence: int, group: Group, replicas: Replicas) -> bool:
        return self.rounds.hand_over(sequence, group, replicas)

    def _check(self, outcome: Round) -> None:
        mine = outcome.marks[self._worker.pipeline]
        others = {i: mark for i, mark in outcome.marks.items() if mark != mine}
        if others:
            raise ConfigurationError(
                f"Pipeline {self._worker.pipeline} has averaged gradients of its update {mine}, and others of another "
                f"one ({others}, by pipeline). All must make the same updates: whether a batch is trained must not "
                "depend on the rank."
            )
