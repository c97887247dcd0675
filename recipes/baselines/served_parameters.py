"""Parameter servers: pipelines train alone for a clock, push their changes, and pull the parameters with all changes.

As in HetPipe (Park et al. 2020), a pipeline is a virtual worker: after a clock of one or several mini-batches, it
pushes the sum of its updates to a parameter server. The answer comes when the rule of admission lets its next clock
begin, and holds the parameters with all changes that count so far. Each stage has its own server, in the process of one
of its replicas; successive stages have theirs in successive pipelines. A server runs in threads of the training
process, one for each remote pipeline, which share the parameters under one lock.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe import p2p
from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.sync.synchronizer import Replica, Synchronizer
from lightning_sdpipe.topology.groups import Replicas
from recipes.baselines.admission import Admission, AdmissionRule, Verdict, admission

_TAG = 2**31 - 2
_PUSH, _LEAVE, _LEAVE_EMPTY = 0, 1, 2


@dataclass(frozen=True)
class Pulled:
    """The answer to a pipeline's changes."""

    parameters: Sequence[Tensor]  # on the CPU, in the order of the changes
    members: int  # number of pipelines that take part, this one included
    seconds_waiting: float  # until the pipeline's next clock could begin


class ServedParameters:
    """Serves parameters from its construction until every pipeline has left.

    Args:
        parameters: flat tensors, with the values that every pipeline has at the start.
        admission: the admission, which every pipeline has joined.
        remote: the global rank of every pipeline except this process's own.
        group: a gloo process group of all pipelines.
        timeout: most seconds that a pipeline waits for slower ones.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        admission: Admission,
        remote: Mapping[int, int],
        group: dist.ProcessGroup,
        timeout: float,
    ) -> None:
        self._parameters = [p.detach().to("cpu", copy=True) for p in parameters]
        self._round: list[Tensor] | None = None
        """Sum of the open round's changes; None if there are none."""
        self._admission = admission
        self._group = group
        self._timeout = timeout
        self._changed = threading.Condition()
        self._failure: str | None = None
        for pipeline, rank in remote.items():
            threading.Thread(
                target=self._serve, args=(pipeline, rank), name=f"parameter server {pipeline}", daemon=True
            ).start()

    def push(self, pipeline: int, changes: Sequence[Tensor]) -> Pulled:
        """Take the changes of a pipeline's clock, and wait until it may begin the next one.

        Raises:
            WorkerFailedError: another pipeline failed, or the awaited pipelines did not push in time.
        """
        start = time.perf_counter()
        with self._changed:
            self._take(self._admission.push(pipeline), changes)
            self._await(
                lambda: self._admission.waits(pipeline),
                lambda: f"pipelines {self._admission.awaited_by(pipeline)}, which have not pushed",
            )
            self._admission.pull(pipeline)
            waited = time.perf_counter() - start
            return Pulled([p.clone() for p in self._parameters], len(self._admission.active), waited)

    def leave(self, pipeline: int, changes: Sequence[Tensor], pushes: bool = True) -> None:
        """Take the changes of a pipeline that ends its epoch, if it ``pushes`` any."""
        with self._changed:
            self._take(self._admission.leave(pipeline, pushes), changes)

    def close(self) -> Sequence[Tensor]:
        """Wait until every pipeline has left; return the parameters with all changes.

        Raises:
            WorkerFailedError: a pipeline failed, or did not leave in time.
        """
        with self._changed:
            self._await(
                lambda: bool(self._admission.active),
                lambda: f"pipelines {sorted(self._admission.active)} to end the epoch",
            )
            return self._parameters

    def _take(self, verdict: Verdict, changes: Sequence[Tensor]) -> None:
        """Carry out the verdict on a push. A round that consists of this push alone needs no memory of its own."""
        scale = verdict.weight if self._round is not None or verdict.closes is None else verdict.weight * verdict.closes
        if verdict.weight:
            if self._round is None and verdict.closes is None:
                self._round = [torch.zeros_like(p) for p in self._parameters]
            into = self._parameters if self._round is None else self._round
            for held, change in zip(into, changes, strict=True):
                held.add_(change, alpha=scale)
        if verdict.closes is not None and self._round is not None:
            for parameter, held in zip(self._parameters, self._round, strict=True):
                parameter.add_(held, alpha=verdict.closes)
            self._round = None
        self._changed.notify_all()

    def _await(self, blocked: Callable[[], bool], awaited: Callable[[], str]) -> None:
        until = time.monotonic() + self._timeout
        while self._failure is not None or blocked():
            if self._failure is not None:
                raise WorkerFailedError(self._failure)
            left = until - time.monotonic()
            if left <= 0:
                raise WorkerFailedError(f"the parameter server waited {self._timeout:g} s for {awaited()}")
            self._changed.wait(left)

    def _serve(self, pipeline: int, rank: int) -> None:
        """Serve one remote pipeline, until it leaves."""
        peer = f"pipeline {pipeline} (rank {rank})"
        changes = [torch.empty_like(p) for p in self._parameters]
        try:
            while True:
                (kind,) = p2p.receive([torch.empty(1, dtype=torch.int64)], rank, self._group, _TAG, peer).wait()
                p2p.receive(changes, rank, self._group, _TAG, peer).wait()
                if int(kind) != _PUSH:
                    self.leave(pipeline, changes, int(kind) == _LEAVE)
                    return
                try:
                    pulled = self.push(pipeline, changes)
                except WorkerFailedError as error:
                    p2p.send_bytes(json.dumps({"error": str(error)}).encode(), rank, self._group, _TAG, peer).wait()
                    raise
                head = json.dumps({"members": pulled.members, "waited": pulled.seconds_waiting}).encode()
                p2p.send_bytes(head, rank, self._group, _TAG, peer).wait()
                p2p.send(pulled.parameters, rank, self._group, _TAG, peer).wait()
        except Exception as error:  # push() and close() raise it in the training; a thread could only print it
            reason = str(error) if isinstance(error, WorkerFailedError) else f"{type(error).__name__}: {error}"
            with self._changed:
                self._failure = self._failure or reason
                self._changed.notify_all()


@dataclass(frozen=True)
class RemoteServer:
    """A pipeline's connection to a :class:`ServedParameters` in another process.

    Args:
        rank: global rank of the server.
        group: the server's process group.
        name: name of the server, for messages.
    """

    rank: int
    group: dist.ProcessGroup
    name: str

    def push(self, pipeline: int, changes: Sequence[Tensor]) -> Pulled:
        """See :meth:`ServedParameters.push`."""
        self._send(_PUSH, changes)
        head = json.loads(p2p.receive_bytes(self.rank, self.group, _TAG, self.name))
        if "error" in head:
            raise WorkerFailedError(head["error"])
        parameters = [torch.empty_like(change, device="cpu") for change in changes]
        p2p.receive(parameters, self.rank, self.group, _TAG, self.name).wait()
        return Pulled(parameters, head["members"], head["waited"])

    def leave(self, pipeline: int, changes: Sequence[Tensor], pushes: bool = True) -> None:
        """See :meth:`ServedParameters.leave`."""
        self._send(_LEAVE if pushes else _LEAVE_EMPTY, changes)

    def _send(self, kind: int, changes: Sequence[Tensor]) -> None:
        p2p.send([torch.tensor([kind])], self.rank, self.group, _TAG, self.name).wait()
        p2p.send(changes, self.rank, self.group, _TAG, self.name).wait()


class StaleSynchronous(Synchronizer):
    """Pushes and pulls every ``every`` updates.

    Args:
        replica: this worker.
        rule: decides which pushes count, and which workers may go on.
        every: number of updates in a clock.
    """

    def __init__(self, replica: Replica, rule: AdmissionRule, every: int) -> None:
        super().__init__(replica)
        rule.check_fits(len(replica.ranks))
        self._rule = rule
        self._every = every
        self._channel = replica.side_channel()
        self._host = replica.stage % len(replica.ranks)
        self._server: ServedParameters | RemoteServer | None = None
        self._pulled: list[Tensor] = []
        self._updates = 0

    @property
    def equal_at_start(self) -> Replicas | None:
        """See the base class."""
        return self.replica.among

    @property
    def shares_next(self) -> bool:
        """See the base class."""
        return (self._updates + 1) % self._every == 0

    def synchronise(self) -> None:
        """At the end of a clock, push the changes of the parameters since the last pull, and pull."""
        self._updates += 1
        if self._updates % self._every:
            self.statistics.count(members=1)
            return
        assert self._server is not None
        start = time.perf_counter()
        pulled = self._server.push(self.replica.pipeline, self._changes())
        for bucket, before, now in zip(self.replica.exchanged, self._pulled, pulled.parameters, strict=True):
            bucket.buffer.copy_(now)
            before.copy_(now)
        spent = time.perf_counter() - start
        self.statistics.count(pulled.members, pulled.seconds_waiting, spent - pulled.seconds_waiting)

    def start(self) -> None:
        replica = self.replica
        self._updates = 0
        self._pulled = [bucket.buffer.clone() for bucket in replica.exchanged]
        rank = replica.ranks[self._host]
        if replica.pipeline != self._host:
            name = f"the parameter server of stage {replica.stage} (rank {rank})"
            self._server = RemoteServer(rank, self._channel, name)
            return
        admitted = admission(self._rule, len(replica.ranks))
        for pipeline in range(len(replica.ranks)):
            admitted.join(pipeline)
        remote = {pipeline: other for pipeline, other in enumerate(replica.ranks) if pipeline != self._host}
        seconds = 0.9 * replica.timeout.total_seconds()  # so that its error comes before transfers time out
        self._server = ServedParameters(self._pulled, admitted, remote, self._channel, seconds)

    def stop(self) -> None:
        assert self._server is not None
        self._server.leave(self.replica.pipeline, self._changes(), self._updates % self._every != 0)

    def make_parameters_equal(self) -> None:
        if isinstance(self._server, ServedParameters):
            for bucket, value in zip(self.replica.exchanged, self._server.close(), strict=True):
                bucket.buffer.copy_(value)
        self._server = None
        self.replica.take_over(self._host)

    def _changes(self) -> list[Tensor]:
        changes = []
        for bucket, before in zip(self.replica.exchanged, self._pulled, strict=True):
            bucket.check(take_back=True)
            changes.append((bucket.buffer - before).cpu())
        return changes
