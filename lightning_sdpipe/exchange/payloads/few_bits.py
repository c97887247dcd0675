"""A payload that leaves most of a value out: all but its sign.

:class:`OneBit` packs eight signs into a byte by one multiplication: of a 64-bit word whose bytes are 0 or 1, the
highest byte of the word times 0x0102040810204080 has the lowest byte of the word as its lowest bit, and so on upwards.
"""

from __future__ import annotations

import functools
from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sdpipe.errors import check_integer, check_number, refusal
from lightning_sdpipe.exchange.payloads.payload import (
    Full,
    Payload,
    Pieces,
    add_residual,
    check_block,
    deliver,
    keep_error,
    num_blocks,
    write_header,
)

GATHER = 0x0102040810204080


@dataclass(frozen=True)
class OneBit(Payload):
    """A bit per value and 4 bytes per block (1-bit SGD, Seide et al. 2014; 1-bit Adam, Tang et al. 2021).

    The mean magnitude is the scale with the smallest squared error, 1 − 2/π = 0.363 of that of sending nothing for
    normally distributed values; it is below 1 for all that are not zero, so that feedback works.

    Args:
        block: values that share a scale.
        feedback: add what a message left out to the next one; without it signs of gradients need not converge. It takes
            a residual as large as the tensor in float32.
        momentum: β₁ of 1-bit Adam: the momentum is sent instead of the gradient
            (:mod:`~lightning_sdpipe.exchange.encoded_rounds`). It needs :class:`~lightning_sdpipe.optim.FrozenVariance`
            with the same ``after``.
        after: the number of first updates in full precision.
    """

    block: int = 4096
    feedback: bool = True
    momentum: float = 0.0
    after: int = 0

    @property
    def kinds(self) -> Set[str]:  # type: ignore[override]
        return {"momentum", "gradients"} if self.momentum else {"one_bit", "base"}

    def __post_init__(self) -> None:
        check_block(self.block, 8)
        check_integer("after", self.after, 0, "updates in full precision")
        check_number("momentum", self.momentum, "β₁ of the optimizer, below 1; 0 sends gradients", least=0, below=1)
        if self.momentum and not self.after:
            raise refusal(
                "after",
                0,
                f"updates in full precision from 1 with momentum={self.momentum}, since Adam's variance is "
                "frozen then and must have been measured; or momentum=0 to send gradients",
            )

    def at(self, update: int) -> Payload:
        return Full() if update < self.after else self

    def nbytes(self, n: int) -> int:
        return -(-n // 8) + 4 * num_blocks(n, self.block)

    @torch.no_grad()
    def encode(self, x: Tensor, into: Tensor, residual: Tensor | None = None, draw: int = 0) -> None:
        pieces = Pieces(x, self.block)
        header = pieces.new_header(1)
        for values, missed, code, scale, negative, scratch in zip(
            pieces.values(),
            pieces.residuals(residual),
            pieces.of(into[4 * header.numel() :], self.block // 8),
            pieces.of(header[0], 1),
            pieces.scratch(),
            pieces.scratch(),
            strict=True,
        ):
            exact = add_residual(values, missed, scratch)
            torch.lt(exact, 0, out=negative)  # 0 or 1 in float32, much faster than in bool
            code.view(-1).copy_(_packed(negative.view(-1)))
            torch.mean(torch.abs(exact, out=scratch), 1, keepdim=True, out=scale)
            if missed is not None:
                keep_error(missed, values, negative.mul_(-2 * scale).add_(scale))
        write_header(header, into)

    @torch.no_grad()
    def decode(self, message: Tensor, into: Tensor, weight: float | None = None) -> None:
        pieces = Pieces(into, self.block)
        header = pieces.read_header(message, 1)
        signs = _signs(into.device)
        for values, code, scale, scratch in zip(
            pieces.values(),
            pieces.of(message[4 * header.numel() :], self.block // 8),
            pieces.of(header[0], 1),
            pieces.scratch(),
            strict=True,
        ):
            unpacked = signs.index_select(0, code.reshape(-1).int()).view(torch.int8)
            scratch.view(-1).copy_(unpacked[: scratch.numel()])
            deliver(scratch.mul_(scale), values, weight)


def _packed(bits: Tensor) -> Tensor:
    """Pack flat zeros and ones, eight to a byte; the last byte ends with zeros."""
    bytes_ = bits.new_zeros(-(-bits.numel() // 8) * 8, dtype=torch.int8)
    bytes_[: bits.numel()].copy_(bits)
    return bytes_.view(torch.int64).mul_(GATHER).bitwise_right_shift_(56)


@functools.cache
def _signs(device: torch.device) -> Tensor:
    """Return for every byte eight signed bytes in one 64-bit word: −1 for a set bit, else 1."""
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    return (1 - 2 * bits).to(torch.int8).view(torch.int64).view(-1).to(device)
