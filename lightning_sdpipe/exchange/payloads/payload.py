"""What every payload has in common: its protocol, its refusals, and the error that it leaves behind.

What compression has left out so far, to be sent later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError

CARRIED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Payload(ABC):
    """How tensors are written into messages: a value, equal on all workers of a run.

    A message is a flat uint8 tensor on the device of the values, of :meth:`nbytes` bytes at any alignment. It does not
    say what it holds: both ends know the payload and the number of elements. Decoding rounds after every operation, so
    all receivers, on processors and on GPUs, read the same bits from a message.

    Where a value is not finite, nothing of its block is finite for any receiver, and the residual stays as it was.
    Scratch memory is at most three pieces of float32, which together take 3 MiB on processors and 48 MiB on GPUs; twice
    that for float64, and for :class:`TopK` as much as the message besides.
    """

    feedback: bool = False
    """Does what a message leaves out belong into the next one (:class:`ErrorFeedback`)?"""
    momentum: float = 0.0
    """β₁ of the momentum that is sent instead of gradients; 0 sends gradients."""
    after: int = 0
    """Updates before the first one that uses this payload; full precision until then."""
    overflows: bool = False
    """May a finite value of a wider type become an infinity in a message?"""

    def on(self, dtype: torch.dtype) -> Payload:
        """This payload for buffers of ``dtype``.

        Raises:
            ConfigurationError: integers or complex numbers, which cannot be averaged in low precision.
        """
        if dtype not in CARRIED:
            raise ConfigurationError(
                f"{self} cannot carry {dtype}: it averages real floating-point numbers. Keep such buffers out of the "
                "exchange; integer ones are made equal at pauses."
            )
        return self

    def at(self, update: int) -> Payload:
        """The payload of the update that ``update`` others came before; :meth:`on` comes after this."""
        return self

    @abstractmethod
    def nbytes(self, n: int) -> int:
        """Of a message with ``n`` values."""

    @abstractmethod
    def encode(self, x: Tensor, into: Tensor, residual: Tensor | None = None, draw: int = 0) -> None:
        """Writes ``x`` into a message.

        Args:
            x: 1-D, contiguous, floating-point.
            into: the message.
            residual: as long as ``x``, float32 (float64 for float64): it is added to ``x`` before, and is what the
                message leaves out of that sum afterwards.
            draw: seeds stochastic rounding. Use another one for every message.
        """

    def message(self, x: Tensor, residual: Tensor | None = None, draw: int = 0) -> Tensor:
        """A new message with ``x``, as by :meth:`encode`."""
        message = x.new_empty(self.nbytes(x.numel()), dtype=torch.uint8)
        self.encode(x, message, residual, draw)
        return message

    @abstractmethod
    def decode(self, message: Tensor, into: Tensor, weight: float | None = None) -> None:
        """Replaces ``into``, 1-D and contiguous, by what ``message`` holds; or adds it, ``weight`` times.

        Both are the same to the bit wherever it is done, adding with a weight of 1.
        """


def check_flat(x: Tensor, message: Tensor, nbytes: int, residual: Tensor | None = None) -> None:
    """Raises ValueError unless ``message`` is one of ``nbytes`` bytes for the flat ``x``, with a fitting residual."""
    if x.dim() != 1 or not x.is_contiguous() or x.dtype not in CARRIED:
        raise ValueError(f"payloads carry contiguous 1-D floating-point tensors, not {tuple(x.shape)} of {x.dtype}")
    if message.dtype != torch.uint8 or message.shape != (nbytes,) or not message.is_contiguous():
        raise ValueError(
            f"a message of {x.numel()} values is {nbytes} contiguous uint8, not {tuple(message.shape)} {message.dtype}"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != residual_dtype(x.dtype)):
        raise ValueError(
            f"the residual of {x.numel()} {x.dtype} is as many {residual_dtype(x.dtype)}, not "
            f"{tuple(residual.shape)} {residual.dtype}"
        )


def residual_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of residuals and accumulators of a buffer: float32 for narrower ones, whose rounding would lose them."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def deliver(values: Tensor, into: Tensor, weight: float | None) -> None:
    """The end of decoding: ``values`` replace ``into``, or are added to it."""
    if weight is None:
        into.copy_(values)
    else:
        into.add_(values, alpha=weight)


def keep_error(residual: Tensor, x: Tensor, decoded: Tensor) -> None:
    """Adds x − decoded to the residual, except where that is not finite. Overwrites ``decoded``."""
    missed = torch.sub(x, decoded, out=decoded) if residual.dtype == decoded.dtype else x - decoded
    residual.add_(missed.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))


def refusal(name: str, value: object, allowed: str) -> ConfigurationError:
    return ConfigurationError(f"{name}={value!r} is not allowed; give {allowed}.")


def check_block(block: int, multiple: int = 1) -> None:
    """Raises ConfigurationError unless ``block`` is a positive multiple of ``multiple``."""
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

    It is no part of checkpoints, which are made when replicas are equal: :meth:`drop` it there too, so that a resumed
    run does as the one that went on.
    """

    def __init__(self, buffer: Tensor) -> None:
        self.residual = torch.zeros_like(buffer, dtype=residual_dtype(buffer.dtype))
        self._scale = 1.0

    def follow(self, scale: float) -> None:
        """``scale`` is what gradients are multiplied by from now on, by a loss scaler: rescales what was left out."""
        if scale != self._scale:
            self.residual.mul_(scale / self._scale)
            self._scale = scale

    def drop(self) -> None:
        """Forgets what was left out."""
        self.residual.zero_()
