"""The largest values of a tensor, with their places.

They are chosen within segments of 2¹⁶ values, so that a place fits into 16 bits, and so that one region of large values
does not suppress all others. A message has the values of all segments in float32, then their places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sdpipe.exchange.payloads.payload import Payload, check_flat, keep_error, refusal
from lightning_sdpipe.exchange.payloads.pieces import Pieces, add_residual

SEGMENT = 2**16


@dataclass(frozen=True)
class TopK(Payload):
    """6 bytes for each of the ``density`` · n values that are largest in magnitude; the others arrive as zero.

    At least one of each segment of 2¹⁶ values is sent. The squared error is at most 1 − density of that of sending
    nothing. A segment is the block for values that are not finite. Finding the largest values takes far longer than
    encoding by the other payloads.

    Args:
        density: the share of values that is sent, in (0, 1]. From 2/3 on, messages are no shorter than
            :class:`~lightning_sdpipe.exchange.payloads.Full`'s.
        feedback: add what a message left out to the next one; without it most values would never be sent. It takes a
            residual as large as the tensor in float32.
    """

    density: float
    feedback: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:  # NaN is refused too
            raise refusal("density", self.density, "the share of values to send, above 0 and at most 1, such as 0.01")

    def nbytes(self, n: int) -> int:
        """See the base class, as for all methods here."""
        return 6 * self._sent(n)

    @torch.no_grad()
    def encode(self, x: Tensor, into: Tensor, residual: Tensor | None = None, draw: int = 0) -> None:
        check_flat(x, into, self.nbytes(x.numel()), residual)
        pieces = Pieces(x, SEGMENT)
        sent, each = self._sent(x.numel()), self._of(SEGMENT)
        largest, places = x.new_empty(sent, dtype=torch.float32), x.new_empty(sent, dtype=torch.int16)
        for values, missed, largest_here, places_here, scratch in zip(
            pieces.values(),
            pieces.residuals(residual),
            pieces.of(largest, each),
            pieces.of(places, each),
            pieces.scratch(),
            strict=True,
        ):
            exact = add_residual(values, missed, scratch)
            place = exact.abs().topk(largest_here.shape[1], dim=1, sorted=False).indices
            chosen = exact.gather(1, place)
            places_here.copy_(place)
            largest_here.copy_(chosen)
            if missed is not None:
                scratch.zero_().view(-1).index_add_(0, _index(place, values), chosen.view(-1))
                keep_error(missed, values, scratch.add_(_poison(chosen)))
        into[: 4 * sent].copy_(largest.view(torch.uint8))
        into[4 * sent :].copy_(places.view(torch.uint8))

    @torch.no_grad()
    def decode(self, message: Tensor, into: Tensor, weight: float | None = None) -> None:
        check_flat(into, message, self.nbytes(into.numel()))
        pieces = Pieces(into, SEGMENT)
        sent, each = self._sent(into.numel()), self._of(SEGMENT)
        largest, places = into.new_empty(sent, dtype=torch.float32), into.new_empty(sent, dtype=torch.int16)
        largest.view(torch.uint8).copy_(message[: 4 * sent])
        places.view(torch.uint8).copy_(message[4 * sent :])
        if weight is None:
            into.zero_()
        else:
            largest.mul_(weight)
        for values, largest_here, place in zip(
            pieces.values(), pieces.of(largest, each), pieces.of(places, each), strict=True
        ):
            place = place.long().bitwise_and_(SEGMENT - 1)
            values.view(-1).index_add_(0, _index(place, values), largest_here.reshape(-1).to(values.dtype))
            values.add_(_poison(largest_here))

    def _of(self, columns: int) -> int:
        return max(1, round(self.density * columns))

    def _sent(self, n: int) -> int:
        whole, rest = divmod(n, SEGMENT)
        return whole * self._of(SEGMENT) + (self._of(rest) if rest else 0)


def _index(place: Tensor, values: Tensor) -> Tensor:
    """Return flat places within all rows from places within rows: CUDA can add to these in a deterministic order."""
    rows, columns = values.shape
    return place.add(torch.arange(0, rows * columns, columns, device=place.device).unsqueeze(1)).view(-1)


def _poison(chosen: Tensor) -> Tensor:
    """Return 0 for each row of chosen values, or NaN if one is not finite: such values count as the largest."""
    return chosen.sub(chosen).sum(1, keepdim=True)
