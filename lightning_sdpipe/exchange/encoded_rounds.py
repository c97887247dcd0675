"""Rounds of averaging gradients by encoded messages.

Buckets are encoded, and travel, in a separate thread while the backward goes on. Everything else is as in full
precision. The momentum may be sent instead of the gradient (1-bit Adam, Tang et al. 2021).

Momentum changes slowly, so signs with error feedback follow it far better than they follow gradients. All workers hold
the same m̄. Each sends m = β m̄ + (1 − β) g; of their mean m̄' they make the gradient

ĝ = (m̄' − β m̄) / (1 − β)

for an Adam with that β₁, whose ``exp_avg`` then becomes m̄' by itself. In full precision, ĝ is the mean gradient.
Adam's second moment would be one of ĝ, errors of compression included, so it must not change any more
(:class:`~lightning_sdpipe.optim.FrozenVariance`). Weight decay inside of gradients is Adam's own affair: it enters
``exp_avg`` after this.

m̄ takes as much memory as the gradients. It has the scale of the gradients that are sent: rescale it when a loss scale
changes, and keep the old one if m̄' is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from lightning_sdpipe.errors import NonFiniteError, WorkerFailedError
from lightning_sdpipe.exchange.background import Background, Job
from lightning_sdpipe.exchange.buckets import as_real
from lightning_sdpipe.exchange.codec import Members
from lightning_sdpipe.exchange.collectives import SumInPlace
from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.gradient_rounds import Averaged, GradientRounds, UnderWay
from lightning_sdpipe.exchange.moving import finish, tag_of
from lightning_sdpipe.exchange.payloads import Payload
from lightning_sdpipe.exchange.payloads.payload import residual_dtype
from lightning_sdpipe.exchange.present_rounds import PresentRounds, Round, Sums
from lightning_sdpipe.exchange.references import CommonReference
from lightning_sdpipe.p2p import Tag
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.topology.groups import Replicas


def momentum_to_send(momentum: Tensor, gradient: Tensor, beta: float) -> Tensor:
    """Return β m̄ + (1 − β) g in a new tensor. Before compression begins, this with the mean gradient is the next
    m̄."""
    return torch.lerp(momentum, gradient.to(momentum.dtype), 1 - beta)


def gradient_to_apply(before: Tensor, after: Tensor, beta: float) -> Tensor:
    """Return ĝ in a new tensor, given m̄ before and after this step."""
    return (after - before).mul_(1 / (1 - beta)).add_(before)


class EncodedRounds(GradientRounds):
    """A :class:`~lightning_sdpipe.exchange.gradient_rounds.GradientRounds` with a payload.

    Memory: a residual as large as the gradients in float32, if the payload has feedback; a momentum likewise.

    Args:
        parameters: see the base class.
        replicas: see the base class; they exchange the flags of a round.
        mover: averages among the same replicas with a common reference, over a process group that nothing else uses
            meanwhile.
        cap: see the base class.
        watch: see the base class.
        timeout: seconds in which a bucket must have travelled.
        scale: gives the current factor of gradients (a loss scale).
    """

    flags_beside_gradients = False

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        replicas: Replicas,
        mover: EncodedMean,
        cap: int,
        watch: bool,
        timeout: float,
        scale: Callable[[], float],
    ) -> None:
        assert isinstance(mover.coding, CommonReference)
        self._mover, self._coding, self._payload = mover, mover.coding, mover.coding.payload
        self._current_scale = scale
        self._scale = 1.0  # the scale of the round
        self._trains = True
        self.updates = 0
        """Number of rounds in which any replica trained since a layer was last unfrozen; equal on all replicas."""
        self._background = Background("averaging gradients", 2 * timeout)
        self._momenta: dict[int, Tensor] = {}
        self._scale_of_momenta = 1.0
        size = len(replicas.ranks)
        self._team = Members(tuple(range(size)), (1.0,) * size)  # gradients are divided before they are added
        self._arranged: set[int] = set()
        super().__init__(parameters, replicas, cap, watch)

    def arrange(self) -> None:
        """Begin anew, and forget what was left out. Parameters that were not there before get gradients in full
        precision first, from which their variances are measured."""
        self._coding.drop()
        self._momenta.clear()
        present = {id(parameter) for parameter in self._parameters}
        if present - self._arranged:
            self.updates = 0
        self._arranged = present
        super().arrange()

    def complete(self, gradients: Sequence[Tensor | None], trains: bool = True, mark: int = 0) -> None:
        self._trains = trains
        super().complete(gradients, trains, mark)
        self._trains = True

    def wait(self) -> Averaged:
        """Wait for the averages.

        Raises:
            NonFiniteError: all gradients were finite, but a message could not hold one of them.
        """
        flats = [bucket.flat for bucket in self._buckets]
        averaged = super().wait()
        if self._watch and not averaged.nonfinite:
            _check_range(self._payload, flats)
        if averaged.members:
            if self._payload.momentum:
                for number, flat in enumerate(flats):
                    assert flat is not None
                    self._back_to_gradient(number, flat)
            self.updates += 1
        return averaged

    def _reduce(self, tensor: Tensor) -> UnderWay:
        number = self._launched
        if number == len(self._buckets) or tensor is not self._buckets[number].flat:
            return super()._reduce(tensor)  # the flags
        if number == 0:
            self._scale = self._current_scale()
        scale = self._scale
        if self._payload.momentum:
            self._follow(scale)
            self._to_momentum(number, tensor)
        trains, update = self._trains, self.updates

        def average() -> None:
            coding = self._coding
            coding.follow(scale)
            coding.update = update
            coding.trains = trains or self._mover.hosts is not None  # a host's mean is of those on it that train
            coding.apply(tensor, number, self._mover.average(tensor, number, self._team, Tag.ENCODED_ROUND))

        return self._background.do(average)

    def _follow(self, scale: float) -> None:
        if scale != self._scale_of_momenta:
            for momentum in self._momenta.values():
                momentum.mul_(scale / self._scale_of_momenta)
            self._scale_of_momenta = scale

    def _to_momentum(self, number: int, flat: Tensor) -> None:
        """Replace the gradient by this worker's share of the mean momentum, once compression has begun."""
        if number not in self._momenta:
            self._momenta[number] = torch.zeros_like(flat, dtype=residual_dtype(flat.dtype))
        if self.updates >= self._payload.after and self._trains:
            beta = self._payload.momentum
            flat.mul_(1 - beta).add_(self._momenta[number], alpha=beta / self._size)

    def _back_to_gradient(self, number: int, flat: Tensor) -> None:
        """Replace the momentum by the gradient that makes Adam's own first moment the mean momentum."""
        before, beta = self._momenta[number], self._payload.momentum
        if self.updates < self._payload.after:
            after = momentum_to_send(before, flat, beta)
        else:
            after = flat.to(before.dtype, copy=True)
            flat.copy_(gradient_to_apply(before, after, beta))
        if torch.isfinite(after.sum()):
            before.copy_(after)


class ReferenceOfPresent(CommonReference):
    """A codec for gradients of members that come and go: the code that chooses the members drops residuals."""

    def meets(self, team: Members) -> None:
        """No-op."""


class EncodedPresentRounds(PresentRounds):
    """A :class:`~lightning_sdpipe.exchange.present_rounds.PresentRounds` with a payload, in which all gradients weigh
    the same.

    All members drop their residuals when the members are not those of the last round, and after a round that broke off,
    since process groups, and with them epochs, are new then. A member without a batch keeps its residual.

    Args:
        parameters: see the base class, as for the next four.
        worker: this worker.
        cap: see the base class.
        watch: see the base class.
        look: see the base class.
        payload: any payload that sends gradients.
        beside: the thread in which buckets are encoded and travel.
        scale: gives the current factor of gradients (a loss scale).
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        worker: Worker,
        cap: int,
        watch: bool,
        look: Callable[[], None],
        payload: Payload,
        beside: Background,
        scale: Callable[[], float],
    ) -> None:
        self.coding = ReferenceOfPresent(payload, worker.pipeline)
        self._beside, self._current_scale = beside, scale
        self._members: tuple[int, tuple[Worker, ...]] | None = None
        self._encoded: EncodedMean | None = None
        self._sum: SumInPlace | None = None
        self._jobs: list[Job] = []
        self._failed: list[bool] = []
        super().__init__(parameters, worker, cap, watch, look)

    def begin(self, group: Group, mover: SumInPlace | None, hosts: Mapping[int, str] | None = None) -> None:
        """Begin a round. ``mover`` adds up the flags, and its replicas average the gradients: by machine, if ``hosts``
        are given."""
        if self._members != (group.epoch, group.members):
            self.coding.drop()
        self._members = group.epoch, group.members
        self._sum, self._encoded = mover, None if mover is None else EncodedMean(mover.replicas, self.coding, hosts)
        self._jobs, self._failed = [], []
        super().begin(group, mover, hosts)

    def begin_again(self) -> None:
        """Give the round up, and drop what was left out when no message of it is under way any more."""
        for job in self._jobs:
            with suppress(WorkerFailedError):
                job.wait()
        self.coding.drop()
        super().begin_again()

    def _divisor(self, weight: float, members: int, dtype: torch.dtype) -> float:
        return weight / members

    def _put(self, gradient: Tensor, into: Tensor) -> None:
        torch.mul(gradient, self.weight, out=into)

    def _means(self, sums: Sums) -> Round:
        outcome = super()._means(sums)
        if self._watch and not outcome.nonfinite:
            _check_range(self.coding.payload, outcome.gradients)
        return outcome

    def _reduce(self, tensor: Tensor) -> UnderWay:
        if self._encoded is None or self._sum is None:
            return super()._reduce(tensor)
        assert self._group is not None
        group, encoded, adds, number, failed = self._group, self._encoded, self._sum, self._launched, self._failed
        team = Members(Members.of(group).members, (1 / len(group.members),) * len(group.members))
        trains = self.weight > 0 or encoded.hosts is not None  # a host's mean is of those on it that train
        update, scale = self.mark, self._current_scale()
        is_bucket = number < len(self._buckets)

        def average() -> None:
            coding = self.coding
            coding.trains, coding.update = trains, update
            coding.follow(scale)
            coding.apply(tensor, number, encoded.average(tensor, number, team, tag_of(group)))

        def work() -> None:
            if failed:  # others would take a later message for the one that they wait for
                raise WorkerFailedError("an earlier message of this round has failed")
            try:
                average() if is_bucket else finish(adds.start([as_real(tensor)], group))
            except BaseException:
                failed.append(True)
                raise

        self._jobs.append(self._beside.do(work))
        self._sending.append(_InBackground(self._jobs[-1]))
        return self._sending[-1]


class _InBackground:
    """A :class:`~lightning_sdpipe.exchange.moving.Pending` that another thread carries out, whole."""

    def __init__(self, job: Job) -> None:
        self.seconds_waiting = 0.0
        self._job = job

    def wait(self) -> bool:
        self.seconds_waiting += self._job.wait()
        return False

    def commit(self) -> None:
        """No-op, since it has been committed."""

    def abort(self) -> None:
        """No-op: the job's result is of no use."""


def _check_range(payload: Payload, means: Sequence[Tensor | None]) -> None:
    """Raise NonFiniteError if messages could not hold a gradient, although all gradients were finite."""
    totals = [mean.sum(dtype=torch.float32) for mean in means if mean is not None] if payload.overflows else []
    if totals and not torch.stack(totals).isfinite().all():
        raise NonFiniteError(f"a gradient beyond the range of {payload}, which another payload has")
