"""Worker's half of all-reduce data parallelism: gradients of all replicas are averaged before the optimizer steps.

Where pipelines come and go, :mod:`~lightning_sdpipe.sync.present_averaging` does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.encoded_rounds import EncodedRounds
from lightning_sdpipe.exchange.gradient_rounds import GradientRounds
from lightning_sdpipe.exchange.references import CommonReference
from lightning_sdpipe.exchange.sectioned import SectionedRounds, accompany
from lightning_sdpipe.sync.mover_choice import hosts_of
from lightning_sdpipe.sync.rendezvous import copy_most_advanced_parts
from lightning_sdpipe.sync.synchronizer import GradientSynchronizer, Replica
from lightning_sdpipe.topology.groups import Replicas

_COUNTED = 2**12  # updates, and backwards of one, after which counting begins again: both are sent as one mark


class GradientAveraging(GradientSynchronizer[GradientRounds | SectionedRounds]):
    """Averages every gradient over the replicas of the stage that train in the same round.

    A pipeline whose data ends earlier than that of others keeps taking part, without gradients, until they have
    finished too. The mean is over the pipelines that still train, and at the end it takes over their model.
    """

    def __init__(self, replica: Replica, bucket_bytes: int, by_samples: bool) -> None:
        super().__init__(replica)
        self.buckets = _rounds(replica, bucket_bytes)
        self.by_samples = by_samples
        self._rounds = 0
        self._sent = 0
        """Bytes that torch sends in a round."""
        self._update = 0
        self._mark = 0
        self._amid = False  # backwards have been averaged for an update that is not made yet
        self._together: set[int] = set()  # pipelines that trained in the last round
        self.gradients = self
        self.same_gradients = replica.groups.stage

    @property
    def rounds(self) -> int | None:
        """Number of updates, if the first ones may be in full precision; else None."""
        return self.buckets.updates if isinstance(self.buckets, EncodedRounds) else None

    @rounds.setter
    def rounds(self, before: int | None) -> None:
        if isinstance(self.buckets, EncodedRounds) and before is not None:
            self.buckets.updates = before

    @property
    def equal_at_start(self) -> Replicas | None:
        return self.replica.parts[0].among

    def begin_backward(self, update: int, number: int) -> None:
        """Note the numbers, which replicas tell each other with their gradients."""
        self._mark = (update % _COUNTED) * _COUNTED + number % _COUNTED
        self._amid = True

    def complete(self, gradients: Sequence[Tensor | None]) -> None:
        if isinstance(self.buckets, SectionedRounds):
            self.buckets.complete(gradients)
        else:
            self.buckets.complete(gradients, mark=self._mark)

    def finish(self) -> list[Tensor | None]:
        outcome = self.buckets.wait()
        self._refuse_unlike(outcome.marks, outcome.amid)
        if outcome.nonfinite:
            raise self.not_finite(outcome.nonfinite, self._update)
        self._rounds += 1
        gradients = outcome.gradients
        if self.replica.shared is not None:
            by_parameter = dict(zip(self.replica.trained, gradients, strict=True))
            self.replica.shared.hand_on(by_parameter)
            gradients = list(by_parameter.values())
        self.statistics.traffic.add(self._sent)
        self.statistics.count(outcome.members, outcome.seconds_waiting, outcome.seconds_averaging)
        return gradients

    def _refuse_unlike(self, marks: Mapping[int, int], amid: Set[int]) -> None:
        """Raise ConfigurationError if pipelines that train are at different backwards by their ``marks``, or if one of
        the last round has ended its update, other than those whose data ended ``amid`` it."""
        before, self._together = self._together, {*marks}
        gone = {p: "ended its update" for p in before - self._together - amid if self._mark % _COUNTED > 1}
        if len({*marks.values()}) > 1 or gone:
            at = {p: f"backward {mark % _COUNTED} of update {mark // _COUNTED}" for p, mark in marks.items()}
            told = ", ".join(f"pipeline {pipeline}: {where}" for pipeline, where in sorted((at | gone).items()))
            raise ConfigurationError(
                f"The pipelines do not run the same backwards, whose gradients are averaged ({told}; from 1, and from "
                "0). Let each training_step run as many in all pipelines, whatever is in its batch, or a backward of "
                "the loss times zero; or average models (sync='semi_decentralized'), where each may run others."
            )

    def synchronise(self) -> None:
        """Count the update. Parameters stay equal, since all took an equal step."""
        self._update += 1
        self._amid = False

    def start(self) -> None:
        self.buckets.arrange()  # the trained parameters may have changed
        self._rounds, replicas = 0, self.replica.count
        if not isinstance(self.buckets, EncodedRounds):  # those count what they send
            self._sent = 2 * (replicas - 1) * self.buckets.nbytes // replicas

    def stop(self) -> None:
        if isinstance(self.buckets, GradientRounds):
            self.buckets.left_amid = self._amid
        accompany(self.buckets, len(self.replica.trained))

    def make_parameters_equal(self) -> None:
        copy_most_advanced_parts(self.replica, self._rounds)

    def average_buffers(self) -> None:
        """Make buffers equal; averages of the weights were copied with the parameters."""
        self.replica.average_buffers()


def _rounds(replica: Replica, bucket_bytes: int) -> GradientRounds | SectionedRounds:
    if replica.sections is not None:
        return SectionedRounds(replica.trained, replica.sections, bucket_bytes, replica.watch)
    exchange, replicas = replica.exchange, replica.groups.replicas()
    if exchange.is_plain:
        return GradientRounds(replica.trained, replicas, bucket_bytes, replica.watch)
    beside = replica.beside()
    mover = EncodedMean(beside, CommonReference(exchange.payload, beside.pipeline), hosts_of(replica))
    seconds = replica.timeout.total_seconds()
    return EncodedRounds(replica.trained, replicas, mover, bucket_bytes, replica.watch, seconds, replica.loss_scale)
