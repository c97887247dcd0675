"""Worker's half of all-reduce where pipelines come and go, in rounds of gradients that survive their members.

Every pipeline that goes on has the same mean. A worker reports ready as its turn begins, so the members are known
before the backward has filled a bucket. It says how many rounds its model contains, and after a failure says so again:
a worker with one more hands the mean over, bit for bit. If there is none, those that are left compute one of the same
gradients (:mod:`~lightning_sdpipe.policies.rounds_of_all`).
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_sdpipe import meter
from lightning_sdpipe.errors import ConfigurationError, MustEndError, WorkerFailedError
from lightning_sdpipe.exchange.background import Background
from lightning_sdpipe.exchange.buckets import tensors_of
from lightning_sdpipe.exchange.collectives import SumInPlace
from lightning_sdpipe.exchange.encoded_rounds import EncodedPresentRounds
from lightning_sdpipe.exchange.present_rounds import Batch, PresentRounds, Round
from lightning_sdpipe.p2p import labelled
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.sync.peers import Peers, gives_outcomes
from lightning_sdpipe.sync.synchronizer import GradientSynchronizer, Replica

log = logging.getLogger(__name__)

_MARKS = 2**24


class PresentAveraging(GradientSynchronizer[PresentRounds]):
    """Averages every gradient over the replicas of the stage that are present. All of them make equal steps, even
    without a batch, so they stay equal, bit for bit.

    Args:
        replica: this worker.
        peers: the replicas that are present.
        bucket_bytes: see :class:`~lightning_sdpipe.exchange.gradient_rounds.GradientRounds`.
        by_samples: whether gradients are weighted by the samples of their mini-batch; else all count the same, as they
            must unless they travel in full.
    """

    def __init__(self, replica: Replica, peers: Peers, bucket_bytes: int, by_samples: bool) -> None:
        super().__init__(replica)
        self._peers, self._cap, self.by_samples = peers, bucket_bytes, by_samples
        self._client, self._epochs = peers.client, peers.epochs
        self._beside = Background("averaging gradients", 2 * replica.timeout.total_seconds())
        gives_outcomes(self._client, lambda *asked: self.buckets.hand_over(*asked), self._epochs.replicas)
        self.again = self.taken = 0
        """Number of rounds that were made again, and of those whose outcome was handed over."""
        self.batch: Batch | None = None
        """Batch that the next round is trained on, if any."""
        self.seconds = 0.0
        """Seconds for a micro-batch, which the others learn in the next round; 0 if they are not known."""
        self.on_round: Callable[[Round], None] = lambda outcome: None
        """Called with each outcome, before the optimizer steps."""
        self._sums: SumInPlace | None = None
        self._group: Group | None = None
        self._rounds = 0  # whose outcome is in the model; equal on all that are up to date
        self._number = -1  # of the last ready
        self._lacking: Group | None = None  # the last round, as long as this worker lacks its outcome
        self._refused = 0  # times in a row that another one could not hand it over
        self._waits = False
        self._thread = 0
        self._came: Round | None = None
        """Outcome of a round that is not in place yet."""
        self.gradients = self

    def begin(self, update: int) -> None:
        self._begin_turn(update, weight=1.0)

    def begin_without_batch(self, update: int) -> bool:
        self._begin_turn(update, weight=0.0)
        self.buckets.complete([None] * len(self.replica.trained))
        outcome = self._wait()
        updates = self._peers.on_any_stage(outcome.weight > 0)
        self._came = outcome if updates else None
        return updates

    def complete(self, gradients: Sequence[Tensor | None]) -> None:
        if self._came is None:
            self.buckets.complete(gradients)

    def finish(self) -> list[Tensor | None]:
        outcome, self._came = self._came or self._wait(), None
        return outcome.gradients

    def start(self) -> None:
        replica, exchange = self.replica, self.replica.exchange
        rounds = replica.trained, self._peers.worker, self._cap, replica.watch, self._look
        self.buckets = (
            PresentRounds(*rounds)
            if exchange.is_plain
            else EncodedPresentRounds(*rounds, exchange.payload, self._beside, replica.loss_scale)
        )

    def make_parameters_equal(self) -> None:
        """End the run if replicas, which are all together, are not equal.

        Raises:
            ConfigurationError: names the pipelines that differ.
        """
        digest = 0
        for tensor in tensors_of(self.replica.parameters):
            digest = zlib.crc32(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data, digest)
        met = self._peers.barriers.meet(b"%x %d" % (digest, self._rounds))
        said = {pipeline: value.split() for pipeline, value in zip(met.pipelines, met.values, strict=True)}
        self._contain(max(int(rounds) for _, rounds in said.values()))  # some had turns without a batch of their own
        others = [pipeline for pipeline, (theirs, _) in said.items() if theirs != b"%x" % digest]
        if others:
            raise ConfigurationError(
                f"The parameters of stage {self.replica.stage} are not the same in pipelines {self.replica.pipeline} "
                f"and {others}, though all have averaged the same gradients. Something has changed them on some ranks "
                "only: change parameters in all pipelines alike, or not at all."
            )

    def resynchronise(self) -> None:
        self.make_parameters_equal()

    def handover(self) -> dict[str, Any]:
        return {"rounds": self._rounds}

    def take(self, state: Mapping[str, Any]) -> None:
        self._contain(state["rounds"])

    # --------------------------------------------------------------- rounds

    def _begin_turn(self, update: int, weight: float) -> None:
        """Begin the turn of ``update``, with a batch of that ``weight``, if it is known already."""
        self.buckets.mark, self.buckets.batch, self.buckets.weight = update % _MARKS, self.batch, weight
        self.buckets.seconds = self.seconds
        self._thread = threading.get_ident()
        self._say_ready()

    def _say_ready(self) -> None:
        self._group, self._waits = None, True
        self._number += 1
        self._client.ready(self._number, self._rounds)

    def _contain(self, rounds: int) -> None:
        self._rounds, self._lacking, self._refused = rounds, None, 0
        self._client.contains(rounds)

    def _wait(self) -> Round:
        """Wait for the outcome of a round, and return it.

        Raises:
            ConfigurationError: replicas are at different updates.
            NonFiniteError: the gradients of a replica are not finite.
            WorkerFailedError: the run is over, or goes on without this process.
        """
        start, waited = time.perf_counter(), 0.0
        outcome, group, tries = None, None, 0
        while outcome is None:
            asked = time.perf_counter()
            if self._group is None:
                with labelled("group"), meter.current().waiting():
                    self._known(self._client.group())
            waited += time.perf_counter() - asked
            group, tries = self._group, tries + 1
            assert group is not None
            outcome = self._outcome_of(group)
        assert group is not None
        self.taken += group.source is not None
        self.again += group.source is None and tries > 1
        self._epochs.use(None)
        self._contain(self._rounds + 1)
        self._check(outcome)
        self.on_round(outcome)
        if outcome.nonfinite:
            raise self.not_finite(outcome.nonfinite, outcome.marks[self.replica.pipeline])
        self.statistics.count(len(outcome.members), waited, time.perf_counter() - start - waited)
        return outcome

    def _outcome_of(self, group: Group) -> Round | None:
        """Return the outcome of the round of ``group``, or what is handed over in it; None if it breaks off. Then this
        worker is ready again."""
        outcome: Round | None = None
        try:
            if group.source is None:
                self._lacking = group
                if not self.buckets.begun:
                    self._begin(group)
                outcome = self.buckets.outcome()
            else:
                outcome = self._handed_over(group)
        except MustEndError:
            raise
        except WorkerFailedError as error:
            log.info("group %d has broken off: %s", group.sequence, str(error).splitlines()[0])
            self._refused = 0  # perhaps the other one has it
            if self.buckets.begun or group.source is not None:
                self._epochs.give_up(group)
        if outcome is None:
            self._epochs.use(None)
            if group.source is None:
                self.buckets.begin_again()
            self._epochs.wait_for_newest()
            self._say_ready()
        return outcome

    def _handed_over(self, group: Group) -> Round | None:
        """Return the outcome that is handed over in ``group``; None if its source cannot."""
        self._epochs.use(group)
        outcome = self.buckets.take_over(self._lacking, group, self._peers.giver(group))
        self._refused += 1
        if outcome is None and self._refused > 2 * self._peers.count:  # each was asked, though some came meanwhile
            raise MustEndError(self.replica.pipeline, "it lacks a round that no other pipeline can hand over any more")
        return outcome

    def _look(self) -> None:
        """Send a full bucket if the members are known."""
        if self._waits and threading.get_ident() == self._thread:
            group = self._client.group_if_known()
            if group is not None:
                self._known(group)
                if group.source is not None:
                    return
                try:
                    self._begin(group)
                except WorkerFailedError:  # tried again when all gradients are there
                    log.debug("the process group of round %d is gone", group.sequence)

    def _known(self, group: Group) -> None:
        self._group, self._waits = group, False

    def _begin(self, group: Group) -> None:
        """Begin the exchange among the members of ``group``."""
        if len(group.members) == 1:
            self.buckets.begin(group, None)
            return
        self._epochs.use(group)
        replicas = self._epochs.replicas(group)
        if self._sums is None or self._sums.replicas.group is not replicas.group:
            self._sums = SumInPlace(replace(replicas, traffic=self._peers.traffic))
        self.buckets.begin(group, self._sums, self._epochs.hosts(group))

    def _check(self, outcome: Round) -> None:
        own = self.replica.pipeline
        mine = outcome.marks[own]
        others = {i: mark for i, mark in outcome.marks.items() if mark != mine}
        if others:
            raise ConfigurationError(
                f"Pipeline {own} has averaged gradients of its update {mine}, and others of another one ({others}, by "
                "pipeline). All must make the same updates: whether a batch is trained must not depend on the rank."
            )
