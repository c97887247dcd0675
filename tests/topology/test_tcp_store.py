"""Where the store of a job listens, and the processes that use it."""

from __future__ import annotations

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_sdpipe.topology import tcp_store
from lightning_sdpipe.topology.tcp_store import listen, open_store
from tests.features.running import Regression, as_torchrun, pipelines, train_loader
from tests.own_session import scripts
from tests.workers import free_port, listening

SOON = timedelta(minutes=10)
ELSEWHERE = "192.0.2.1"  # of no machine (RFC 5737)


def test_the_socket_is_bound_to_the_one_address() -> None:
    port = free_port()
    listener = listen("127.0.0.1", port, one_machine=False)
    assert listener is not None
    with listener:
        assert listener.getsockname() == ("127.0.0.1", port)
        listener.listen()
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", port, one_machine=True)


def test_a_name_that_is_loopback_here_only_is_no_address_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", free_port()))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: here)
    assert listen("node7", here[0][4][1], one_machine=False) is None
    listener = listen("node7", here[0][4][1], one_machine=True)
    assert listener is not None
    listener.close()


def test_rank_zero_tells_that_it_waits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(tcp_store, "_PATIENCE", 0.01)
    port = free_port()
    with pytest.raises(RuntimeError, match="1/2 clients joined"):
        open_store("127.0.0.1", port, 0, 2, False, timedelta(seconds=1))
    assert f"127.0.0.1:{port} waits for the other processes of 2, for 1 s at most" in caplog.text


@pytest.mark.parametrize("libuv", ["0", "1"])
@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", {"127.0.0.1"}), (ELSEWHERE, {"::", "0.0.0.0"})])
def test_where_the_store_listens(
    host: str, expected: set[str], libuv: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("USE_LIBUV", libuv)
    caplog.set_level("INFO")
    port = free_port()
    if host == ELSEWHERE:  # torch's store also connects to itself, by its address
        monkeypatch.setattr(tcp_store, "listen", lambda *_: None)
        host = "127.0.0.1"
    with ThreadPoolExecutor() as ranks:
        first, second = ranks.map(lambda rank: open_store(host, port, rank, 2, True, SOON), range(2))
    second.set("key", "value")
    assert first.get("key") == b"value"
    (address,) = listening(port)
    assert address in expected
    said = "is no address of this machine" in caplog.text
    assert said == (expected != {"127.0.0.1"})


def test_the_store_of_an_agent_is_only_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, None, True, SOON, wait_for_workers=False)  # type: ignore[attr-defined]
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    open_store("127.0.0.1", port, 0, 2, True, SOON).set("key", "value")
    assert agent.get("key") == b"value"


def test_a_program_that_accepts_connections_and_says_nothing_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp_store, "_ANSWERS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(
            RuntimeError, match=f"MASTER_ADDR=127.0.0.1, MASTER_PORT={port}: a program there has accepted"
        ):
            open_store("127.0.0.1", port, 1, 2, True, timedelta(seconds=0.2))


@pytest.mark.parametrize("host", ["127.0.0.1", "nowhere.invalid"])
def test_a_rank_that_does_not_reach_rank_zero_says_so(
    host: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch itself tries again after its timeout, and may say that another program had answered."""
    monkeypatch.setattr(tcp_store, "_ANSWERS", 0.1)
    monkeypatch.setattr(tcp_store, "_PATIENCE", 0.01)
    port = free_port()
    with pytest.raises(RuntimeError, match=f"MASTER_ADDR={host}, MASTER_PORT={port}: rank 0 was not reached there"):
        open_store(host, port, 3, 4, False, timedelta(seconds=0.5))
    assert f"Rank 3 waits for rank 0 at {host}:{port}, for 0.5 s at most. Has every machine been started" in caplog.text


def test_an_address_of_another_machine_cannot_be_bound() -> None:
    assert listen(ELSEWHERE, free_port(), one_machine=False) is None


def test_a_job_of_one_process_needs_no_port() -> None:
    before = listening()
    store = open_store(ELSEWHERE, 0, 0, 1, True)
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert {*listening()} <= {*before}


def _fit(directory: Path) -> None:
    trainer = pipelines(directory)

    class Listening(Regression):
        def on_train_start(self) -> None:
            print("LISTENS " + json.dumps(listening()), flush=True)

    trainer.fit(Listening(), train_loader())


@pytest.mark.distributed
def test_all_sockets_of_a_run_on_one_machine_are_on_loopback(tmp_path: Path) -> None:
    port = free_port()
    works = [(as_torchrun, rank, port, 2, _fit, (tmp_path / str(rank),)) for rank in range(2)]
    with scripts(tmp_path, *works) as ranks:
        assert [each.wait() for each in ranks] == [0, 0], [each.printed() for each in ranks]
        found = [re.findall("^LISTENS (.*)$", each.printed(), re.M) for each in ranks]
    for (addresses,) in found:
        assert all(address.startswith("127.") for address in json.loads(addresses)), addresses
