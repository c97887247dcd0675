"""The means of rounds that a worker has missed, from which it makes the newest base itself.

A round makes its base by one step of the outer optimizer, of a mean that all members read from the same messages. So a
worker that has the base before it, and gets these messages, makes the same base, bit for bit. With eight bits a round
takes one byte of each value, where the base and its momentum take eight. A :class:`History` keeps the messages of the
last rounds, as many as take half of that state at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Thread

import torch
from torch import Tensor

from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.exchange import transfers
from lightning_sdpipe.exchange.codec import Codec, Offset
from lightning_sdpipe.exchange.encoded_mean import SentMean
from lightning_sdpipe.exchange.transfers import Transfers
from lightning_sdpipe.topology.groups import Replicas

_BESIDE = 2**29
"""Added to the tag of a round, whose own messages travel at the same time."""
_TYPES = (torch.uint8, torch.float32, torch.float64)
"""Types of messages: encoded ones, and values in full."""


@dataclass(frozen=True)
class MadeBase:
    """A base, named by the ``sequence`` of the group that has made it of the base ``before``; and by piece the messages
    with the mean of that round."""

    before: int
    sequence: int
    means: Sequence[Sequence[SentMean]]

    @property
    def nbytes(self) -> int:
        return sum(part.message.nbytes for means in self.means for part in means)

    def mean(self, piece: int, base: Tensor, coding: Codec) -> Tensor:
        """Return the mean change of a piece, as members of the round have read it; ``base`` is the piece before it."""
        taken, start = [], 0
        for part in self.means[piece]:
            values, message = base[start : start + part.count], part.message.to(base.device)
            if message.dtype == torch.uint8 and part.count:
                message = coding.decode_mean(values, Offset(piece, start), message, message)
            taken.append(message)
            start += part.count
        return torch.cat(taken)


class History:
    """The last rounds of one worker, each made of the base before it.

    Args:
        limit: bytes that it may keep.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._made: dict[int, MadeBase] = {}
        """Rounds by the base before them, the oldest first."""

    def add(self, made: MadeBase) -> None:
        """Note a round."""
        self._made[made.before] = made
        while sum(each.nbytes for each in self._made.values()) > self._limit:
            del self._made[next(iter(self._made))]

    def since(self, base: int, newest: int) -> list[MadeBase] | None:
        """Return the rounds that lead from ``base`` to ``newest``, or None if one of them is not kept."""
        found: list[MadeBase] = []
        while base != newest:
            made = self._made.get(base)
            if made is None:
                return None
            found.append(made)
            base = made.sequence
        return found


def send(missed: Mapping[int, Sequence[MadeBase] | None], replicas: Replicas, tag: int) -> list[Transfers]:
    """Begin to send each of these pipelines the rounds that it has missed; None tells it that they are not kept."""
    begun = []
    for pipeline, rounds in missed.items():
        packed = torch.empty(0, dtype=torch.uint8) if rounds is None else _packed(rounds)
        for message in (torch.tensor([packed.numel()]), packed):
            begun.append(transfers.begin({pipeline: message}, {}, replicas, tag + _BESIDE))
    return begun


class Arriving:
    """Missed rounds on their way from ``source``, taken in by a thread while the round itself goes on."""

    def __init__(self, source: int, replicas: Replicas, tag: int) -> None:
        self._rounds: list[MadeBase] | None = None
        self._failure: WorkerFailedError | None = None
        self._thread = Thread(target=self._take, args=[source, replicas, tag], name="missed rounds", daemon=True)
        self._thread.start()

    def wait(self) -> list[MadeBase] | None:
        """Return the rounds; None if the source does not keep them.

        Raises:
            WorkerFailedError: the source is gone, or a transfer has timed out.
        """
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._rounds

    def _take(self, source: int, replicas: Replicas, tag: int) -> None:
        try:
            size = torch.zeros(1, dtype=torch.int64)
            transfers.begin({}, {source: size}, replicas, tag + _BESIDE).wait()
            packed = torch.empty(int(size), dtype=torch.uint8)
            transfers.begin({}, {source: packed}, replicas, tag + _BESIDE).wait()
            self._rounds = _unpacked(packed) if packed.numel() else None
        except WorkerFailedError as error:
            self._failure = error


def _packed(rounds: Sequence[MadeBase]) -> Tensor:
    """Return rounds as bytes: the number of their messages, what each of these is, and their contents."""
    said, contents = [0], []
    for made in rounds:
        for piece, means in enumerate(made.means):
            for part in means:
                said += [
                    made.before,
                    made.sequence,
                    piece,
                    part.count,
                    part.message.numel(),
                    _TYPES.index(part.message.dtype),
                ]
                contents.append(part.message.cpu().view(torch.uint8))
    said[0] = len(contents)
    return torch.cat([torch.tensor(said).view(torch.uint8), *contents])


def _unpacked(packed: Tensor) -> list[MadeBase]:
    """Return the rounds of :func:`_packed`; their messages stay on the CPU."""
    count = int(packed[:8].view(torch.int64))
    at = 8 + 48 * count
    found: dict[tuple[int, int], dict[int, list[SentMean]]] = {}
    for before, sequence, piece, values, length, kind in packed[8:at].view(torch.int64).view(count, 6).tolist():
        dtype = _TYPES[kind]
        content = packed[at : at + length * dtype.itemsize]
        at += content.numel()
        found.setdefault((before, sequence), {}).setdefault(piece, []).append(
            SentMean(values, content.clone().view(dtype))
        )
    return [MadeBase(*names, [means[piece] for piece in sorted(means)]) for names, means in found.items()]
