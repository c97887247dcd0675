"""What an exchange is: it is started, waited for and committed, piece by piece, and the model changes in commit only.

A piece is taken over whole or not at all, and what will be taken over is computed beside the model. So scratch memory
is that of pieces and not of the model, and when a member is lost in the middle, every coordinate of every survivor is
either what it was or a mean of models that existed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_sdpipe.p2p import labelled
from lightning_sdpipe.policies.decisions import Group

PIECE = 2**22
"""Elements that are moved, and taken over, at once."""


class Pending(Protocol):
    """An exchange under way. :meth:`wait` and :meth:`commit` alternate, once for each piece."""

    seconds_waiting: float
    """Until the first message of every other member was there: what was waited for them, nearly."""

    def wait(self) -> bool:
        """Waits for the next piece, which lies beside the model then; False when all have been committed.

        Raises:
            WorkerFailedError: a member is gone, or a transfer has timed out.
        """

    def commit(self) -> None:
        """Puts the piece that was waited for into the model."""

    def abort(self) -> None:
        """Drops what is not committed. The model keeps what is, and nothing more will change."""


class Mover(Protocol):
    """How tensors move between the members of a group; the group says whose model counts how much."""

    def start(self, tensors: Sequence[Tensor], group: Group) -> Pending:
        """Begins to move ``tensors``; every member calls it with tensors of equal lengths and with the same group.

        Args:
            tensors: contiguous, of the model. They must not change until they are committed.
            group: its ``sequence`` tells messages of groups apart that overlap in time.
        """


class Scratch:
    """Memory for a piece, kept from one exchange to the next: fresh memory costs as much as a pass over it."""

    def __init__(self) -> None:
        self._free: Tensor | None = None

    def lend(self, length: int, like: Tensor) -> Tensor:
        """A flat tensor of that length at least, with the dtype and the device of ``like``."""
        free, self._free = self._free, None
        if free is None or (free.dtype, free.device) != (like.dtype, like.device) or len(free) < length:
            free = like.new_empty(length)
        return free

    def give_back(self, scratch: Tensor) -> None:
        """Nothing writes into it any more."""
        self._free = scratch


def finish(pending: Pending, moved: Callable[[], None] = lambda: None) -> float:
    """Goes through all pieces that are left, and calls ``moved`` after each; after a failure those that are not
    committed are dropped.

    Returns:
        Seconds that were waited for the other members.
    """
    try:
        with labelled("exchange"):
            while pending.wait():
                pending.commit()
                moved()
    except BaseException:
        pending.abort()
        raise
    return pending.seconds_waiting


def pieces_of(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Views of flat tensors, none longer than a piece."""
    for tensor in tensors:
        if tensor.numel():
            yield from torch.split(tensor.view(-1), PIECE)


def tag_of(group: Group) -> int:
    """For the messages of ``group``."""
    return group.sequence % 2**31
