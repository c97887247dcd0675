"""Waits for messages that cannot come, over gloo between threads."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe import p2p
from lightning_sdpipe.errors import LOST_CONNECTION, WorkerFailedError
from lightning_sdpipe.worker import scheduler_connection
from lightning_sdpipe.worker.scheduler_connection import Watchdog
from tests import relay
from tests.patience import until

SIZE = 2**23  # values: more than a network holds


@contextmanager
def receiving(group: Any) -> Iterator[tuple[Tensor, threading.Thread]]:
    """A thread waits for a message of the other member meanwhile, which comes into that tensor."""
    transfer, arriving = p2p.Transfer("stage 0 (rank 1)", receiving=True), torch.zeros(SIZE)

    def wait() -> None:
        with suppress(WorkerFailedError):
            transfer.wait()

    transfer.start(lambda tensor, rank, group, tag: group.recv([tensor], rank, tag), [arriving], 1, group, 0)
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    yield arriving, thread
    thread.join()


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[queue.SimpleQueue[str]]:
    """What a watchdog says."""
    monkeypatch.setattr(scheduler_connection, "_LOOK", 0.1)
    monkeypatch.setattr(p2p, "_waited_for", {})  # a thread of another test may be left in a wait
    monkeypatch.setattr(dist, "get_group_rank", lambda _, rank: rank)
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    dog = Watchdog(str, lambda: None, said.put)
    dog.watch()
    yield said
    dog.disarm()


def test_a_connection_that_is_lost_amid_a_message_is_noticed(lost: queue.SimpleQueue[str]) -> None:
    """gloo itself would let the worker wait until the timeout."""
    limit = timedelta(seconds=4)
    with relay.lost_after(10**6, sender=1, timeout=limit) as groups, receiving(groups[0]) as (arriving, thread):
        sent = groups[1].send([torch.ones(SIZE)], 0, 0)
        said = lost.get()
        assert said.startswith("receiving from stage 0 (rank 1) failed: ")
        assert LOST_CONNECTION in said
        assert thread.is_alive()
        assert not arriving[-1]
        del sent


class Gone(p2p.Transfer):
    """A wait for a sender that is gone."""

    def lost(self) -> WorkerFailedError:
        return WorkerFailedError(self.peer)


class Over(Gone):
    """A wait whose message comes just before that is asked."""

    def lost(self) -> WorkerFailedError:
        del p2p._waited_for[self]
        return super().lost()


def test_a_wait_that_has_just_succeeded_is_not_lost(lost: queue.SimpleQueue[str]) -> None:
    p2p._waited_for[Over("rank 1")] = None
    until(lambda: not p2p._waited_for)
    p2p._waited_for[Gone("rank 2")] = None
    assert lost.get() == "rank 2"


def test_a_message_that_is_late_is_waited_for(lost: queue.SimpleQueue[str]) -> None:
    with relay.lost_after(10**9, sender=1) as groups, receiving(groups[0]) as (arriving, thread):
        time.sleep(0.6)
        groups[1].send([torch.ones(SIZE)], 0, 0).wait()
        thread.join()
        assert arriving.sum() == SIZE
        assert lost.empty()
