"""Base of all payloads: their interface, their refusals, error feedback, and the pieces by which they go through a
tensor; and those that convert each value by itself, to the type of the buffer or to 16 bits.

Long tensors are divided into pieces of whole blocks, so that scratch memory is bounded and stays in the cache. A
message has a header with some 32-bit numbers per block, all first ones before all second ones, and then the codes of
all values. So it does not depend on the length of pieces, which differs between devices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError, check_choices, refusal

CARRIED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CPU_PIECE = 2**18
"""Elements of a piece on a CPU: starting an operation costs about as much as copying 2¹⁴ of them."""
DEVICE_PIECE = 2**22
"""Elements of a piece on a GPU, where starting an operation costs more."""


class Payload(ABC):
    """An encoding of tensors in messages, equal on all workers of a run.

    A message is a flat uint8 tensor on the device of the values, of :meth:`nbytes` bytes at any alignment. It does not
    describe its contents: both ends know the payload and the number of elements. Decoding rounds after every operation,
    so all receivers, on processors and on GPUs, read the same bits from a message.

    Where a value is not finite, nothing of its block is finite for any receiver, and the residual stays as it was.
    Scratch memory is at most three pieces of float32, which together take 3 MiB on processors and 48 MiB on GPUs; twice
    that for float64.
    """

    kinds: Set[str] = frozenset({"feedback", "neighbours"})
    """Its name, and what the members of an exchange must have in common; methods list the kinds that they take
    (:class:`~lightning_sdpipe.sync.capabilities.Capabilities`)."""
    block: int = 1
    """Values that share a scale."""
    modulo: bool | None = None
    """True if models travel as :class:`~lightning_sdpipe.exchange.payloads.Modulo` among members that only know that
    their models are close, False if they travel as they are; None if they cannot."""
    feedback: bool = False
    """Whether what a message leaves out is added to the next one (:class:`ErrorFeedback`)."""
    momentum: float = 0.0
    """Coefficient β₁ of the momentum that is sent instead of gradients; 0 sends gradients."""
    after: int = 0
    """Number of updates in full precision before the first one that uses this payload."""
    overflows: bool = False
    """Whether a finite value of a wider type may become an infinity in a message."""

    def on(self, dtype: torch.dtype) -> Payload:
        """Return this payload for buffers of ``dtype``.

        Raises:
            ConfigurationError: integers or complex numbers, which cannot be averaged in low precision.
        """
        if dtype not in CARRIED:
            raise ConfigurationError(
                f"{self} cannot carry {dtype}: it averages real floating-point numbers. Keep such buffers out of the "
                "exchange; integer ones are made equal at sync points."
            )
        return self

    def at(self, update: int) -> Payload:
        """Return the payload of the update that comes after ``update`` others; :meth:`on` is applied afterwards."""
        return self

    @abstractmethod
    def nbytes(self, n: int) -> int:
        """Return the bytes of a message with ``n`` values."""

    @abstractmethod
    def encode(self, x: Tensor, into: Tensor, residual: Tensor | None = None, draw: int = 0) -> None:
        """Write ``x`` into a message.

        Args:
            x: 1-D, contiguous, floating-point.
            into: the message.
            residual: a tensor of the length of ``x``, float32 (float64 for float64). It is added to ``x`` first;
                afterwards it holds what the message leaves out of that sum.
            draw: seeds stochastic rounding. Use a different one for every message.
        """

    def message(self, x: Tensor, residual: Tensor | None = None, draw: int = 0) -> Tensor:
        """Return a new message with ``x``, as by :meth:`encode`."""
        message = x.new_empty(self.nbytes(x.numel()), dtype=torch.uint8)
        self.encode(x, message, residual, draw)
        return message

    @abstractmethod
    def decode(self, message: Tensor, into: Tensor, weight: float | None = None) -> None:
        """Replace ``into``, 1-D and contiguous, by the values of ``message``, or add them ``weight`` times.

        The result is the same to the bit on all devices; when adding, with a weight of 1.
        """


def residual_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of residuals and accumulators of a buffer: float32 for narrower types, whose rounding would lose
    them."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def deliver(values: Tensor, into: Tensor, weight: float | None) -> None:
    """End decoding: ``values`` replace ``into``, or are added to it."""
    if weight is None:
        into.copy_(values)
    else:
        into.add_(values, alpha=weight)


def keep_error(residual: Tensor, x: Tensor, decoded: Tensor) -> None:
    """Add x − decoded to the residual, except where the difference is not finite. Overwrites ``decoded``."""
    missed = torch.sub(x, decoded, out=decoded) if residual.dtype == decoded.dtype else x - decoded
    residual.add_(missed.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))


def check_block(block: int, multiple: int = 1) -> None:
    """Raise ConfigurationError unless ``block`` is a positive multiple of ``multiple``."""
    if isinstance(block, bool) or not isinstance(block, int) or block < 1 or block % multiple:
        what = "a positive integer" if multiple == 1 else f"a positive multiple of {multiple}"
        raise refusal("block", block, f"{what} (values that share a scale), such as 4096")


class ErrorFeedback:
    """The residual of one buffer on one worker: one float32 per value (float64 for float64).

    A message holds Q(x + δ), and δ' = x + δ − Q(x + δ) stays for the next one. So over time everything is sent: the sum
    of all messages differs from the sum of all x by the last δ only (Seide et al. 2014; BAGUA §3.2, whose printed signs
    would subtract what was left out a second time).

    Where a group averages in two phases (:mod:`~lightning_sdpipe.exchange.encoded_mean`), a worker sends
    every part of the buffer but its own in the first and the mean of its own in the second. So one residual has room
    for the errors of both, BAGUA's δ and ε. The owner of a part must stay the same; when members change, :meth:`drop`
    it.

    The residual is not part of checkpoints, which are made when replicas are equal. Call :meth:`drop` there too, so
    that a resumed run computes the same as one that went on.
    """

    def __init__(self, buffer: Tensor) -> None:
        self.residual = torch.zeros_like(buffer, dtype=residual_dtype(buffer.dtype))
        self._scale = 1.0

    def follow(self, scale: float) -> None:
        """Set ``scale``, by which a loss scaler multiplies gradients from now on, and rescale what was left out."""
        if scale != self._scale:
            self.residual.mul_(scale / self._scale)
            self._scale = scale

    def drop(self) -> None:
        """Forget what was left out."""
        self.residual.zero_()


class Pieces:
    """The division of a flat tensor, and of tensors that belong to it, into pieces.

    A piece is a matrix with a row for each block; if the last block is shorter, it is a piece of its own.

    Args:
        x: the tensor.
        block: number of elements of a block.
    """

    def __init__(self, x: Tensor, block: int) -> None:
        self._x, self._block = x, block
        self._whole, self._rest = divmod(x.numel(), block)
        self._at_once = max(1, (CPU_PIECE if x.device.type == "cpu" else DEVICE_PIECE) // block)
        full, last = divmod(self._whole, self._at_once)
        self._rows = [self._at_once] * full + [last] * bool(last)

    def of(self, flat: Tensor, width: int) -> list[Tensor]:
        """Return the pieces of a flat tensor that has ``width`` elements for each block; the rest belongs to the
        shorter block."""
        if not self._rest:
            return self._split(flat.view(self._whole, width))
        end = self._whole * width
        return [*self._split(flat[:end].view(self._whole, width)), flat[end:].view(1, -1)]

    def _split(self, rows: Tensor) -> list[Tensor]:
        return [rows] * len(self._rows) if len(self._rows) < 2 else list(torch.split(rows, self._at_once))

    def values(self) -> list[Tensor]:
        """Return the pieces of the tensor itself."""
        return self.of(self._x, self._block)

    def residuals(self, residual: Tensor | None) -> list[Tensor] | list[None]:
        """Return the pieces of a residual of the tensor, or None for each piece if there is no residual."""
        return self.of(residual, self._block) if residual is not None else [None] * (len(self._rows) + bool(self._rest))

    def scratch(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Return memory for one piece, in the shape of each of them."""
        width = min(self._block, self._x.numel())
        memory = torch.empty(max(self._rows, default=1), width, dtype=dtype, device=self._x.device)
        shapes = {rows: memory[:rows] for rows in self._rows}
        rest = [memory[:1, : self._rest]] if self._rest else []
        return [*(shapes[rows] for rows in self._rows), *rest]

    def new_header(self, lines: int) -> Tensor:
        """Return an empty float32 header with a column for each block."""
        blocks = self._whole + bool(self._rest)
        return torch.empty(lines, blocks, dtype=torch.float32, device=self._x.device)

    def read_header(self, message: Tensor, lines: int) -> Tensor:
        """Return the header that :func:`write_header` wrote, as a copy: the message may lie at an address that is odd
        for float32."""
        header = self.new_header(lines)
        header.view(-1).view(torch.uint8).copy_(message[: 4 * header.numel()])
        return header


def write_header(header: Tensor, message: Tensor) -> None:
    """Write a header to the beginning of a message."""
    message[: 4 * header.numel()].copy_(header.view(-1).view(torch.uint8))


def num_blocks(n: int, block: int) -> int:
    return -(-n // block)


def add_residual(x: Tensor, residual: Tensor | None, scratch: Tensor) -> Tensor:
    """Return x + residual in float32: ``x`` itself where they are equal, else in ``scratch``."""
    if residual is not None:
        return torch.add(x, residual, out=scratch)
    return x if x.dtype == torch.float32 else scratch.copy_(x)


class _Cast(Payload):
    @property
    @abstractmethod
    def _wire(self) -> torch.dtype:
        """Type that a value is converted to."""

    def nbytes(self, n: int) -> int:
        return n * self._wire.itemsize

    @torch.no_grad()
    def encode(self, x: Tensor, into: Tensor, residual: Tensor | None = None, draw: int = 0) -> None:
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
    kinds = frozenset({"full"})
    modulo = False

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
        check_choices(self)

    kinds = frozenset({"half", "nothing"})
    modulo = False

    @property
    def overflows(self) -> bool:  # type: ignore[override]
        return self.dtype == "float16"

    @property
    def _wire(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float16

    def on(self, dtype: torch.dtype) -> Half:
        super().on(dtype)
        return {torch.float16: Half("float16"), torch.bfloat16: Half("bfloat16")}.get(dtype, self)
