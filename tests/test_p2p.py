"""Transfers between two ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from lightning_sdpipe import p2p
from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.exchange import transfers
from lightning_sdpipe.topology.groups import Replicas
from tests.patience import until
from tests.workers import run_workers


def _profiled(rank: int) -> set[str]:
    """What a profiler records of a step that computes and exchanges tensors with the other rank."""
    group, other, mine, theirs = dist.group.WORLD, 1 - rank, torch.full((4,), rank + 1.0), torch.zeros(4)
    assert group is not None
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        sent = p2p.send([mine], other, group, 0, "the other rank")
        p2p.receive([theirs], other, group, 0, "the other rank").wait()
        sent.wait()
        transfers.begin({other: mine}, {other: theirs}, Replicas(group, range(2), 0, rank), 1).wait()
        total = mine + theirs
    assert total.tolist() == [3.0] * 4
    return {event.key for event in profiler.key_averages()}


@pytest.mark.distributed
def test_a_profiler_does_not_record_transfers() -> None:
    """Torch would write to freed memory where one is waited for in a later cycle of the profiler than it began in."""
    for recorded in run_workers(2, _profiled):
        assert "aten::add" in recorded
        assert not [name for name in recorded if "gloo" in name]


def _asked_while_it_waits(rank: int) -> None:
    group, other, values = dist.group.WORLD, 1 - rank, {tag: torch.tensor([tag.value]) for tag in [*p2p.Tag][2:]}
    assert group is not None
    if rank == 0:
        begun = [p2p.receive([torch.zeros_like(value)], other, group, tag, "") for tag, value in values.items()]
        assert not p2p.lost_connection(group, other)
        p2p.send([torch.zeros(1)], other, group, 0, "").wait()
        assert [transfer.wait() for transfer in begun] == [[value] for value in values.values()]
    else:
        p2p.receive([torch.zeros(1)], other, group, 0, "").wait()
        for transfer in [p2p.send([value], other, group, tag, "") for tag, value in values.items()]:
            transfer.wait()


@pytest.mark.distributed
def test_a_question_whether_a_peer_is_there_takes_no_message() -> None:
    run_workers(2, _asked_while_it_waits)


def test_a_wait_in_vain_tells_its_usual_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [1, 0])
    group: Any = None
    expected = r"^beginning a run among ranks \[0, 1\] failed: timed out\. Every rank must call fit$"
    with (
        pytest.raises(WorkerFailedError, match=expected),
        p2p.waiting_for(group, "beginning a run", ". Every rank must call fit"),
    ):
        raise RuntimeError("timed out\nmore")


def test_bytes_of_connections_are_counted_but_for_questions_and_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(p2p, "_MOMENT", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as opened:

        def connect() -> Callable[[int], None]:
            one = opened.enter_context(socket.create_connection(listener.getsockname()))
            another = opened.enter_context(listener.accept()[0])

            def send(count: int) -> None:
                one.sendall(bytes(count))
                another.recv(count, socket.MSG_WAITALL)

            return send

        others = connect()
        with p2p.Connections() as connections:
            send = connect()
        others(2**16)
        for _ in range(100):
            send(48)
            assert connections.moved() == 0
        send(2**16)
        until(lambda: connections.moved() > 2**16)  # they came, and were acknowledged


def test_traffic_leaves_connections_out_by_the_port_of_either_end() -> None:
    with ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        one = opened.enter_context(socket.create_connection(listener.getsockname()))
        another = opened.enter_context(listener.accept()[0])
        ports = [end.getsockname()[1] for end in (one, another)]

        def moved(without: Collection[int]) -> int:
            seen = p2p.traffic(without, 1.0)
            assert seen is not None
            return seen[0]

        before = moved(()), *(moved([port]) for port in ports)
        one.sendall(bytes(2**16))
        another.recv(2**16, socket.MSG_WAITALL)
        until(lambda: moved(()) >= before[0] + 2**17)
        assert [moved([port]) for port in ports] == [*before[1:]]
