"""The replicas of one stage as threads of this process: real methods, policies and transfers, and a scheduler that is
called instead of being written to."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sdpipe.exchange.background import Overlapped
from lightning_sdpipe.exchange.buckets import flatten
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.meter import Traffic
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Contains, Event, Joined, Left, Ready, Tick, Worker
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.sync.background_averaging import AsynchronousPairs, FreeAveraging
from lightning_sdpipe.sync.outer_averaging import OuterAveraging
from lightning_sdpipe.sync.rendezvous import Rendezvous
from lightning_sdpipe.sync.synchronizer import Replica, Synchronizer, SyncMethod
from lightning_sdpipe.topology.groups import ProcessGroups, Replicas
from lightning_sdpipe.topology.mesh import Mesh
from lightning_sdpipe.worker.scheduler_connection import SchedulerConnection
from tests.exchange.test_group_mean import values
from tests.exchange.threads import Crew, together
from tests.patience import limit

SIZE = 50


def equal(pipeline: int) -> Tensor:
    """A parameter that is the same everywhere."""
    return values(99, SIZE)


def change(pipeline: int, update: int) -> Tensor:
    """Of that parameter, by one update."""
    return 0.1 * values(100 * update + pipeline, SIZE)


def make_update(sync: Synchronizer, parameter: nn.Parameter, number: int, change: Tensor) -> None:
    """As training does."""
    sync.announce(number)
    parameter.data.add_(change)
    sync.synchronise()


@contextmanager
def in_a_process(
    rank: int, count: int, method: SyncMethod, *parameters: nn.Parameter
) -> Iterator[tuple[Synchronizer, Rendezvous]]:
    """What a worker of ``count`` real processes has of a method, with a real scheduler; it has joined."""
    mesh = Mesh.build(count, 1)
    groups, trained = ProcessGroups.open(mesh, limit()), [each for each in parameters if each.requires_grad]
    connection = SchedulerConnection(mesh, method.policy, 5, None, lambda: "tcp://127.0.0.1:*", 20.0, lambda: None)
    with closing(connection):
        replica = Replica(connection.client, groups, flatten(parameters), [], trained, limit())
        sync = method.build(replica)
        rendezvous = Rendezvous(sync)
        rendezvous.join()
        yield sync, rendezvous


class Office:
    """A scheduler for one stage: the real policy, behind a lock."""

    def __init__(self, config: PolicyConfig, size: int) -> None:
        self._policy = registry.build(config, 1, size)
        self._changed = threading.Condition()
        self._answers: list[deque[Group]] = [deque() for _ in range(size)]
        self.clients = [Client(self, pipeline) for pipeline in range(size)]
        self.groups: list[Group] = []
        self._joined: set[Worker] = set()

    def tell(self, event: Event) -> None:
        with self._changed:
            self._tell(event)

    def answer(self, pipeline: int) -> Group:
        with self._changed:
            while not self._answers[pipeline]:
                due = self._policy.deadline()
                self._changed.wait(None if due is None else max(0.0, due - time.monotonic()))
                if due is not None and time.monotonic() >= due:
                    self._tell(Tick())
            return self._answers[pipeline].popleft()

    def has_answered(self, pipeline: int) -> bool:
        with self._changed:
            self._tell(Tick())
            return bool(self._answers[pipeline])

    def withdraw(self, worker: Worker) -> Group | None:
        """Lets a worker leave, unless it has; returns the group that it was named for."""
        with self._changed:
            answers = self._answers[worker.pipeline]
            group = answers.popleft() if answers else None
            if worker in self._joined:
                self._joined.remove(worker)
                self._tell(Left(worker))
            return group

    def _tell(self, event: Event) -> None:
        if isinstance(event, Joined):
            self._joined.add(event.worker)
        for group in self._policy.on(event, time.monotonic()):
            self.groups.append(group)
            for worker in group.members:
                if worker not in group.passive:
                    self._answers[worker.pipeline].append(group)
            for worker in group.passive:
                self.clients[worker.pipeline].on_invitation(group, None)
        self._changed.notify_all()


class Client:
    """What a worker has of it."""

    def __init__(self, office: Office, pipeline: int) -> None:
        self._office = office
        self._worker = Worker(0, pipeline)
        self.on_invitation: Callable[[Group, int | None], None] = lambda group, after: None

    def join(self) -> None:
        self._office.tell(Joined(self._worker))

    def leave(self) -> None:
        self.withdraw()

    def withdraw(self) -> Group | None:
        return self._office.withdraw(self._worker)

    def ready(self, iteration: int, contains: int | None = None, again: bool = False) -> None:
        self._office.tell(Ready(self._worker, iteration, contains, again))

    def contains(self, rounds: int) -> None:
        self._office.tell(Contains(self._worker, rounds))

    def group(self) -> Group:
        return self._office.answer(self._worker.pipeline)

    def group_if_known(self) -> Group | None:
        return self._office.answer(self._worker.pipeline) if self._office.has_answered(self._worker.pipeline) else None


class Places:
    """As :class:`~lightning_sdpipe.topology.groups.ProcessGroups`, of groups without a name."""

    def __init__(self, crew: Crew, beside: Crew, rank: int) -> None:
        self.mesh, self.rank = Mesh.build(crew.size, 1), rank
        self.stage, self._beside = crew.groups[rank], beside.groups[rank]
        self.meeting = self.stage
        self.traffic = Traffic()

    def replicas(self, group: Any = None) -> Replicas:
        ranks = self.mesh.stage_ranks(0)
        return Replicas(group or self.stage, ranks, 0, self.mesh.locate(self.rank)[1], self.traffic)

    def side_channel(self, timeout: timedelta | None) -> Any:
        return self._beside


def assert_uses(sync: Synchronizer, exchange: Exchange) -> None:
    """That it moves models by this exchange: others lead to the same models."""
    found, todo = dict[int, Any](), list[Any]([sync])
    while todo:
        each = todo.pop()
        if isinstance(each, (list, tuple)):
            todo += each
        elif isinstance(each, FunctionType):
            todo += [cell.cell_contents for cell in each.__closure__ or ()]
        elif type(each).__module__.startswith("lightning_sdpipe.") and not isinstance(each, (Replica, Exchange)):
            if id(each) not in found:
                todo += getattr(each, "__dict__", {}).values()
            found[id(each)] = each
    parts = list(found.values())
    assert exchange.is_full or exchange.payload in parts
    assert (exchange.hierarchy == "hosts") == any(getattr(each, "hosts", None) for each in parts)
    assert (exchange.overlap == "free") == any(isinstance(each, FreeAveraging) for each in parts)
    if not isinstance(
        sync, AsynchronousPairs | FreeAveraging | OuterAveraging
    ):  # which are beside training by themselves
        assert (exchange.overlap == "step") == any(isinstance(each, Overlapped) for each in parts)


class Stage:
    """N replicas, whose process groups serve several trainings, one after the other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._crew, self._beside = Crew(size), Crew(size)

    def run(
        self,
        method: SyncMethod,
        exchange: Exchange,
        start: Callable[[int], Tensor],
        train: Callable[[int, nn.Parameter, Synchronizer, Rendezvous], Any],
        scale: Callable[[], float] = lambda: 1.0,
        watch: bool = True,
        groups: list[Group] | None = None,
    ) -> list[Any]:
        """What ``train(pipeline, parameter, synchronizer, rendezvous)`` returns for each pipeline.

        Args:
            method: of synchronisation.
            exchange: of it.
            start: the parameter of each pipeline.
            train: begins and ends outside of training.
            scale: of the loss.
            watch: see :class:`~lightning_sdpipe.sync.synchronizer.Replica`.
            groups: gets those that were decided.
        """
        office = Office(method.policy, self.size)
        office.groups = office.groups if groups is None else groups

        def work(rank: int) -> Any:
            places: Any = Places(self._crew, self._beside, rank)
            pipeline = places.mesh.locate(rank)[1]
            parameter = nn.Parameter(start(pipeline))
            client: Any = office.clients[pipeline]
            buckets = flatten([parameter])
            sync = method.build(Replica(client, places, buckets, [], [parameter], limit(), watch, exchange, scale))
            assert_uses(sync, exchange)
            with torch.enable_grad():
                return pipeline, train(pipeline, parameter, sync, Rendezvous(sync))

        return [outcome for _, outcome in sorted(together(self.size, work), key=lambda found: found[0])]
