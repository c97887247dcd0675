"""Worker's half of the methods with parameter servers: pipelines train alone for a clock, push, and pull.

As in HetPipe (Park et al. 2020) a pipeline is a virtual worker: after a clock of one or several mini-batches it pushes
the sum of its updates to a parameter server and pulls the parameters with all updates. Each stage has its own server,
in the process of one of its replicas; the servers of successive stages lie in successive pipelines.
"""

from __future__ import annotations

import time

from torch import Tensor

from lightning_sdpipe.exchange.buckets import tensors_of
from lightning_sdpipe.exchange.collectives import take_over
from lightning_sdpipe.exchange.server import RemoteServer, ServedParameters
from lightning_sdpipe.policies.admission import AdmissionRule, admission
from lightning_sdpipe.sync.synchronizer import Replica, Synchronizer
from lightning_sdpipe.topology.groups import Replicas


class StaleSynchronous(Synchronizer):
    """Pushes and pulls every ``every`` updates.

    Args:
        replica: this worker.
        rule: decides which pushes count, and which workers may go on.
        every: number of updates of a clock.
    """

    def __init__(self, replica: Replica, rule: AdmissionRule, every: int) -> None:
        super().__init__(replica)
        rule.check_fits(len(replica.ranks))
        self._rule = rule
        self._every = every
        self._channel = replica.groups.side_channel(replica.timeout)
        self._host = replica.stage % len(replica.ranks)
        self._server: ServedParameters | RemoteServer | None = None
        self._pulled: list[Tensor] = []
        self._updates = 0

    @property
    def equal_at_start(self) -> Replicas | None:
        """See the base class."""
        return self.replica.groups.replicas()

    @property
    def shares_next(self) -> bool:
        """See the base class."""
        return (self._updates + 1) % self._every == 0

    def synchronise(self) -> None:
        """At the end of a clock, pushes the changes of the parameters since the last pull, and pulls."""
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
        seconds = 0.9 * replica.timeout.total_seconds()  # so that its message comes before the transfers give up
        self._server = ServedParameters(self._pulled, admitted, remote, self._channel, seconds)

    def stop(self) -> None:
        assert self._server is not None
        self._server.leave(self.replica.pipeline, self._changes(), self._updates % self._every != 0)

    def make_parameters_equal(self) -> None:
        server, replica = self._server, self.replica
        if isinstance(server, ServedParameters):
            for bucket, value in zip(replica.exchanged, server.close(), strict=True):
                bucket.buffer.copy_(value)
        self._server = None
        take_over(tensors_of(replica.parameters), replica.groups.replicas(), self._host)

    def _changes(self) -> list[Tensor]:
        changes = []
        for bucket, before in zip(self.replica.exchanged, self._pulled, strict=True):
            bucket.check()
            changes.append((bucket.buffer - before).cpu())
        return changes
