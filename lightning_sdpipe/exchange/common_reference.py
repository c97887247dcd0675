"""Codecs for members with a common reference: gradients, whose reference is zero, and models that were equal once.

Tensors are scattered, reduced and gathered, and encoded in both phases (BAGUA §3.4). A message holds the difference
from the reference, in any precision, with error feedback if the payload has it. Of k members each owns one k-th of the
buffer: it gets the others' messages of that part, and answers with their mean, encoded once for all. Every member
adopts the contents of the messages with the means, the owner of a part too, so all end with the same bits.

An owner's own values are not encoded. So with error feedback the residual of its own part is free for what encoding the
mean leaves out, BAGUA's ε beside the δ of the other parts, and over time

Σ means + mean over members of δ + ε = Σ over time of the mean of x.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.exchange.codec import Members, Offset
from lightning_sdpipe.exchange.moving import pieces_of
from lightning_sdpipe.exchange.payloads import ErrorFeedback, Payload
from lightning_sdpipe.exchange.payloads.payload import residual_dtype

BROKEN_OFF = (
    "an average was broken off, and models have had nothing in common since then: all replicas must be made equal first"
)


class CommonReference:
    """A :class:`~lightning_sdpipe.exchange.codec.Codec` for gradients; :class:`CommonModel` is one for models.

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


class CommonModel(CommonReference):
    """A codec for models, which exchanges how they have moved since they were equal the last time.

    Memory: that last common model besides.

    Args:
        payload: any payload.
        seed: seed of stochastic rounding.
    """

    def __init__(self, payload: Payload, seed: int) -> None:
        super().__init__(payload, seed)
        self._base: list[Tensor] = []

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Set the common model: all workers have the same ``tensors`` now, of which pieces will be exchanged."""
        self.drop()
        self._met = None
        self._base = [piece.clone() for piece in pieces_of(tensors)]

    def aborted(self) -> None:
        """Drop the common model until :meth:`begin`, since some members may have taken over what others have not."""
        self.drop()
        self._base = []

    def prepared(self, piece: Tensor, number: int) -> Tensor:
        if not self._base:
            raise WorkerFailedError(BROKEN_OFF)
        super().prepared(piece, number)
        return piece - self._base[number]

    def apply(self, piece: Tensor, number: int, outcome: Tensor) -> None:
        piece.copy_(self._base[number].add_(outcome))
