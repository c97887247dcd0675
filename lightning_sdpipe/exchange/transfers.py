"""Messages between the replicas of a stage, several at a time. Members are identified by their ranks in a process
group, which ``torch.distributed`` need not know by name.

If a connection ends in the middle of a message, gloo's wait for that message, on either side, goes on until its
timeout: neither the end nor a timeout of another message ends it. Over a slow link, a process is usually killed at such
a moment. So where a wait may be given up, a thread waits for long messages, and the connection is looked at meanwhile
(:func:`complete`).
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe import meter, p2p
from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.p2p import unrecorded
from lightning_sdpipe.topology.groups import Replicas

LONG = 2**16
"""Bytes of messages from which on a thread waits for them. Shorter ones are on their way for a moment only."""
_GLANCE = 0.05
"""Seconds between two looks at whether the wait was given up."""
_FOREVER = timedelta(days=1000)
_LOOKS = 20
"""Number of looks after which the connection is looked at, too."""


class PendingMessage(NamedTuple):
    """A message under way to or from the member ``rank`` of a process group, called ``peer`` in errors; or, with NCCL,
    all messages of a transfer, and the names of all members."""

    peer: str
    rank: int
    work: dist.Work
    tensors: Sequence[Tensor]


@dataclass
class Transfers:
    """Messages under way; keeps their tensors alive."""

    replicas: Replicas
    messages: list[PendingMessage] = field(default_factory=list)
    staged: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # where a message arrives, and where it is to go

    def wait(self) -> None:
        """Wait until all messages have arrived and left; raises as :func:`complete` does."""
        meter.current().waiting()  # one that is in an exchange already waits anew
        long = sum(tensor.nbytes for each in self.messages for tensor in each.tensors) >= LONG
        connections = self.replicas.connections if long else None
        complete(self.messages, self.replicas.group, self.replicas.limit, connections)
        for arrived, aim in self.staged:
            aim.copy_(arrived)
        self.messages, self.staged = [], []


def complete(
    messages: Sequence[PendingMessage], group: Any, limit: timedelta, connections: p2p.Connections | None = None
) -> None:
    """Wait until ``messages`` over ``group`` have arrived and left.

    With ``connections``, those of a group of gloo, messages may take any time: the wait for them ends when these
    have moved nothing for ``limit``, when the one to the member that is waited for has ended, or soon after they are
    given up. A thread goes on waiting then, until the group's connections are closed.

    Args:
        messages: all that are waited for, in this order.
        group: the process group.
        limit: timeout of each; zero for that of the group.
        connections: those of ``group``; None if only the timeout ends a wait.

    Raises:
        WorkerFailedError: a wait ended in one of these ways, or a transfer failed; the message names the member.
    """
    if connections is None:
        for message in messages:
            _wait(message, limit)
        return
    wait, moved, since = _LongWait(messages, _FOREVER if limit else limit), -1, time.monotonic()
    try:
        waiter = _idle.pop()
    except IndexError:
        waiter = _Waiter()
    waiter.waits.put(wait)
    for look in itertools.count(1):
        if wait.done.wait(_GLANCE):
            break
        message = messages[wait.at]
        reason = "the process group is given up" if connections.given_up.is_set() else ""
        if not reason and look % _LOOKS == 0:
            reason = p2p.lost_connection(group, message.rank)
            if (now := connections.moved()) != moved:
                moved, since = now, time.monotonic()
            elif limit and time.monotonic() - since >= limit.total_seconds():
                reason = f"no byte has come or gone for {limit.total_seconds():g} s"
        if reason and not wait.done.wait(_GLANCE) and messages[wait.at] is message:
            raise WorkerFailedError(f"exchanging with {message.peer} was broken off: {reason}")
    if wait.failure is not None:
        raise wait.failure


@dataclass
class _LongWait:
    """A wait for messages, whose tensors it keeps alive."""

    messages: Sequence[PendingMessage]
    limit: timedelta
    at: int = 0  # which of them is waited for
    failure: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


class _Waiter:
    """A thread that waits for long messages, again and again: on busy processors, a new thread gets one later than a
    thread that has waited."""

    def __init__(self) -> None:
        self.waits: queue.SimpleQueue[_LongWait] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="long messages", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._do(self.waits.get())

    def _do(self, wait: _LongWait) -> None:
        try:
            for at, message in enumerate(wait.messages):
                wait.at = at
                _wait(message, wait.limit)
        except BaseException as error:  # raised where it is waited for
            wait.failure = error
        _idle.append(self)
        wait.done.set()


_idle: list[_Waiter] = []
os.register_at_fork(after_in_child=_idle.clear)  # a child has none of the threads


def begin(outgoing: Mapping[int, Tensor], into: Mapping[int, Tensor], replicas: Replicas, tag: int) -> Transfers:
    """Send to and receive from several pipelines at once. NCCL needs both directions together: two members that began
    with the same direction would block.

    Args:
        outgoing: contiguous tensors for each pipeline, not to be changed before all transfers are waited for.
        into: contiguous tensors for the message of each pipeline.
        replicas: how to reach them.
        tag: tag of all these messages. Messages with equal tags arrive in the order in which they are sent.

    Raises:
        WorkerFailedError: a member is gone already.
    """
    transfers = Transfers(replicas)
    replicas.traffic.add(sum(tensor.nbytes for tensor in outgoing.values()))
    operations = []
    for pipeline, aim in into.items():
        if aim.numel():
            landing = aim
            if p2p.through_host(aim, replicas.group):
                landing = p2p.pinned_like(aim)
                transfers.staged.append((landing, aim))
            operations.append((False, pipeline, landing))
    for pipeline, tensor in outgoing.items():
        if tensor.numel():
            by_host = p2p.through_host(tensor, replicas.group)
            operations.append((True, pipeline, p2p.pinned_like(tensor).copy_(tensor) if by_host else tensor))
    names = [name_of(replicas, pipeline) for _, pipeline, _ in operations]
    if operations and _coalesces(replicas.group, operations[0][2]):
        batch = [
            dist.P2POp(
                dist.isend if sends else dist.irecv,
                tensor,
                group=replicas.group,
                tag=tag,
                group_peer=replicas.ranks[pipeline],
            )
            for sends, pipeline, tensor in operations
        ]
        several = ", ".join(sorted({*names}))
        with unrecorded():
            works = dist.batch_isend_irecv(batch)
        tensors = [tensor for _, _, tensor in operations]
        transfers.messages = [PendingMessage(several, 0, work, tensors) for work in works]
        return transfers
    for (sends, pipeline, tensor), name in zip(operations, names, strict=True):
        rank, start = replicas.ranks[pipeline], replicas.group.send if sends else replicas.group.recv
        try:
            with unrecorded():
                transfers.messages.append(PendingMessage(name, rank, start([tensor], rank, tag), [tensor]))
        except RuntimeError as error:
            raise _failed(name, error) from error
    return transfers


def name_of(replicas: Replicas, pipeline: int) -> str:
    """Name the replica of ``pipeline``, for errors."""
    return f"pipeline {pipeline} of stage {replicas.stage}"


def _coalesces(group: Any, tensor: Tensor) -> bool:
    """Return whether messages of both directions must be begun together (NCCL)."""
    return isinstance(group, dist.ProcessGroup) and group._get_backend(tensor.device).supports_coalescing


def _wait(message: PendingMessage, limit: timedelta) -> None:
    try:
        message.work.wait(limit)
    except RuntimeError as error:
        raise _failed(message.peer, error) from error


def _failed(peer: str, error: RuntimeError) -> WorkerFailedError:
    return WorkerFailedError(f"exchanging with {peer} failed: {str(error).splitlines()[0]}")
