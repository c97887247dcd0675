"""Worker's halves of the rules that average models in groups.

They are those of SDPipe §3.1, Algorithm 1, step B, and of policies that hear of a worker after its step: P-Reduce,
Algorithm 2.
"""

from __future__ import annotations

import time

from lightning_sdpipe.exchange.background import Overlapped
from lightning_sdpipe.exchange.buckets import tensors_of
from lightning_sdpipe.exchange.moving import Mover, finish
from lightning_sdpipe.p2p import labelled
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.sync.mover_choice import Begin, mover_among_groups
from lightning_sdpipe.sync.synchronizer import Replica, Synchronizer
from lightning_sdpipe.topology.groups import Replicas

_REMEMBERED = 100
"""Number of groups over which the inequality of weights is averaged."""


class ModelAveraging(Synchronizer):
    """Announces when this worker is ready, learns its group, and averages the stage's parameters with it: at once, or
    while the next mini-batch is computed.

    Args:
        replica: this worker.
        every: the scheduler is asked in the updates that this number divides; all others are local.
        mover: moves the parameters; by default the replica's exchange chooses it.
        begin: called with the models whenever training begins; then they are equal on all replicas.
    """

    def __init__(
        self, replica: Replica, every: int = 1, mover: Mover | None = None, begin: Begin | None = None
    ) -> None:
        super().__init__(replica)
        self._every = every
        self._mover = mover or mover_among_groups(replica)
        self._begin = begin
        self._late: Overlapped | None = None
        if replica.exchange.overlap == "step":
            self._late = Overlapped(self._mover, replica.timeout.total_seconds())
        self._inequality = 1.0
        """Inequality k Σ w² of weights, averaged over the last groups."""
        self._groups = 0

    @property
    def models_averaged(self) -> float:
        """Number of models. A group of k with weights w counts its members' updates as kw instead of equally. So the
        mean of all N moves by the mean of N / (k Σ w²) updates: 1 / Σ w² if the group is of all, and N if weights
        are equal, whatever the group."""
        return self.replica.count / self._inequality

    def announce(self, iteration: int) -> None:
        """Tell the scheduler that this worker is ready; see the base class."""
        if iteration % self._every == 0:
            self.replica.client.ready(iteration)
            self.announced = True

    @property
    def equal_at_start(self) -> Replicas | None:
        return None if self._begin is None else self.replica.parts[0].among

    @property
    def shares_next(self) -> bool:
        return self.announced

    def synchronise(self) -> None:
        """Learn the group that answers :meth:`announce` and average the parameters with its members, whose last
        backwards may still be under way. If that goes on beside the next mini-batch, the result of the last average is
        added first."""
        start = time.perf_counter()
        waited = self._end_late()
        members = 1
        if self.announced:
            asked = time.perf_counter()
            with labelled("group"):
                group = self.replica.client.group()
            self.announced = False
            waited += time.perf_counter() - asked
            tensors = tensors_of(self.replica.exchanged, beside=self._late is not None)
            members = len(group.members)
            if self._late is not None:
                self._late.begin(tensors, group)
            else:
                waited += finish(self._mover.start(tensors, group))
                self._let_copies_follow(members)
            self._weigh(group)
        self.statistics.count(members, waited, time.perf_counter() - start - waited)

    def start(self) -> None:
        if self._begin is not None:
            self._begin(tensors_of(self.replica.exchanged))

    def stop(self) -> None:
        """Finish the average that is under way, since others wait for it."""
        self._end_late()

    def _end_late(self) -> float:
        """End the average beside the last mini-batch, if there is one; return the seconds waited for it."""
        if self._late is None:
            return 0.0
        members, waited = self._late.members, self._late.end()
        self._let_copies_follow(members)
        return waited

    def _let_copies_follow(self, members: int) -> None:
        """Update the copies that other stages of this pipeline hold, if a group of several members has averaged."""
        if members > 1 and self.replica.shared is not None:
            self.replica.shared.make_equal()

    def _weigh(self, group: Group) -> None:
        self._groups = min(self._groups + 1, _REMEMBERED)
        inequality = len(group.weights) * sum(weight**2 for weight in group.weights)
        self._inequality += (inequality - self._inequality) / self._groups


def in_groups(replica: Replica, policy: PolicyConfig) -> ModelAveraging:
    """Return the half of a policy that forms groups of models. Workers announce before their step ends or, if the
    policy ``announces`` late, after it."""
    return ModelAveraging(replica) if policy.announces == "early" else LateAveraging(replica)


class LateAveraging(ModelAveraging):
    """Announces after the optimizer's step, when the worker's model can be averaged at once."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self._due: int | None = None

    def announce(self, iteration: int) -> None:
        """Do not ask the scheduler yet: the others of the group would wait for the backward that remains."""
        self._due = iteration

    @property
    def shares_next(self) -> bool:
        return self._due is not None

    def synchronise(self) -> None:
        """Tell the scheduler that this worker is ready, and average with the group that it names."""
        if self._due is not None:
            super().announce(self._due)
            self._due = None
        super().synchronise()
