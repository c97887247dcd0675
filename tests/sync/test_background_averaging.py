"""Averages beside training at their own pace: who is asked when, and what is added."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.policies import Event, Group, Joined, Left, Ready, Worker, registry
from lightning_sdpipe.policies.decentralized import Decentralized
from lightning_sdpipe.policies.events import SEGMENT
from lightning_sdpipe.policies.local_sgd import LocalSGD
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.sync.background_averaging import FreeAveraging
from tests.patience import limit, until


class Client:
    """Answers a ready when the test says so."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.known: Group | None = None

    def ready(self, number: int) -> None:
        self.asked.append(number)

    def group_if_known(self) -> Group | None:
        known, self.known = self.known, None
        return known

    def withdraw(self) -> Group | None:
        return self.group_if_known()


class Mover:
    """Makes a model of two pieces all of one value, when it is let."""

    def __init__(self, failing: bool = False) -> None:
        self.let, self.failing, self.threads = threading.Event(), failing, list[int]()

    def start(self, tensors: Sequence[Tensor], group: Group) -> Any:
        self.threads.append(threading.get_ident())
        left = list(tensors)

        def wait() -> bool:
            assert self.let.wait()
            if self.failing and len(left) == 1:
                raise WorkerFailedError("pipeline 1 is gone")
            return bool(left)

        return SimpleNamespace(wait=wait, commit=lambda: left.pop(0).fill_(6.0), abort=left.clear, seconds_waiting=0.0)


def group(*pipelines: int) -> Group:
    return Group(tuple(Worker(0, i) for i in pipelines), (1 / len(pipelines),) * len(pipelines), 3, "tested")


def made(mover: Mover, interval: float = 0.0) -> tuple[FreeAveraging, Client, list[Tensor]]:
    model, client = [torch.zeros(3), torch.zeros(2)], Client()
    replica: Any = SimpleNamespace(
        client=client,
        groups=SimpleNamespace(traffic=None),
        exchange=Exchange(overlap="free", interval=interval),
        timeout=limit(),
        exchanged=[SimpleNamespace(buffer=tensor, check=lambda take_back: None) for tensor in model],
    )
    sync = FreeAveraging(replica, mover, None)
    sync.start()
    return sync, client, model


def test_a_worker_asks_once_goes_on_and_adds_the_whole_change_to_what_it_has_by_then() -> None:
    mover = Mover()
    sync, client, model = made(mover)
    for _ in range(3):  # the others are not ready
        sync.synchronise()
    assert client.asked == [0]
    client.known = group(0, 1)
    sync.synchronise()
    for tensor in model:
        tensor.add_(1.0)  # an update meanwhile
    sync.synchronise()
    assert [tensor.unique().tolist() for tensor in model] == [[1.0], [1.0]], "nothing before all of it is there"
    mover.let.set()
    until(lambda: not sync._beside.waits)
    sync.synchronise()
    assert [tensor.unique().tolist() for tensor in model] == [[7.0], [7.0]]
    assert client.asked == [0, 1]
    assert mover.threads[0] != threading.get_ident()
    assert (sync.statistics.groups, sync.statistics.members) == (6, 7)


def test_the_next_one_is_asked_for_when_the_interval_has_passed() -> None:
    sync, client, _ = made(Mover(), interval=30.0)
    sync.synchronise()
    client.known = group(0)  # nobody else is there
    for _ in range(3):
        sync.synchronise()
    assert client.asked == [0]
    sync.settle()


def test_of_an_average_that_fails_nothing_is_added_and_training_hears_of_it() -> None:
    mover = Mover(failing=True)
    sync, client, model = made(mover)
    client.known = group(0, 1)
    mover.let.set()
    sync.synchronise()
    until(lambda: not sync._beside.waits)
    with pytest.raises(WorkerFailedError, match="pipeline 1 is gone"):
        sync.synchronise()
    assert [tensor.unique().tolist() for tensor in model] == [[0.0], [0.0]]


def test_who_stops_ends_what_it_has_asked_for_since_others_count_on_it() -> None:
    mover = Mover()
    sync, client, model = made(mover)
    sync.synchronise()
    client.known = group(0, 1)
    mover.let.set()
    sync.settle()
    assert [tensor.unique().tolist() for tensor in model] == [[6.0], [6.0]]
    for _ in range(2):
        sync.start()
        sync.synchronise()
        sync.settle()  # nobody else has come
    assert client.asked == [0, SEGMENT, 2 * SEGMENT], "all stages count from when they take part, and no number again"


class Desk:
    """The real policy; each worker gets its groups."""

    def __init__(self, config: PolicyConfig, stages: int, pipelines: int) -> None:
        self._policy = registry.build(config, stages, pipelines)
        self._answers: dict[Worker, Group] = {}
        self.sizes: dict[Worker, int] = {}
        """Members of the last group of each worker."""

    def tell(self, event: Event) -> None:
        for group in self._policy.on(event, 0.0):
            for worker in group.members:
                self._answers[worker], self.sizes[worker] = group, len(group.members)

    def client(self, worker: Worker) -> Any:
        return SimpleNamespace(
            ready=lambda number: self.tell(Ready(worker, number)),
            group_if_known=lambda: self._answers.pop(worker, None),
            withdraw=lambda: self.tell(Left(worker)) or self._answers.pop(worker, None),
        )


class Segments:
    """Workers that average freely from segment to segment."""

    def __init__(self, config: PolicyConfig, stages: int, pipelines: int) -> None:
        self.desk, self.syncs = Desk(config, stages, pipelines), dict[Worker, FreeAveraging]()
        for worker in [Worker(stage, i) for stage in range(stages) for i in range(pipelines)]:
            mover = Mover()
            mover.let.set()
            sync, _, _ = made(mover)
            sync.replica.client = self.desk.client(worker)
            self.syncs[worker] = sync
            self.desk.tell(Joined(worker))

    def average(self, *workers: Worker) -> list[int]:
        """Let each ask for an average, and take part in it; return the members of each, 0 without any."""
        self.desk.sizes.clear()
        for worker in workers:
            self.syncs[worker].synchronise()
        for worker in workers:
            sync = self.syncs[worker]
            if sync._asked:
                sync._begin(sync.replica.client.group_if_known())
            sync._end()
        return [self.desk.sizes.get(worker, 0) for worker in workers]

    def leave(self, *workers: Worker) -> None:
        for worker in workers:
            if self.syncs[worker]._asked:
                self.syncs[worker].settle()
            else:
                self.desk.tell(Left(worker))

    def begin(self, *workers: Worker) -> None:
        for worker in workers:
            self.desk.tell(Joined(worker))
            self.syncs[worker].start()


@pytest.mark.parametrize("peers", ["random", "shift_one"])
def test_pairs_of_a_segment_are_not_those_that_were_there_in_an_earlier_one(peers: Any) -> None:
    one, other = Worker(0, 0), Worker(0, 1)
    run = Segments(Decentralized(peers), 1, 2)
    assert run.average(one, other) == [2, 2]
    run.leave(other)  # out of data
    assert run.average(one) == [1]
    run.leave(one)
    run.begin(one, other)
    assert [run.average(one, other) for _ in range(2)] == [[2, 2]] * 2


def test_a_stage_does_not_wait_in_a_segment_for_what_the_last_stage_decided_at_the_end_of_an_earlier_one() -> None:
    """The first stage is in the next segment already when the last stage's second pipeline leaves the first one alone
    with its second average."""
    first, last = [[Worker(stage, i) for i in range(2)] for stage in range(2)]
    run = Segments(LocalSGD(1), 2, 2)
    assert run.average(*last, *first) == [2] * 4
    run.syncs[last[0]].synchronise()
    run.leave(*first)
    run.begin(*first)
    run.leave(last[1], last[0])
    run.begin(*last)
    assert run.average(*last, *first) == [2] * 4
