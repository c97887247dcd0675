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
from lightning_sdpipe.policies import Group, Worker
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
    assert client.asked == [0, 0, 0], "all stages count from the moment they take part"
