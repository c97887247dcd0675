"""Eight bits per value for workers without a common reference, whose models are close (Moniqua, Lu and De Sa 2020).

The sender rounds x to k steps, and sends k modulo 256. The receiver takes the number that is congruent to it and
nearest to its own value, which is k itself as long as the two are less than 128 steps apart. With steps of θ/126, that
is so wherever the values differ by less than θ: 126 steps, half of one for the rounding, and at most half of one at
each end for float32 make 127.5. So the error of the received value is half of a step, however large x is, and only θ
has to be remembered.

θ is a guess. To detect that it was too small, the sender adds up its wrap counts, ⌊(k + 128) / 256⌋, each times a
random odd number, modulo 2³²; the receiver does the same with the wrap counts that it has inferred. A single wrong one
is always detected, and several go undetected with a chance of about 2⁻³¹.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sdpipe.exchange.payloads.payload import check_block, check_flat, deliver
from lightning_sdpipe.exchange.payloads.pieces import Pieces, add_residual, num_blocks, write_header

STEPS = 126
"""Steps within θ."""
FINEST = 2**-22
"""Finest step, relative to the largest magnitude of a block: float32 still counts steps exactly."""
MARGIN = 4.0
FORGET = 0.9


@dataclass(frozen=True)
class Modulo:
    """One byte per value and 8 per block, as with ``EightBit``, for receivers that have similar values.

    Where a value or θ is not finite, nothing of its block is finite for any receiver. Scratch memory is three pieces
    (:mod:`~lightning_sdpipe.exchange.payloads.pieces`) of 32 bits per value.
    """

    block: int = 4096

    def __post_init__(self) -> None:
        check_block(self.block)

    def nbytes(self, n: int) -> int:
        """Return the bytes of a message with ``n`` values."""
        return n + 8 * num_blocks(n, self.block)

    @torch.no_grad()
    def encode(self, x: Tensor, theta: Tensor, into: Tensor) -> None:
        """Write ``x`` into a message, with an error of at most θ/252 + 2⁻²¹ · the block's largest magnitude per value.

        Args:
            x: 1-D, contiguous, floating-point.
            theta: the largest distance of a receiver, for every block; float32.
            into: the message: uint8, of :meth:`nbytes`.
        """
        check_flat(x, into, self.nbytes(x.numel()))
        pieces = Pieces(x, self.block)
        header = pieces.new_header(2)
        codes = into[4 * header.numel() :].view(torch.int8)
        for values, far, code, step, checksum, wrap, scratch in zip(
            pieces.values(),
            pieces.of(theta, 1),
            pieces.of(codes, self.block),
            pieces.of(header[0], 1),
            pieces.of(header[1].view(torch.int32), 1),
            pieces.scratch(),
            pieces.scratch(),
            strict=True,
        ):
            exact = add_residual(values, None, scratch)
            step.copy_(_step(exact, far))
            count = torch.mul(exact, step.reciprocal(), out=scratch).round_()
            torch.add(count, 128, out=wrap).mul_(1 / 256).floor_()
            code.copy_(count.sub_(wrap, alpha=256))
            checksum.copy_(self._checksum(wrap))
        write_header(header, into)

    def message(self, x: Tensor, theta: Tensor) -> Tensor:
        """Return a new message with ``x``, as by :meth:`encode`."""
        message = x.new_empty(self.nbytes(x.numel()), dtype=torch.uint8)
        self.encode(x, theta, message)
        return message

    @torch.no_grad()
    def decode(self, message: Tensor, reference: Tensor, into: Tensor, weight: float | None = None) -> Tensor:
        """Replace ``into`` by the values of ``message``, read relative to ``reference``, or add them ``weight``
        times.

        Args:
            message: a message of :meth:`encode`.
            reference: the receiver's own values. The sender reads its own message relative to the encoded values.
            into: a tensor of equal length; it may be ``reference`` itself.
            weight: None to replace.

        Returns:
            For every block, whether the sender's values were too far away (bool): what ``into`` holds there is wrong.
        """
        check_flat(into, message, self.nbytes(into.numel()))
        check_flat(reference, message, self.nbytes(into.numel()))
        pieces = Pieces(into, self.block)
        header = pieces.read_header(message, 2)
        codes, checksums = message[4 * header.numel() :].view(torch.int8), header[1].view(torch.int32)
        found = torch.empty_like(checksums)
        for values, here, code, step, checksum, wrap, scratch in zip(
            pieces.values(),
            pieces.of(reference, self.block),
            pieces.of(codes, self.block),
            pieces.of(header[0], 1),
            pieces.of(found, 1),
            pieces.scratch(),
            pieces.scratch(),
            strict=True,
        ):
            torch.mul(add_residual(here, None, scratch), step.reciprocal(), out=wrap)
            count = scratch.copy_(code)
            wrap.sub_(count).mul_(1 / 256).round_()
            checksum.copy_(self._checksum(wrap))
            deliver(count.add_(wrap, alpha=256).mul_(step), values, weight)
        return (found != checksums) & header[0].isfinite()

    def _checksum(self, wraps: Tensor) -> Tensor:
        """Return the checksum of each row of whole numbers in float32, as a column of int32."""
        weights = _weights(self.block, wraps.device)[: wraps.shape[1]]
        return wraps.to(torch.int32).mul_(weights).sum(1, keepdim=True, dtype=torch.int32)


class Spread:
    """The recent distance of the workers' models, by block, from which θ is guessed.

    θ is 4 × the largest distance seen, which each further exchange reduces by a tenth. Memory: 4 bytes per block.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self._largest: Tensor | None = None

    @property
    def theta(self) -> Tensor | None:
        """Returns θ for :meth:`Modulo.encode`; None until an exchange in full precision was observed."""
        return None if self._largest is None else MARGIN * self._largest

    @torch.no_grad()
    def observe(self, difference: Tensor) -> None:
        """Take note of another model minus this one, flat. Values that are not finite are ignored."""
        seen = largest_magnitudes(difference, self._block)
        seen.masked_fill_(~seen.isfinite(), 0.0)
        self._largest = seen if self._largest is None else torch.maximum(self._largest.mul_(FORGET), seen)


def largest_magnitudes(x: Tensor, block: int) -> Tensor:
    """Return the largest magnitude of each block of a flat tensor, in float32."""
    largest = x.new_empty(num_blocks(x.numel(), block), dtype=torch.float32)
    pieces = Pieces(x, block)
    for values, most in zip(pieces.values(), pieces.of(largest, 1), strict=True):
        most.copy_(_magnitude(values))
    return largest


def _magnitude(rows: Tensor) -> Tensor:
    """Return the largest magnitude of each row, as a column."""
    return torch.maximum(rows.amax(1, keepdim=True), -rows.amin(1, keepdim=True))


def _step(values: Tensor, theta: Tensor) -> Tensor:
    """Return the step of each row of float32; NaN for rows that are not finite."""
    finest = _magnitude(values).mul_(FINEST)
    step = torch.maximum(theta / STEPS, finest).clamp_(min=torch.finfo(torch.float32).tiny)
    return step.masked_fill_(~step.isfinite(), torch.nan)


@functools.cache
def _weights(count: int, device: torch.device) -> Tensor:
    """Return random odd numbers, the same on all workers."""
    draws = random.Random(0)
    return torch.tensor([2 * draws.getrandbits(31) + 1 - 2**31 for _ in range(count)], dtype=torch.int32, device=device)
