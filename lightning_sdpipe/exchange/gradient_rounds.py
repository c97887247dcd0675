"""Averaging gradients over replicas in flat buckets, each as soon as the backward has filled it.

The order of buckets is that of the parameters' numbers, so it is the same on all replicas, and a bucket never overtakes
the one before it. After the last bucket every replica sends flags: whether it trains at all, whether its gradients are
finite, which parameters have a gradient, and a number that must be the same on all. So replicas without gradients can
take part, all know which replica failed and which has another model, and a parameter that no replica used has no
gradient afterwards, as in one process. Flags travel behind the gradients of the last bucket if that is small, since a
separate collective costs more than they do. Such a bucket waits for the end of the backward, which fills it anyway.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.buckets import as_real
from lightning_sdpipe.p2p import waiting_for
from lightning_sdpipe.topology.groups import Replicas

SMALL = 2**20
"""Largest size, in bytes, of a last bucket that flags travel with, and smallest size of a bucket of a divided model."""

_AWAY, _AMID = -1, -2  # marks of replicas that do not train


@dataclass(frozen=True)
class Averaged:
    """The outcome of a round: the mean gradients by number, over ``members`` replicas that train. All are complete; the
    caller puts them in the place of the model's gradients."""

    gradients: list[Tensor | None]
    members: int
    nonfinite: list[int]  # pipelines whose gradients were not finite
    seconds_waiting: float  # until every replica had computed its gradients
    seconds_averaging: float  # from then on
    marks: dict[int, int] = field(default_factory=dict)  # marks of the replicas that train, by pipeline
    amid: set[int] = field(default_factory=set)  # pipelines that train no more, and left amid an update


class UnderWay(Protocol):
    """A bucket that is being reduced."""

    def wait(self) -> object:
        """Wait until the bucket is reduced."""


class _Alone:
    """The sum over one replica, which needs no wait."""

    def wait(self) -> None:
        pass


@dataclass
class _Bucket:
    numbers: list[int]
    sizes: list[int]
    room: int = 0
    """Elements behind the gradients."""
    sent: Tensor | None = None
    """The tensor ``flat`` with ``flags`` behind it, if there is room."""
    flat: Tensor | None = None
    flags: Tensor | None = None
    views: dict[int, Tensor] = field(default_factory=dict)
    filled: set[int] = field(default_factory=set)
    work: UnderWay | None = None


class GradientRounds:
    """Averages gradients of ``parameters``, numbered by their position, over ``replicas``.

    A round consists of any number of :meth:`gradient_ready`, one :meth:`complete` and one :meth:`wait`. All replicas
    run the same rounds, which leave the gradients of the model alone.

    Args:
        parameters: equal in shape and order on all members; call :meth:`arrange` when the sequence has changed.
        replicas: replicas of which this worker is one.
        cap: bytes after which a bucket is full; at most a quarter of all bytes, but at least :data:`SMALL`, since the
            backward cannot hide a model that is one bucket.
        watch: whether to check that gradients are finite.
    """

    flags_beside_gradients = True
    """Whether flags may be sent as gradients are."""

    def __init__(self, parameters: Sequence[nn.Parameter], replicas: Replicas, cap: int, watch: bool = True) -> None:
        self._parameters = parameters
        self._replicas = replicas
        self._pipelines = list(replicas.pipelines)
        self._size = len(self._pipelines)
        self._place = self._pipelines.index(replicas.pipeline)
        self._watch = watch
        self._cap = cap
        self.weight = 1.0
        """Weight of this replica's gradients in the mean; to be set before the first one of a round."""
        self.left_amid = False
        """Whether this replica, if it does not train, stopped when its gradients had been averaged for an update that
        it has not made."""
        self.arrange()

    def arrange(self) -> None:
        """Lay out the buckets for the present parameters; all members must do so between the same rounds."""
        self.nbytes = sum(parameter.nbytes for parameter in self._parameters)
        self._layout = _layout(self._parameters, min(self._cap, max(self.nbytes // 4, SMALL)))
        self._shapes = [parameter.shape for parameter in self._parameters]
        self._sizes = [[self._parameters[number].numel() for number in numbers] for numbers in self._layout]
        self._bucket_of = {number: index for index, numbers in enumerate(self._layout) for number in numbers}
        last = [self._parameters[number] for number in self._layout[-1]] if self._layout else []
        self._together = (
            self.flags_beside_gradients
            and bool(last)
            and last[0].dtype in (torch.float32, torch.float64)  # others could not hold a mark
            and sum(parameter.nbytes for parameter in last) <= SMALL
        )
        self.early = range(len(self._parameters) - (len(last) if self._together else 0))
        """Numbers of the parameters whose buckets are sent as soon as they are full."""
        self.device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._begin_round()

    def _begin_round(self) -> None:
        # fresh memory in every round: the optimizer's gradients are views of the last round's
        self._buckets = [_Bucket(*of_bucket) for of_bucket in zip(self._layout, self._sizes, strict=True)]
        if self._together:
            self._buckets[-1].room = 1 + 2 * self._size + len(self._parameters)
        self._launched = 0
        self._used: set[int] = set()
        self._totals: list[Tensor] = []  # of each bucket; finite if all its gradients are
        self._flags: tuple[Tensor, UnderWay] | None = None

    def gradient_ready(self, number: int, gradient: Tensor) -> None:
        """Take the complete gradient of parameter ``number``. Start averaging its bucket if it was the last one.

        Raises:
            ConfigurationError: the gradient is sparse, or grew after it had been sent.
        """
        if gradient.is_sparse:
            raise ConfigurationError(
                f"A parameter of shape {tuple(gradient.shape)} has a sparse gradient, which cannot be "
                "averaged. Use dense gradients (Embedding(sparse=False))."
            )
        bucket = self._buckets[self._bucket_of[number]]
        if bucket.work is not None:
            raise ConfigurationError(
                f"The gradient of a parameter of shape {tuple(gradient.shape)} changed after it had been sent: one "
                "backward computed it in several parts. Use torch.utils.checkpoint with use_reentrant=False."
            )
        self._put(gradient, self._views(bucket)[number])
        bucket.filled.add(number)
        self._used.add(number)
        if len(bucket.filled) == len(bucket.numbers):
            self._launch()

    def complete(self, gradients: Sequence[Tensor | None], trains: bool = True, mark: int = 0) -> None:
        """End the backward: ``gradients`` are all gradients by number; :meth:`gradient_ready` may have had some.

        Args:
            gradients: None for parameters without one.
            trains: False for a replica that only takes part for the sake of the others.
            mark: a number below 2²⁴ that the others get to see, if this one trains.
        """
        self._fill(gradients)
        last = self._buckets[-1] if self._together else None
        if last is not None:
            self._look_at(last)
        head = 1 + 2 * self._size
        said = [0.0] * (head + len(self._parameters))
        said[0] = self.weight * trains
        said[1 + self._size + self._place] = mark if trains else _AMID if self.left_amid else _AWAY
        for number in self._used:
            said[head + number] = 1
        flags = torch.tensor(said, dtype=torch.float32)
        if last is None:
            flags = flags.to(self.device)
        else:
            assert last.flags is not None
            flags = last.flags.copy_(flags)
        if self._totals:
            flags[1 + self._place] = self._totals[0] if len(self._totals) == 1 else torch.stack(self._totals).sum()
        self._flags = flags, self._reduce(flags) if last is None else self._send(last)

    def wait(self) -> Averaged:
        """Wait for the means over the replicas that train; a parameter that none of them used has no mean.

        Raises:
            WorkerFailedError: another replica failed, or did not come within the group's timeout.
        """
        assert self._flags is not None, "complete() comes before wait()"
        start = time.perf_counter()
        flags, work = self._flags
        self._wait(work)
        weight, *values = flags.tolist()
        totals, marks, used = values[: self._size], values[self._size : 2 * self._size], values[2 * self._size :]
        all_there = time.perf_counter()
        gradients: list[Tensor | None] = [None] * len(self._parameters)
        for bucket in self._buckets:
            assert bucket.work is not None
            assert bucket.flat is not None
            if bucket.work is not work:
                self._wait(bucket.work)
            if 0 < weight != self._size:
                bucket.flat.mul_(self._size / weight)
            for number in bucket.numbers:
                if used[number]:
                    gradients[number] = bucket.views[number]
        self._begin_round()
        averaging = time.perf_counter() - all_there
        nonfinite = [p for p, total in zip(self._pipelines, totals, strict=True) if not math.isfinite(total)]
        seen = {p: int(mark) for p, mark in zip(self._pipelines, marks, strict=True) if mark >= 0}
        amid = {p for p, mark in zip(self._pipelines, marks, strict=True) if mark == _AMID}
        return Averaged(gradients, len(seen), nonfinite, all_there - start, averaging, seen, amid)

    def _fill(self, gradients: Sequence[Tensor | None]) -> None:
        """Put all remaining gradients into the buckets, and zeros where there is none."""
        for number, gradient in enumerate(gradients):
            if gradient is not None and number not in self._used:
                self.gradient_ready(number, gradient)
        for bucket in self._buckets:
            for number in bucket.numbers:
                if number not in bucket.filled:
                    self._views(bucket)[number].zero_()
                    bucket.filled.add(number)
        self._launch()

    def _put(self, gradient: Tensor, into: Tensor) -> None:
        torch.div(gradient, self._size, out=into)
        if self.weight != 1.0:
            into.mul_(self.weight)

    def _views(self, bucket: _Bucket) -> dict[int, Tensor]:
        if bucket.flat is None:
            first = self._parameters[bucket.numbers[0]]
            total = sum(bucket.sizes)
            bucket.sent = torch.empty(total + bucket.room, dtype=first.dtype, device=first.device)
            bucket.flat = bucket.sent
            if bucket.room:
                bucket.flat, bucket.flags = bucket.sent.split_with_sizes([total, bucket.room])
            parts = bucket.flat.split_with_sizes(bucket.sizes)
            bucket.views = {n: part.view(self._shapes[n]) for n, part in zip(bucket.numbers, parts, strict=True)}
        return bucket.views

    def _launch(self) -> None:
        """Start the buckets that are full and whose turn it is."""
        while self._launched < len(self._buckets):
            bucket = self._buckets[self._launched]
            if bucket.room or len(bucket.filled) < len(bucket.numbers):
                return
            self._look_at(bucket)
            self._send(bucket)

    def _look_at(self, bucket: _Bucket) -> None:
        assert bucket.flat is not None
        if self._watch:
            self._totals.append(as_real(bucket.flat).sum(dtype=torch.float32))

    def _send(self, bucket: _Bucket) -> UnderWay:
        assert bucket.sent is not None
        bucket.work = self._reduce(bucket.sent)
        self._launched += 1
        return bucket.work

    def _reduce(self, tensor: Tensor) -> UnderWay:
        if self._size == 1:
            return _Alone()
        work: UnderWay | None = dist.all_reduce(tensor, group=self._replicas.group, async_op=True)
        assert work is not None
        return work

    def _wait(self, work: UnderWay) -> None:
        with waiting_for(self._replicas.group, "averaging gradients"):
            work.wait()


def _layout(parameters: Sequence[nn.Parameter], cap: int) -> list[list[int]]:
    """Return consecutive numbers of one type and device for each bucket, which is full at ``cap`` bytes."""
    buckets: list[list[int]] = []
    size = 0
    for number, p in enumerate(parameters):
        last = parameters[number - 1]
        if not buckets or size >= cap or (p.dtype, p.device) != (last.dtype, last.device):
            buckets.append([])
            size = 0
        buckets[-1].append(number)
        size += p.numel() * p.element_size()
    return buckets
