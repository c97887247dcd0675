"""Payloads that convert each value by itself: to the type of the buffer, or to 16 bits."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lightning_sdpipe.exchange.payloads.payload import Payload, Pieces, check_flat, deliver, keep_error, refusal


class _Cast(Payload):
    @property
    @abstractmethod
    def _wire(self) -> torch.dtype:
        """Type that a value is converted to."""

    def nbytes(self, n: int) -> int:
        """See the base class, as for all methods here."""
        return n * self._wire.itemsize

    @torch.no_grad()
    def encode(self, x: Tensor, into: Tensor, residual: Tensor | None = None, draw: int = 0) -> None:
        check_flat(x, into, self.nbytes(x.numel()), residual)
        pieces = Pieces(x, 1)
        for values, missed, sent, scratch, message in zip(
            pieces.values(),
            pieces.residuals(residual),
            pieces.scratch(self._wire),
            pieces.scratch(),
            pieces.of(into, self._wire.itemsize),
            strict=True,
        ):
            sent.copy_(values if missed is None else torch.add(values, missed, out=scratch))
            message.copy_(sent.view(torch.uint8))
            if missed is not None:
                keep_error(missed, values, scratch.copy_(sent))

    @torch.no_grad()
    def decode(self, message: Tensor, into: Tensor, weight: float | None = None) -> None:
        check_flat(into, message, self.nbytes(into.numel()))
        pieces = Pieces(into, 1)
        for values, sent, came in zip(
            pieces.values(), pieces.scratch(self._wire), pieces.of(message, self._wire.itemsize), strict=True
        ):
            sent.view(torch.uint8).copy_(came)
            deliver(sent, values, weight)


@dataclass(frozen=True)
class Full(_Cast):
    """All bits of the buffer's type: 4 bytes per value for float32, 2 for bfloat16."""

    dtype: torch.dtype = torch.float32

    @property
    def _wire(self) -> torch.dtype:
        return self.dtype

    def on(self, dtype: torch.dtype) -> Full:
        super().on(dtype)
        return replace(self, dtype=dtype)


@dataclass(frozen=True)
class Half(_Cast):
    """16 bits per value: ``"float16"``, or ``"bfloat16"`` with the range of float32 and 3 bits less of precision.

    A value of float16 beyond ±65504 arrives as an infinity, which a loss scaler notices, and one below 6e-8 in
    magnitude as zero; in between the relative error is at most 2⁻¹¹ (from 6e-5 on; bfloat16: 2⁻⁸). Buffers of 16 bits
    travel as they are.
    """

    dtype: Literal["float16", "bfloat16"] = "float16"

    def __post_init__(self) -> None:
        if self.dtype not in ("float16", "bfloat16"):
            raise refusal("dtype", self.dtype, '"float16" or "bfloat16", or use Full()')

    @property
    def overflows(self) -> bool:  # type: ignore[override]
        """See the base class."""
        return self.dtype == "float16"

    @property
    def _wire(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float16

    def on(self, dtype: torch.dtype) -> Half:
        super().on(dtype)
        return {torch.float16: Half("float16"), torch.bfloat16: Half("bfloat16")}.get(dtype, self)
