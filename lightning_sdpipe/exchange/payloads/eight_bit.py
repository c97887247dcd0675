"""Eight bits per value.

:class:`EightBit` has 256 evenly spaced levels between the smallest and the largest value of a block. The header has the
value of code 0, near the middle of the block, and the step s between levels. So codes are signed, which torch converts
many times faster than unsigned ones, and the values need to be shifted once only. The middle is rounded to float32
*before* s is chosen such that the block's ends have codes from −128 to 127: where the values differ in their last bits
only, s is a little more than (largest − smallest) / 255, else it is just that.

Noise for stochastic rounding: uniform in (−½, ½), added before rounding to the nearest.

Fresh random numbers would cost more than the rest of an encoding. So the noise comes from a table of 2¹⁸ numbers, read
from a random place on: each of 2¹⁶ evenly spaced levels occurs in it four times, in random order. Over all starting
places, each value meets each level equally often, so rounding is unbiased to 2⁻¹⁷ of a step, which is the precision of
float32 there. Two values of a message share nothing but the starting place.

With :class:`Modulo`, for workers without a common reference whose models are close (Moniqua, Lu and De Sa 2020), the
sender rounds x to k steps, and sends k modulo 256. The receiver takes the number that is congruent to it and nearest to
its own value, which is k itself as long as the two are less than 128 steps apart. With steps of θ/126, that is so
wherever the values differ by less than θ: 126 steps, half of one for the rounding, and at most half of one at each end
for float32 make 127.5. So the error of the received value is half of a step, however large x is, and only θ has to be
remembered.

θ is a guess. To detect that it was too small, the sender adds up its wrap counts, ⌊(k + 128) / 256⌋, each times a
random odd number, modulo 2³²; the receiver does the same with the wrap counts that it has inferred. A single wrong one
is always detected, and several go undetected with a chance of about 2⁻³¹.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_sdpipe.errors import check_choices
from lightning_sdpipe.exchange.payloads.payload import (
    Payload,
    Pieces,
    add_residual,
    check_block,
    deliver,
    keep_error,
    num_blocks,
    write_header,
)

LEVELS = 2**16
TABLE = 4 * LEVELS
MARGIN = 1 + 2**-21
"""Factor of the step, so that rounding errors of float32 cannot take a code beyond its eight bits."""
SMALLEST = torch.finfo(torch.float32).tiny
"""Smallest step: smaller numbers have no reciprocal."""
STEPS = 126
"""Steps within θ."""
FINEST = 2**-22
"""Finest step, relative to the largest magnitude of a block: float32 still counts steps exactly."""
SPARE = 4.0
"""θ as a multiple of the largest distance seen."""
FORGET = 0.9


class Dither:
    """The noise of one message.

    Args:
        draw: the starting place in the table; a seed.
    """

    def __init__(self, draw: int, device: torch.device) -> None:
        self._random = random.Random(draw)
        self._table = table(device)

    def add_to(self, y: Tensor) -> None:
        """Add noise to a flat tensor, in place."""
        for part in torch.split(y, TABLE):
            begin = self._random.randrange(TABLE)
            part.add_(self._table[begin : begin + part.numel()])


@functools.cache
def table(device: torch.device) -> Tensor:
    """Return the table of noise, twice in a row: 2 MiB on each device that asks for it."""
    generator = torch.Generator().manual_seed(0)
    levels = (torch.arange(LEVELS) + 0.5) / LEVELS - 0.5
    order = torch.cat([torch.randperm(LEVELS, generator=generator) for _ in range(TABLE // LEVELS)])
    return levels[order].repeat(2).to(device)


@dataclass(frozen=True)
class EightBit(Payload):
    """One byte per value and 8 per block, as QSGD (Alistarh et al. 2017) in the form of BAGUA (§3.4).

    With s = (largest − smallest) / 255 of a block, ``rounding="nearest"`` errs by at most s/2 per value, beside the
    last bits of float32. ``"stochastic"`` errs by less than s, is unbiased, and has a variance of at most s²/4, which
    is s²/6 on average. A block of equal values arrives exactly; a zero among other values does not.

    A block is not finite either if its values span more than float32 does.

    ``feedback`` adds what a message left out to the next one; it takes a residual as large as the tensor in float32.
    """

    block: int = 4096
    rounding: Literal["nearest", "stochastic"] = "nearest"
    feedback: bool = False

    def __post_init__(self) -> None:
        check_block(self.block)
        check_choices(self)

    @property
    def kinds(self) -> Set[str]:  # type: ignore[override]
        plain = self.rounding == "nearest" and not self.feedback
        return {"eight_bit", "nothing"} if plain else super().kinds

    @property
    def modulo(self) -> bool | None:  # type: ignore[override]
        return None if self.feedback else True

    def nbytes(self, n: int) -> int:
        return n + 8 * num_blocks(n, self.block)

    @torch.no_grad()
    def encode(self, x: Tensor, into: Tensor, residual: Tensor | None = None, draw: int = 0) -> None:
        pieces = Pieces(x, self.block)
        header = pieces.new_header(2)
        codes = into[4 * header.numel() :].view(torch.int8)
        dither = Dither(draw, x.device) if self.rounding == "stochastic" else None
        for values, missed, code, middle, step, scratch in zip(
            pieces.values(),
            pieces.residuals(residual),
            pieces.of(codes, self.block),
            *(pieces.of(line, 1) for line in header),
            pieces.scratch(),
            strict=True,
        ):
            exact = add_residual(values, missed, scratch)
            _choose_levels(exact, middle, step)
            levels = torch.sub(exact, middle, out=scratch).mul_(step.reciprocal())
            if dither is not None:
                dither.add_to(levels.view(-1))
            code.copy_(levels.round_())
            if missed is not None:
                keep_error(missed, values, levels.mul_(step).add_(middle))
        write_header(header, into)

    @torch.no_grad()
    def decode(self, message: Tensor, into: Tensor, weight: float | None = None) -> None:
        pieces = Pieces(into, self.block)
        header = pieces.read_header(message, 2)
        codes = message[4 * header.numel() :].view(torch.int8)
        for values, code, middle, step, scratch in zip(
            pieces.values(),
            pieces.of(codes, self.block),
            *(pieces.of(line, 1) for line in header),
            pieces.scratch(),
            strict=True,
        ):
            # not addcmul, whose product is rounded before the sum on some processors and not on others
            deliver(scratch.copy_(code).mul_(step).add_(middle), values, weight)


def _choose_levels(values: Tensor, middle: Tensor, step: Tensor) -> None:
    """Write the value of code 0 and the step of each row of float32; a row that is not finite gets a step that is
    not."""
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    torch.add(low, high - low, alpha=128 / 255, out=middle)
    torch.maximum(high.sub_(middle).mul_(MARGIN / 127), low.sub_(middle).mul_(-MARGIN / 128), out=step)
    step.clamp_(min=SMALLEST)


@dataclass(frozen=True)
class Modulo:
    """One byte per value and 8 per block, as with ``EightBit``, for receivers that have similar values.

    Where a value or θ is not finite, nothing of its block is finite for any receiver. Scratch memory is three pieces
    (:mod:`~lightning_sdpipe.exchange.payloads.payload`) of 32 bits per value.
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

    def step(self, message: Tensor, n: int) -> Tensor:
        """Return the step of each block of a message with ``n`` values, flat."""
        blocks = num_blocks(n, self.block)
        return message[: 4 * blocks].clone().view(torch.float32)  # it may lie at an address that is odd for float32

    def message(self, x: Tensor, theta: Tensor) -> Tensor:
        """Return a new message with ``x``, as by :meth:`encode`."""
        message = x.new_empty(self.nbytes(x.numel()), dtype=torch.uint8)
        self.encode(x, theta, message)
        return message

    @torch.no_grad()
    def decode(self, message: Tensor, reference: Tensor, into: Tensor) -> Tensor:
        """Replace ``into`` by the values of ``message``, read relative to ``reference``.

        Args:
            message: a message of :meth:`encode`.
            reference: the receiver's own values. The sender reads its own message relative to the encoded values.
            into: a tensor of equal length; it may be ``reference`` itself.

        Returns:
            For every block, whether the sender's values were too far away (bool): what ``into`` holds there is wrong.
        """
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
            values.copy_(count.add_(wrap, alpha=256).mul_(step))
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
        """θ for :meth:`Modulo.encode`; None until an exchange in full precision was observed."""
        return None if self._largest is None else SPARE * self._largest

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
    step = torch.maximum(theta / STEPS, finest).clamp_(min=SMALLEST)
    return step.masked_fill_(~step.isfinite(), torch.nan)


@functools.cache
def _weights(count: int, device: torch.device) -> Tensor:
    """Return random odd numbers, the same on all workers."""
    draws = random.Random(0)
    return torch.tensor([2 * draws.getrandbits(31) + 1 - 2**31 for _ in range(count)], dtype=torch.int32, device=device)
