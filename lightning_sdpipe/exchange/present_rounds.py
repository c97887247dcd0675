"""Averaging of gradients among the replicas that are present, by samples, in rounds that may be made again.

The members of a round may be known after its first gradients. Every member adds its weighted gradients to those of the
others, bucket by bucket beside the backward, and finally flags: what each contributes. The mean is the sum over the sum
of the weights, so all members get the same bits. A member without a batch contributes zeros, of no weight.

If the exchange breaks, the round is made again with the same gradients and other members, or its sums are received from
a member that has them. So each keeps the sums, as they were before the optimizer used them, until it knows the members
of the next round.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sdpipe import meter
from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.exchange import transfers
from lightning_sdpipe.exchange.buckets import as_real
from lightning_sdpipe.exchange.collectives import SumInPlace
from lightning_sdpipe.exchange.gradient_rounds import GradientRounds, UnderWay
from lightning_sdpipe.exchange.moving import GroupMean, Mover, Pending, finish, pieces_of, tag_of
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.topology.groups import Replicas

_SCALES = {torch.float16: 2.0**-10}
"""Factors of weighted gradients for types whose range weights by samples would exceed."""
_SAID = 6
"""Number of values of each member in the flags: its weight, the sum of its gradients, which is finite if they are, its
mark, its batch, and its speed."""

Batch = tuple[int, int]
"""Home shard, and number of the batch in it."""


@dataclass(frozen=True)
class Round:
    """The outcome of a round: the means by number, None where no member had a gradient."""

    gradients: list[Tensor | None]
    weight: float  # of all members together; 0 if none had a batch
    members: tuple[int, ...]  # their pipelines
    trained: tuple[int, ...]  # those of them that had a batch
    batches: tuple[Batch, ...]
    nonfinite: tuple[int, ...]  # pipelines whose gradients were not finite
    marks: dict[int, int]  # by pipeline
    seconds: dict[int, float]  # of a micro-batch, by pipeline; 0 where that is not known
    epoch: int  # of membership


@dataclass(frozen=True)
class Sums:
    """The sums of a round, as they were before the optimizer used them, and the group that they are of."""

    group: Group
    tensors: list[Tensor]  # of each bucket, and the flags


class PresentRounds(GradientRounds):
    """Rounds of one worker. In a round, :attr:`weight`, :attr:`mark` and :attr:`batch` are set; then come any number of
    :meth:`gradient_ready`, one :meth:`complete`, one :meth:`begin` at any time, and :meth:`outcome`; after a failure
    :meth:`begin_again`, and :meth:`begin` or :meth:`take_over`.

    Args:
        parameters: see the base class.
        worker: this worker.
        cap: see the base class.
        watch: see the base class.
        look: called when a bucket is full: if the members are known, it calls :meth:`begin`.
    """

    flags_beside_gradients = False

    def __init__(
        self, parameters: Sequence[nn.Parameter], worker: Worker, cap: int, watch: bool, look: Callable[[], None]
    ) -> None:
        self.mark = 0
        """Number below 2²⁴ that must be equal on all members."""
        self.batch: Batch | None = None
        """Batch of these gradients."""
        self.seconds = 0.0
        """Seconds that this worker computes for a micro-batch, for the others to know."""
        self._look, self._own = look, worker
        self._group: Group | None = None
        self._mover: Mover | None = None
        self._sending: deque[Pending] = deque()
        self._given: Sequence[Tensor | None] | None = None
        self._kept: Sums | None = None
        self._memory: list[Tensor] = []
        """Memory of the sums that are kept: fresh memory costs as much as a pass over it."""
        alone = Replicas(cast(dist.ProcessGroup, None), {worker.pipeline: 0}, worker.stage, worker.pipeline)
        super().__init__(parameters, alone, cap, watch)

    @property
    def begun(self) -> bool:
        """True if the members of this round are known."""
        return self._group is not None

    def begin(self, group: Group, mover: SumInPlace | None, hosts: Mapping[int, str] | None = None) -> None:
        """Begin the exchange among the members of ``group``, in which ``mover`` moves tensors; a single member needs no
        mover. ``hosts``, the machines of the members, is ignored here, since all are treated alike."""
        self._kept = None
        self._group = msgspec.structs.replace(group, weights=(1.0,) * len(group.members))
        self._mover = mover or GroupMean(self._replicas)
        self._launch()

    def complete(self, gradients: Sequence[Tensor | None], trains: bool = True, mark: int = 0) -> None:
        """Note the gradients. ``trains`` and ``mark`` are ignored, since attributes hold their values."""
        self._given = gradients
        self._fill(gradients)

    def outcome(self) -> Round:
        """Wait for the means.

        Raises:
            WorkerFailedError: a member is gone, or did not come within the group's timeout.
        """
        assert self._given is not None, "complete() comes before outcome()"
        assert self._group is not None, "begin() comes before outcome()"
        flags = self._flags_of(self._group)
        super()._launch()
        self._reduce(flags)
        with meter.current().waiting(), torch.no_grad():
            while self._sending:
                finish(self._sending.popleft())
        return self._means(Sums(self._group, [*self._flats, flags]))

    def begin_again(self) -> None:
        """Offer the same gradients again for other members, in other memory, since the exchange has failed."""
        given = self._given
        assert given is not None
        self._sending.clear()
        self._begin_round()
        self._group = self._mover = None
        self.complete(given)

    def hand_over(self, group: Group, replicas: Replicas) -> None:
        """Send the sums of the last round to the other members of ``group``, or tell them that none are kept.

        Raises:
            WorkerFailedError: one of the members is gone.
        """
        kept = self._kept
        others = [worker.pipeline for worker in group.members if worker.pipeline != replicas.pipeline]
        tensors = [torch.tensor([-1 if kept is None else kept.group.sequence])]
        tensors += [] if kept is None else pieces_of([as_real(tensor) for tensor in kept.tensors])
        for piece in tensors:
            transfers.begin(dict.fromkeys(others, piece), {}, replicas, tag_of(group)).wait()

    def take_over(self, lacking: Group | None, group: Group, replicas: Replicas) -> Round | None:
        """Receive the outcome of the round ``lacking``, which has broken off, from the source of ``group``; None if the
        source has not kept it.

        Raises:
            WorkerFailedError: the source is gone.
        """
        assert group.source is not None
        source, sequence = group.source.pipeline, torch.tensor([-1])
        transfers.begin({}, {source: sequence}, replicas, tag_of(group)).wait()
        if lacking is None or int(sequence) != lacking.sequence:
            return None
        flags = torch.empty(_SAID * len(lacking.members) + len(self._parameters), dtype=torch.float64)
        tensors = [*(torch.empty_like(flat) for flat in self._flats), flags]
        for piece in pieces_of([as_real(tensor) for tensor in tensors]):
            transfers.begin({}, {source: piece}, replicas, tag_of(group)).wait()
        for flat, taken in zip(self._flats, tensors, strict=False):
            flat.copy_(taken)
        return self._means(Sums(lacking, [*self._flats, flags]))

    @property
    def _flats(self) -> list[Tensor]:
        return [bucket.flat for bucket in self._buckets if bucket.flat is not None]

    def _means(self, sums: Sums) -> Round:
        members = tuple(worker.pipeline for worker in sums.group.members)
        if len(members) > 1:
            self._keep(sums)
        said, used = sums.tensors[-1][: _SAID * len(members)], sums.tensors[-1][_SAID * len(members) :].tolist()
        weights, totals, marks, homes, numbers, speeds = said.view(_SAID, len(members)).tolist()
        weight = sum(weights)
        gradients: list[Tensor | None] = [None] * len(self._parameters)
        for bucket in self._buckets:
            assert bucket.flat is not None
            if weight:
                bucket.flat.div_(self._divisor(weight, len(members), bucket.flat.dtype))
            gradients = [bucket.views[n] if used[n] and n in bucket.views else g for n, g in enumerate(gradients)]
        self._begin_round()
        self._group = self._mover = self._given = None
        return Round(
            gradients if weight else [None] * len(gradients),
            weight,
            members,
            tuple(pipeline for pipeline, own in zip(members, weights, strict=True) if own),
            tuple((int(home), int(number) - 1) for home, number in zip(homes, numbers, strict=True) if number),
            tuple(pipeline for pipeline, total in zip(members, totals, strict=True) if not math.isfinite(total)),
            {pipeline: int(mark) for pipeline, mark in zip(members, marks, strict=True)},
            dict(zip(members, speeds, strict=True)),
            sums.group.epoch,
        )

    def _keep(self, sums: Sums) -> None:
        """Copy the sums into the memory of the last ones, which all remaining members have received by now."""
        if [tensor.shape for tensor in self._memory] != [tensor.shape for tensor in sums.tensors]:
            self._memory = [torch.empty_like(tensor) for tensor in sums.tensors]
        torch._foreach_copy_(self._memory, sums.tensors)
        self._kept = Sums(sums.group, self._memory)

    def _flags_of(self, group: Group) -> Tensor:
        size, place = len(group.members), group.members.index(self._own)
        home, number = self.batch or (0, -1)
        total = float(torch.stack(self._totals).sum()) if self._totals else 0.0
        flags = [0.0] * (_SAID * size + len(self._parameters))
        flags[place : _SAID * size : size] = self.weight, total, self.mark, home, number + 1, self.seconds
        for used in self._used:
            flags[_SAID * size + used] = 1.0
        return torch.tensor(flags, dtype=torch.float64)

    def _divisor(self, weight: float, members: int, dtype: torch.dtype) -> float:
        """Return the number by which the outcome of an exchange is divided, given the weight of all members."""
        return weight * _SCALES.get(dtype, 1.0)

    def _put(self, gradient: Tensor, into: Tensor) -> None:
        torch.mul(gradient, self.weight * _SCALES.get(gradient.dtype, 1.0), out=into)

    def _launch(self) -> None:
        if self._group is None:
            self._look()
        if self._group is not None:
            with suppress(WorkerFailedError):  # outcome() starts again what has not begun, and says so
                super()._launch()

    def _reduce(self, tensor: Tensor) -> UnderWay:
        assert self._group is not None
        assert self._mover is not None
        self._sending.append(self._mover.start([as_real(tensor)], self._group))
        return self._sending[-1]
