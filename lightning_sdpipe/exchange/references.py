"""Codecs for members with a common reference, and for members with nothing in common.

With a common reference (gradients, whose reference is zero, and models that were equal once), tensors are scattered,
reduced and gathered, and encoded in both phases (BAGUA §3.4). A message holds the difference from the reference, in any
precision, with error feedback if the payload has it. Of k members each owns one k-th of the buffer: it gets the others'
messages of that part, and answers with their mean, encoded once for all. Every member adopts the contents of the
messages with the means, the owner of a part too, so all end with the same bits.

An owner's own values are not encoded. So with error feedback the residual of its own part is free for what encoding the
mean leaves out, BAGUA's ε beside the δ of the other parts, and over time

Σ means + mean over members of δ + ε = Σ over time of the mean of x.

In groups that change, a member's reference for another's model is its own, which is close (:class:`OwnReference`). In
16 bits, or in full precision, models are sent themselves; in 8 bits they are sent modulo what the receiver knows. All
members read x̂ from the message with x. A member adds *mean of the x̂ − its own x̂* to its model, where in full precision
it would put the mean in its place. So it keeps what its message left out, and the mean over the members is that of
their models before:

    x_j += Q(u) − x̂_j,  u = mean of the x̂ and the owner's own x;   the owner: Q(u) + k (u − Q(u))

where the owner of a part, of k members, adopts what encoding the mean has left out. In 8 bits, errors shrink with the
distance of models (:class:`~lightning_sdpipe.exchange.payloads.Modulo`); with ``Half`` they are as large as the last
bits of 16. (BAGUA's formula (§3.2), the sum of the x̂ itself, does not converge.)

A part is exchanged in full precision in two cases. A sender that has not exchanged yet does not know how far apart
models are. An owner that finds a wrong checksum, or numbers that are not finite, refuses. Its answer can always be
read: the owner knows how far every member is from the mean.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError, WorkerFailedError
from lightning_sdpipe.exchange.codec import Members, Offset, refusal
from lightning_sdpipe.exchange.payloads import ErrorFeedback, Modulo, Payload, Spread
from lightning_sdpipe.exchange.payloads.eight_bit import largest_magnitudes
from lightning_sdpipe.exchange.payloads.payload import residual_dtype

BROKEN_OFF = (
    "an average was broken off, and models have had nothing in common since then: all replicas must be made equal first"
)
LARGEST_SHARE = 4.0
"""Largest share of a mean's error that its owner adds to its own copy, as a multiple of the number of members."""


class CommonReference:
    """A :class:`~lightning_sdpipe.exchange.codec.Codec` for gradients;
    :class:`~lightning_sdpipe.exchange.outer_model.OuterModel` is one for models.

    Memory: a residual as large as what is exchanged, in float32, if the payload has feedback.

    Args:
        payload: any payload.
        seed: seed of stochastic rounding, different on each worker.
    """

    block = 1

    def __init__(self, payload: Payload, seed: int) -> None:
        self.payload = payload
        self._residuals: dict[int, ErrorFeedback] = {}
        self._draws = random.Random(seed)
        self._scale = 1.0
        self._met: set[int] | None = None
        self.update = 0
        """Number of updates before the one that the next messages are of; see :meth:`Payload.at`."""
        self.trains = True
        """False for a worker that only takes part for the sake of the others: it sends zeros, and keeps what it has
        left out. (In a host's mean it sends for its host.)"""

    def follow(self, scale: float) -> None:
        """Set ``scale``, by which gradients are multiplied from now on; see :meth:`ErrorFeedback.follow`."""
        self._scale = scale

    def drop(self) -> None:
        """Forget what was left out."""
        self._residuals.clear()

    def aborted(self) -> None:
        self.drop()

    def meets(self, team: Members) -> None:
        """See the protocol. The residuals are dropped when members have gone, since others own their parts then.

        Raises:
            WorkerFailedError: a member missed the last exchange, so its reference differs.
        """
        members = set(team.members)
        if self._met is not None and members != self._met:
            if strangers := sorted(members - self._met):
                raise WorkerFailedError(
                    f"pipelines {strangers} missed the last average of pipelines {sorted(self._met)}, whose "
                    "differences are from that"
                )
            self.drop()
        self._met = members

    def nbytes(self, n: int, dtype: torch.dtype) -> int:
        return self._payload_of(dtype).nbytes(n)

    def prepared(self, piece: Tensor, number: int) -> Tensor:
        payload = self._payload_of(piece.dtype)
        if payload.feedback:
            if number not in self._residuals:
                self._residuals[number] = ErrorFeedback(piece)
            self._residuals[number].follow(self._scale)
        return piece

    def encode_part(self, x: Tensor, at: Offset) -> Tensor:
        if not self.trains:
            return self._payload_of(x.dtype).message(torch.zeros_like(x))
        return self._payload_of(x.dtype).message(x, self._residual(x, at), self._draws.getrandbits(32))

    def reduce_part(
        self, x: Tensor, at: Offset, weight: float, others: Sequence[tuple[Tensor, float]], members: int
    ) -> tuple[Tensor, Tensor] | None:
        payload = self._payload_of(x.dtype)
        mean = torch.zeros_like(x, dtype=residual_dtype(x.dtype))
        if self.trains:
            mean.add_(x, alpha=weight)
        for message, share in others:
            payload.decode(message, mean, share)
        answer = payload.message(mean, self._residual(x, at), self._draws.getrandbits(32))
        payload.decode(answer, mean)
        return answer, mean

    def decode_mean(self, x: Tensor, at: Offset, mine: Tensor, mean: Tensor) -> Tensor:
        outcome = torch.empty_like(x, dtype=residual_dtype(x.dtype))
        self._payload_of(x.dtype).decode(mean, outcome)
        return outcome

    def exact(self, x: Tensor, mean: Tensor) -> Tensor:
        return mean

    def share(self, x: Tensor, outcome: Tensor) -> Tensor:
        return outcome

    def apply_shared(self, x: Tensor, published: Tensor) -> Tensor:
        return published

    def apply(self, piece: Tensor, number: int, outcome: Tensor) -> None:
        piece.copy_(outcome)

    def _payload_of(self, dtype: torch.dtype) -> Payload:
        return self.payload.at(self.update).on(dtype)

    def _residual(self, x: Tensor, at: Offset) -> Tensor | None:
        if at.piece not in self._residuals or not self._payload_of(x.dtype).feedback:
            return None
        return self._residuals[at.piece].residual[at.start : at.start + len(x)]


class OwnReference:
    """A :class:`~lightning_sdpipe.exchange.codec.Codec` for members with nothing in common.

    Args:
        payload: one whose :attr:`~lightning_sdpipe.exchange.payloads.Payload.modulo` says how models travel.

    Raises:
        ConfigurationError: the payload has none.
    """

    def __init__(self, payload: Payload) -> None:
        if payload.modulo is None:
            raise ConfigurationError(f"{payload} needs a common reference, which groups that change do not have.")
        self._payload = payload
        self._modulo = Modulo(payload.block) if payload.modulo else None
        self.block = payload.block if payload.modulo else 1
        self._spreads: dict[int, Spread] = {}
        self._lengths: dict[int, int] = {}  # of pieces

    def nbytes(self, n: int, dtype: torch.dtype) -> int:
        return (self._modulo or self._payload.on(dtype)).nbytes(n)

    def meets(self, team: Members) -> None:
        """Do nothing: any members may exchange."""

    def prepared(self, piece: Tensor, number: int) -> Tensor:
        self._payload.on(piece.dtype)
        if self._lengths.get(number, len(piece)) != len(piece):  # layers were frozen or unfrozen
            self._spreads.pop(number, None)
        self._lengths[number] = len(piece)
        return piece

    def encode_part(self, x: Tensor, at: Offset) -> Tensor:
        if self._modulo is None:
            return self._payload.on(x.dtype).message(x)
        theta = self._spread(at).theta
        if theta is None:
            return refusal(self._modulo.nbytes(len(x)), x.device)
        first = at.start // self.block
        return self._modulo.message(x, theta[first : first - (-len(x) // self.block)])

    def reduce_part(
        self, x: Tensor, at: Offset, weight: float, others: Sequence[tuple[Tensor, float]], members: int
    ) -> tuple[Tensor, Tensor] | None:
        mean = x.to(residual_dtype(x.dtype)) * weight
        read, reach = torch.empty_like(mean), _Reach(x, self.block)
        for message, share in others:
            if self._read(message, x, read):
                return None
            mean.add_(read, alpha=share)
            if self._modulo is not None:
                reach.take_in(read, self._modulo.step(message, len(x)))
        if not torch.isfinite(mean.sum()):
            return None
        payload = self._modulo or self._payload.on(x.dtype)
        answer = payload.message(mean, reach.theta(mean)) if isinstance(payload, Modulo) else payload.message(mean)
        share = min(1 / weight if weight else members, LARGEST_SHARE * members)
        taken = torch.empty_like(mean)
        self._read(answer, mean, taken)
        taken.lerp_(mean, share)  # Q(u) + k (u − Q(u)); with unequal weights 1 / w of the owner stands for k
        if not torch.isfinite(taken.sum()):  # beyond the range of 16 bits
            return None
        return answer, taken.sub_(x)

    def decode_mean(self, x: Tensor, at: Offset, mine: Tensor, mean: Tensor) -> Tensor:
        change = x.new_empty(len(x), dtype=residual_dtype(x.dtype))
        if self._read(mean, x, change):
            raise RuntimeError(f"the mean of {len(x)} values at {at} is further from this worker's than its owner knew")
        own = torch.empty_like(change)
        self._read(mine, x, own)
        return change.sub_(own)

    def exact(self, x: Tensor, mean: Tensor) -> Tensor:
        return mean - x

    def share(self, x: Tensor, outcome: Tensor) -> Tensor:
        return x + outcome

    def apply_shared(self, x: Tensor, published: Tensor) -> Tensor:
        return published - x

    def apply(self, piece: Tensor, number: int, outcome: Tensor) -> None:
        piece.add_(outcome)
        if self._modulo is not None:
            self._spread(Offset(number, 0)).observe(outcome)

    def aborted(self) -> None:
        """Do nothing, since only the distance of models is remembered."""

    def _spread(self, at: Offset) -> Spread:
        return self._spreads.setdefault(at.piece, Spread(self.block))

    def _read(self, message: Tensor, reference: Tensor, into: Tensor) -> bool:
        """Read a message into float32; return whether the sender was too far away."""
        if self._modulo is not None:
            return bool(self._modulo.decode(message, reference, into).any())
        self._payload.on(reference.dtype).decode(message, into)
        return False


class _Reach:
    """An upper bound, by block, of the distance of a group's members from the mean."""

    def __init__(self, x: Tensor, block: int) -> None:
        self._x, self._block = x, block
        self._furthest: Tensor | None = None
        self._step: Tensor | None = None

    def take_in(self, read: Tensor, step: Tensor) -> None:
        """Take in a member's values, as read from a message with these steps. Overwrites ``read``."""
        away = largest_magnitudes(read.sub_(self._x), self._block)
        self._furthest = away if self._furthest is None else torch.maximum(self._furthest, away)
        self._step = step.view_as(away) if self._step is None else torch.maximum(self._step, step.view_as(away))

    def theta(self, mean: Tensor) -> Tensor:
        """Return θ for the message with the mean."""
        assert self._furthest is not None
        assert self._step is not None
        return (largest_magnitudes(mean - self._x, self._block) + self._furthest + self._step).mul_(1.001)
