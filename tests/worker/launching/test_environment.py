"""What a strategy asks of the place where its processes run."""

from __future__ import annotations

import os
import socket

import pytest

from lightning_sdpipe.worker.launching.environment import choose_port, free_port


def test_the_port_is_none_that_connections_get() -> None:
    with socket.socket() as connection:
        connection.bind(("127.0.0.1", 0))
        handed_out = connection.getsockname()[1]
    for _ in range(20):
        port = free_port()
        if port is None:
            pytest.skip("this system hands out nearly all ports")
        assert 10_000 <= port < handed_out
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_a_port_that_is_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "4711")
    choose_port()
    assert os.environ["MASTER_PORT"] == "4711"
    monkeypatch.delenv("MASTER_PORT")
    choose_port()
    if (chosen := os.environ.get("MASTER_PORT")) is not None:  # else this system hands out nearly all
        assert int(chosen) >= 10_000
