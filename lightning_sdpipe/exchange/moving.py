"""Interface of an exchange, and its plainest kinds: the weighted mean of models over the members of a group, or of two.

An exchange is started, waited for and committed, piece by piece; only a commit changes the model. A piece is committed
whole or not at all, and results are computed beside the model. So scratch memory is that of pieces and not of the
model, and when a member is lost in the middle, every coordinate of every survivor is either unchanged or a mean of
models that existed.

:class:`GroupMean` uses links that already exist. A group of k workers changes from iteration to iteration, and making a
communicator for it costs more than the averaging (tens of milliseconds on gloo). So its members reduce and gather with
point-to-point transfers inside the process group of their stage: each averages one k-th of a piece, which the others
send it, and sends them the result. Each sends 2 (k − 1) / k times the tensors, as in a ring, but in two steps instead
of 2 (k − 1), which matters where tensors are short or processes wait for a core. The others' parts of a member's own
k-th lie where the results of the other k-ths will arrive, so a piece needs memory of its own size.

:class:`PairMean` averages the published tensors of two workers while they go on changing (asynchronous AD-PSGD). Each
sends a copy of a piece as it is now. The received copy does not replace the piece, which may have changed by then: the
difference of the two copies is added, times the other one's weight. With equal weights the sum over both stays the
same, whatever happens at the same time, and neither holds a lock while it waits for the other.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange import transfers
from lightning_sdpipe.exchange.transfers import Transfers
from lightning_sdpipe.p2p import labelled
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.topology.groups import Replicas

PIECE = 2**22
"""Largest number of elements that are moved and committed at once."""
_BLOCK = 2**16  # elements that are added up at once, since they fit into a processor's cache


class Pending(Protocol):
    """An exchange under way. :meth:`wait` and :meth:`commit` alternate, once for each piece. Where other code changes
    the tensors meanwhile, several pieces may be waited for before the first is committed."""

    seconds_waiting: float
    """Seconds until the first message of every other member had arrived: nearly the time waited for these members."""

    def wait(self) -> bool:
        """Wait for the next piece, which then lies beside the model; return False when all have been committed.

        Raises:
            WorkerFailedError: a member is gone, or a transfer has timed out.
        """

    def commit(self) -> None:
        """Put the piece that was waited for into the model."""

    def abort(self) -> None:
        """Drop all pieces that are not committed. The model keeps committed ones, and nothing more changes it."""


class Mover(Protocol):
    """Moves tensors between the members of a group; the group gives the weight of each model."""

    def start(self, tensors: Sequence[Tensor], group: Group) -> Pending:
        """Begin to move ``tensors``; every member calls it with tensors of equal lengths and with the same group.

        Args:
            tensors: contiguous tensors of the model. They must not change until they are committed.
            group: the members; its ``sequence`` distinguishes messages of groups that overlap in time.
        """


class PieceByPiece(ABC):
    """Base of a :class:`Pending` that computes the outcome of one piece after the other, each when it is waited for.

    Args:
        tensors: see :meth:`Mover.start`.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.seconds_waiting = 0.0
        self._to_come = deque(enumerate(pieces_of(tensors)))
        self._arrived: deque[tuple[int, Tensor, Any]] = deque()
        """Pieces that are not committed: number, piece, outcome."""
        self._first = True

    @abstractmethod
    def _compute(self, number: int, piece: Tensor) -> Any:
        """Exchange ``piece`` with the other members, and return the outcome."""

    @abstractmethod
    def _put(self, number: int, piece: Tensor, outcome: Any) -> None:
        """Put the outcome into the model."""

    def wait(self) -> bool:
        if not self._to_come:
            return False
        start = time.perf_counter()
        number, piece = self._to_come[0]
        self._arrived.append((number, piece, self._compute(number, piece)))
        self._to_come.popleft()
        if self._first:
            self.seconds_waiting, self._first = time.perf_counter() - start, False
        return True

    def commit(self) -> None:
        self._put(*self._arrived.popleft())

    def abort(self) -> None:
        self._to_come.clear()
        self._arrived.clear()


class Scratch:
    """Memory for a piece, kept from one exchange to the next: fresh memory costs as much as a pass over it."""

    def __init__(self) -> None:
        self._free: Tensor | None = None

    def lend(self, length: int, like: Tensor) -> Tensor:
        """Lend a flat tensor of at least that length, with the dtype and the device of ``like``."""
        free, self._free = self._free, None
        if free is None or (free.dtype, free.device) != (like.dtype, like.device) or len(free) < length:
            free = like.new_empty(length)
        return free

    def give_back(self, scratch: Tensor) -> None:
        """Take back ``scratch``, into which nothing writes any more."""
        self._free = scratch


def finish(pending: Pending) -> float:
    """Commit all remaining pieces; after a failure, drop pieces that are not committed.

    Returns:
        Seconds waited for the other members.
    """
    try:
        with labelled("exchange"):
            while pending.wait():
                pending.commit()
    except BaseException:
        pending.abort()
        raise
    return pending.seconds_waiting


def pieces_of(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield views of flat tensors, none longer than a piece."""
    for tensor in tensors:
        if tensor.numel():
            yield from torch.split(tensor.view(-1), PIECE)


def copied(tensors: Sequence[Tensor], copies: list[Tensor]) -> list[Tensor]:
    """Return copies of ``tensors``, in the memory of earlier ``copies`` if these are like them."""
    if [(c.shape, c.dtype, c.device) for c in copies] != [(t.shape, t.dtype, t.device) for t in tensors]:
        copies = [torch.empty_like(tensor) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)
    return copies


def refuse_neighbours(group: Group) -> None:
    """Refuse a group whose members average with some of the others only.

    Raises:
        ConfigurationError: names the group and its reason.
    """
    if group.neighbours:
        raise ConfigurationError(
            f"group {group.sequence} gives its members neighbours of their own ({group.reason}), and this exchange "
            "averages among all of them. Leave Group.neighbours empty in the policy."
        )


def tag_of(group: Group) -> int:
    """Return the tag of the messages of ``group``."""
    return group.sequence % 2**31


class GroupMean:
    """Gives all members of a group the sum of their tensors, weighted as the group says: the same, bit for bit.

    Args:
        replicas: replicas of which this worker is one.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._scratch = Scratch()

    def start(self, tensors: Sequence[Tensor], group: Group) -> Pending:
        """Start the exchange.

        Raises:
            ConfigurationError: the group has members that average with some of the others only.
        """
        refuse_neighbours(group)
        return _Mean(tensors, group, self._replicas, self._scratch)


class _Mean:
    def __init__(self, tensors: Sequence[Tensor], group: Group, replicas: Replicas, scratch: Scratch) -> None:
        members = [worker.pipeline for worker in group.members]
        place = members.index(replicas.pipeline)
        self.seconds_waiting = 0.0
        self._others = [*members[place + 1 :], *members[:place]]  # so that members begin with different ones
        self._place = {pipeline: number for number, pipeline in enumerate(members)}
        self._weights = dict(zip(members, group.weights, strict=True))
        self._replicas = replicas
        self._tag = tag_of(group)
        self._lender = scratch
        self._to_come = deque(pieces_of(tensors) if self._others else ())
        self._first = True
        self._scattering: Transfers | None = None
        self._begin()

    def wait(self) -> bool:
        if self._scattering is None:
            return False
        start = time.perf_counter()
        self._scattering.wait()
        if self._first:
            self.seconds_waiting, self._first = time.perf_counter() - start, False
        self._add_up()
        results = {pipeline: self._slots[self._place[pipeline]] for pipeline in self._others}
        transfers.begin(dict.fromkeys(results, self._mean), results, self._replicas, self._tag).wait()
        return True

    def commit(self) -> None:
        torch._foreach_copy_(self._chunks, self._slots)
        self._lender.give_back(self._scratch)
        self._begin()

    def abort(self) -> None:
        self._to_come.clear()
        self._scattering = None  # transfers under way may still write into the scratch memory, so it is let go

    def _add_up(self) -> None:
        own, *others = [self._weights[p] for p in (self._replicas.pipeline, *self._parts)]
        block = _BLOCK if self._mean.is_cpu else max(1, len(self._mean))
        columns = [tensor.split(block) for tensor in (self._mean, self._chunk, *self._parts.values())]
        for mean, chunk, *parts in zip(*columns, strict=True):
            torch.mul(chunk, own, out=mean)
            for part, weight in zip(parts, others, strict=True):
                mean.add_(part, alpha=weight)

    def _begin(self) -> None:
        """Send the others their parts of the next piece, if there is one."""
        self._scattering = None
        if not self._to_come:
            return
        piece = self._to_come.popleft()
        size = len(self._others) + 1
        self._chunks = torch.tensor_split(piece, size)  # the first is as long as any, and one longer than the last
        longest = len(self._chunks[0])
        self._scratch = self._lender.lend(size * longest, piece)
        slots = self._scratch[: size * longest].view(size, longest)
        self._slots = [slot[: len(chunk)] for slot, chunk in zip(slots, self._chunks, strict=True)]
        own = self._place[self._replicas.pipeline]
        self._chunk, self._mean = self._chunks[own], self._slots[own]
        self._parts = {pipeline: slots[self._place[pipeline]][: len(self._chunk)] for pipeline in self._others}
        outgoing = {pipeline: self._chunks[self._place[pipeline]] for pipeline in self._others}
        self._scattering = transfers.begin(outgoing, self._parts, self._replicas, self._tag)


class PairMean:
    """Moves tensors that other code changes meanwhile, under a lock.

    Args:
        replicas: replicas of which this worker is one; exchanges of several pairs may go on at the same time.
        lock: held while a piece is copied, and while it is committed.
    """

    def __init__(self, replicas: Replicas, lock: threading.Lock) -> None:
        self._replicas = replicas
        self._lock = lock

    def start(self, tensors: Sequence[Tensor], group: Group) -> Pending:
        """Start the exchange of a group of two members."""
        return _Pair(tensors, group, self._replicas, self._lock)


class _Pair(PieceByPiece):
    def __init__(self, tensors: Sequence[Tensor], group: Group, replicas: Replicas, lock: threading.Lock) -> None:
        weights = {worker.pipeline: w for worker, w in zip(group.members, group.weights, strict=True)}
        (self._other,) = set(weights) - {replicas.pipeline}
        super().__init__(tensors)
        self._weight = weights[self._other]
        self._replicas, self._lock, self._tag = replicas, lock, tag_of(group)

    def _compute(self, number: int, piece: Tensor) -> Tensor:
        with self._lock:
            mine = piece.clone()
        theirs = torch.empty_like(mine)
        transfers.begin({self._other: mine}, {self._other: theirs}, self._replicas, self._tag).wait()
        return theirs.sub_(mine)

    def _put(self, number: int, piece: Tensor, outcome: Tensor) -> None:
        with self._lock:
            piece.add_(outcome, alpha=self._weight)


def exchange_whole(pending: Pending, group: Group, replicas: Replicas) -> None:
    """Finish the exchange of the pair ``group``, whose tensors other code may change meanwhile: neither member changes
    its own before both have all of the other's.

    Raises:
        WorkerFailedError: the other one is gone, or a transfer has timed out; nothing has changed.
    """
    (other,) = {worker.pipeline for worker in group.members} - {replicas.pipeline}
    pieces, word = 0, torch.zeros(1)
    try:
        with labelled("exchange"):
            while pending.wait():
                pieces += 1
            transfers.begin({other: word}, {other: torch.empty_like(word)}, replicas, tag_of(group)).wait()
    except BaseException:
        pending.abort()
        raise
    for _ in range(pieces):
        pending.commit()
