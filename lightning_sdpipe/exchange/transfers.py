"""Messages between the replicas of a stage, several at a time. Members are identified by their ranks in a process
group, which ``torch.distributed`` need not know by name.

If a connection ends in the middle of a message, gloo's wait for that message, on either side, goes on until its
timeout: neither the end nor a timeout of another message ends it. Over a slow link that is the usual moment for a
process to be killed in. So where replicas say when their group is given up, a thread waits for long messages.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe import p2p
from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.p2p import unrecorded
from lightning_sdpipe.topology.groups import Replicas

LONG = 2**16
"""Bytes of messages from which on a thread waits for them. Shorter ones are on their way for a moment only."""
_GLANCE = 0.05
"""Seconds between two looks at whether the group was given up."""


@dataclass
class Transfers:
    """Messages under way; keeps their tensors alive."""

    works: list[tuple[str, dist.Work]]  # the other side of each, and the work
    staged: list[tuple[Tensor, Tensor]]  # where a message arrives, and where it is to go
    kept: list[Tensor]
    limit: timedelta = timedelta(0)  # zero: that of the process group
    given_up: threading.Event | None = None  # see Replicas

    def wait(self) -> None:
        """Wait until all messages have arrived and left.

        Raises:
            WorkerFailedError: a member closed the connection, the group's timeout passed, or the group was given up;
                the message names the member.
        """
        if self.given_up is None or sum(tensor.nbytes for tensor in self.kept) < LONG:
            _wait(self.works, self.limit)
        else:
            self._wait_in_thread(self.given_up)
        for arrived, aim in self.staged:
            aim.copy_(arrived)
        self.works, self.staged, self.kept = [], [], []

    def _wait_in_thread(self, given_up: threading.Event) -> None:
        # In a thread that is left alone, with its tensors, if its wait goes on to the timeout.
        wait = _LongWait(self.works, self.kept, self.limit)
        try:
            waiter = _idle.pop()
        except IndexError:
            waiter = _Waiter()
        waiter.waits.put(wait)
        while not wait.done.wait(_GLANCE):
            if given_up.is_set() and not wait.done.wait(_GLANCE):
                peers = ", ".join(sorted({peer for peer, _ in self.works}))
                raise WorkerFailedError(f"exchanging with {peers} was broken off, since the process group is given up")
        if wait.failure is not None:
            raise wait.failure


@dataclass
class _LongWait:
    """A wait for messages, whose tensors it keeps alive."""

    works: Sequence[tuple[str, dist.Work]]
    kept: Sequence[Tensor]
    limit: timedelta
    failure: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


class _Waiter:
    """A thread that waits for long messages, again and again: where processors are busy, a new thread is longer in
    getting one than a thread that has waited."""

    def __init__(self) -> None:
        self.waits: queue.SimpleQueue[_LongWait] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="long messages", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._do(self.waits.get())

    def _do(self, wait: _LongWait) -> None:
        try:
            _wait(wait.works, wait.limit)
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
    transfers = Transfers([], [], [], replicas.limit, replicas.given_up)
    replicas.traffic.add(sum(tensor.nbytes for tensor in outgoing.values()))
    operations = []
    for pipeline, aim in into.items():
        if aim.numel():
            landing = aim
            if replicas.stages(aim):
                landing = p2p.pinned_like(aim)
                transfers.staged.append((landing, aim))
            operations.append((False, pipeline, landing))
    for pipeline, tensor in outgoing.items():
        if tensor.numel():
            staged = p2p.pinned_like(tensor).copy_(tensor) if replicas.stages(tensor) else tensor
            operations.append((True, pipeline, staged))
    transfers.kept += [tensor for _, _, tensor in operations]
    names = [replicas.name(pipeline) for _, pipeline, _ in operations]
    if operations and replicas.coalesces(operations[0][2].device):
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
            transfers.works = [(several, work) for work in dist.batch_isend_irecv(batch)]
        return transfers
    for (sends, pipeline, tensor), name in zip(operations, names, strict=True):
        start = replicas.group.send if sends else replicas.group.recv
        try:
            with unrecorded():
                transfers.works.append((name, start([tensor], replicas.ranks[pipeline], tag)))
        except RuntimeError as error:
            raise _failed(name, error) from error
    return transfers


def _wait(works: Sequence[tuple[str, dist.Work]], limit: timedelta) -> None:
    for peer, work in works:
        try:
            work.wait(limit)
        except RuntimeError as error:
            raise _failed(peer, error) from error


def _failed(peer: str, error: RuntimeError) -> WorkerFailedError:
    return WorkerFailedError(f"exchanging with {peer} failed: {str(error).splitlines()[0]}")
