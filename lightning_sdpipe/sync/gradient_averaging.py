"""A worker's half of all-reduce data parallelism: gradients are averaged before the optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_sdpipe.errors import NonFiniteError
from lightning_sdpipe.exchange.encoded_rounds import EncodedRounds
from lightning_sdpipe.exchange.gradient_rounds import GradientRounds
from lightning_sdpipe.exchange.sectioned import SectionedRounds
from lightning_sdpipe.sync.copy_most_advanced import copy_most_advanced_parts
from lightning_sdpipe.sync.mover_choice import hosts_of
from lightning_sdpipe.sync.synchronizer import Replica, Synchronizer
from lightning_sdpipe.topology.groups import Replicas


class GradientAveraging(Synchronizer):
    """Averages every gradient over the replicas of the stage that train in the same round.

    A pipeline whose data ends earlier than that of others keeps taking part until they have finished too, with nothing
    to add. The mean is over those that still train, and at the end it takes over what they have come to.
    """

    def __init__(self, replica: Replica, bucket_bytes: int) -> None:
        super().__init__(replica)
        self._buckets = _rounds(replica, bucket_bytes)
        self._rounds = 0
        self._update = 0
        self.gradients = self

    @property
    def rounds(self) -> int | None:
        """See the base class: the first ones may be in full precision."""
        return self._buckets.updates if isinstance(self._buckets, EncodedRounds) else None

    @rounds.setter
    def rounds(self, before: int | None) -> None:
        if isinstance(self._buckets, EncodedRounds) and before is not None:
            self._buckets.updates = before

    @property
    def equal_at_start(self) -> Replicas | None:
        """See the base class."""
        return self.replica.parts[0].among

    def gradient_ready(self, number: int, gradient: Tensor) -> None:
        """See :class:`~lightning_sdpipe.pipeline.gradients.GradientExchange`, as for the next two."""
        self._buckets.gradient_ready(number, gradient)

    def complete(self, gradients: Sequence[Tensor | None]) -> None:
        self._buckets.complete(gradients)

    def finish(self) -> list[Tensor | None]:
        outcome = self._buckets.wait()
        if outcome.nonfinite:
            raise NonFiniteError(
                f"the gradients of pipelines {outcome.nonfinite}, stage {self.replica.stage}, for update "
                f"{self._update}, counted from 0 since training started"
            )
        self._rounds += 1
        gradients = outcome.gradients
        if self.replica.shared is not None:
            by_parameter = dict(zip(self.replica.trained, gradients, strict=True))
            self.replica.shared.hand_on(by_parameter)
            gradients = list(by_parameter.values())
        if not isinstance(self._buckets, EncodedRounds):  # torch sends them
            replicas = self.replica.count
            self.statistics.traffic.add(2 * (replicas - 1) * self._buckets.nbytes // replicas)
        self.statistics.count(outcome.members, outcome.seconds_waiting, outcome.seconds_averaging)
        return gradients

    def synchronise(self) -> None:
        """Nothing to do: equal parameters took an equal step."""
        self._update += 1

    def start(self) -> None:
        self._buckets.arrange()  # what trains may have changed
        self._rounds = 0

    def stop(self) -> None:
        nothing: list[Tensor | None] = [None] * len(self.replica.trained)
        while True:  # until all pipelines are here
            self._buckets.complete(nothing, trains=False)
            if self._buckets.wait().members == 0:
                break

    def resynchronise(self) -> None:
        self.make_parameters_equal()

    def make_parameters_equal(self) -> None:
        copy_most_advanced_parts(self.replica, self._rounds)

    def average_buffers(self) -> None:
        """See the base class; the averages of the weights were taken over with them."""
        self.replica.average_buffers()


def _rounds(replica: Replica, bucket_bytes: int) -> GradientRounds | SectionedRounds:
    if replica.sections is not None:
        return SectionedRounds(replica.trained, replica.sections, bucket_bytes, replica.watch)
    exchange, replicas = replica.exchange, replica.groups.replicas()
    if exchange.is_full and exchange.hierarchy == "flat":
        return GradientRounds(replica.trained, replicas, bucket_bytes, replica.watch)
    return EncodedRounds(
        replica.trained,
        replicas,
        replica.groups.replicas(replica.groups.side_channel(replica.timeout)),
        bucket_bytes,
        replica.watch,
        exchange.payload,
        hosts_of(replica),
        replica.timeout.total_seconds(),
        replica.loss_scale,
    )
