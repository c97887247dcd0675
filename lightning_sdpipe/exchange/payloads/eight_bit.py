"""Eight bits per value: 256 evenly spaced levels between the smallest and the largest value of a block.

The header has the value of code 0, near the middle of the block, and the step s between levels. So codes are signed,
which torch converts many times faster than unsigned ones, and the values need to be shifted once only. The middle is
rounded to float32 *before* s is chosen such that the block's ends have codes from −128 to 127: where the values differ
in their last bits only, s is a little more than (largest − smallest) / 255, else it is just that.

Noise for stochastic rounding: uniform in (−½, ½), added before rounding to the nearest.

Fresh random numbers would cost more than the rest of an encoding. So the noise comes from a table of 2¹⁸ numbers, read
from a random place on: each of 2¹⁶ evenly spaced levels occurs in it four times, in random order. Over all starting
places, each value meets each level equally often, so rounding is unbiased to 2⁻¹⁷ of a step, which is the precision of
float32 there. Two values of a message share nothing but the starting place.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_sdpipe.exchange.payloads.payload import Payload, check_block, check_flat, deliver, keep_error, refusal
from lightning_sdpipe.exchange.payloads.pieces import Pieces, add_residual, num_blocks, write_header

LEVELS = 2**16
TABLE = 4 * LEVELS


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


MARGIN = 1 + 2**-21
"""Factor of the step, so that rounding errors of float32 cannot take a code beyond its eight bits."""
SMALLEST = torch.finfo(torch.float32).tiny
"""Smallest step: smaller numbers have no reciprocal."""


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
        if self.rounding not in ("nearest", "stochastic"):
            raise refusal("rounding", self.rounding, '"nearest" or "stochastic"')

    def nbytes(self, n: int) -> int:
        """See the base class, as for all methods here."""
        return n + 8 * num_blocks(n, self.block)

    @torch.no_grad()
    def encode(self, x: Tensor, into: Tensor, residual: Tensor | None = None, draw: int = 0) -> None:
        check_flat(x, into, self.nbytes(x.numel()), residual)
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
        check_flat(into, message, self.nbytes(into.numel()))
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
    """Write the value of code 0 and the step of each row of float32; the step of a row that is not finite is not."""
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    torch.add(low, high - low, alpha=128 / 255, out=middle)
    torch.maximum(high.sub_(middle).mul_(MARGIN / 127), low.sub_(middle).mul_(-MARGIN / 128), out=step)
    step.clamp_(min=SMALLEST)
