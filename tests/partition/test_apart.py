"""A child tries the user's code: its answer comes back, and nothing else."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.apart import NoAnswerError, apart

CHANGED: list[int] = []


class NamedError(Exception):
    """Cannot be made from its arguments."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(f"{name} is not {number}")


def test_the_answer_comes_back_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    weight = torch.zeros(3)

    def work() -> bytes:
        CHANGED.append(1)
        weight.add_(1)
        print("from the child")
        return bytes(weight.int().tolist())

    print("before", end=" ")
    assert apart(work, 20) == b"\1\1\1"
    assert CHANGED == []
    assert not weight.any()
    assert capfd.readouterr().out == "before from the child\n"


def raise_(error: Exception) -> bytes:
    raise error


def test_what_is_raised_there_is_raised_here() -> None:
    with pytest.raises(ConfigurationError, match="as it is") as caught:
        apart(lambda: raise_(ConfigurationError("as it is")), 20)
    assert not hasattr(caught.value, "__notes__")
    with pytest.raises(KeyError) as other:
        apart(lambda: raise_(KeyError("name")), 20)
    assert other.value.args == ("name",)
    assert "raise_" in other.value.__notes__[0]
    with pytest.raises(RuntimeError, match="NamedError: it is not 3"):
        apart(lambda: raise_(NamedError("it", 3)), 20)


def test_a_child_without_an_answer_ends() -> None:
    pids = os.pipe()

    def hang() -> bytes:
        os.write(pids[1], str(os.getpid()).encode())
        time.sleep(60)
        return b""

    with pytest.raises(NoAnswerError, match=r"not done within 0\.2 s"):
        apart(hang, 0.2)
    with pytest.raises(ProcessLookupError):
        os.kill(int(os.read(pids[0], 20)), 0)
    with pytest.raises(NoAnswerError, match="status -9"):
        apart(lambda: bytes(os.kill(os.getpid(), signal.SIGKILL) or 0), 20)


def test_it_reads_files_without_moving_the_position_here(tmp_path: Path) -> None:
    written = tmp_path / "records"
    written.write_bytes(bytes(range(100)))
    (tmp_path / "gone").write_bytes(b"0123456789")
    with (
        written.open("rb", buffering=0) as read_only,
        written.open("r+b", buffering=0) as both,
        (tmp_path / "gone").open("rb", buffering=0) as gone,
        (tmp_path / "log").open("wb", buffering=0) as log,
    ):
        (tmp_path / "gone").unlink()
        read_only.seek(10)
        both.seek(20)
        gone.seek(5)

        def work() -> bytes:
            log.write(b"child ")
            return read_only.read(2) + both.read(2) + gone.read(2)

        assert apart(work, 20) == bytes([10, 11, 20, 21]) + b"56"
        assert [each.tell() for each in (read_only, both, gone)] == [10, 20, 5]
        assert read_only.read(1) == bytes([10])
        log.write(b"parent")  # behind what the child has written
    assert (tmp_path / "log").read_bytes() == b"child parent"


def test_a_lock_that_another_thread_holds_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lightning_sdpipe.partition.apart._STUCK_AFTER", 1.0)
    monkeypatch.setattr("lightning_sdpipe.partition.apart._TOLD_AFTER", 0.2)
    monkeypatch.setattr("lightning_sdpipe.partition.apart._LOOKS_EVERY", 0.2)
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)
    caplog.set_level(logging.INFO)
    lock, locked, release = threading.Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            locked.set()
            release.wait(120)

    holder = threading.Thread(target=hold)
    holder.start()
    assert locked.wait(60)

    def work() -> bytes:
        with lock:
            return b"never"

    def wait_outside() -> bytes:
        time.sleep(2)
        return b"slow"

    try:
        with pytest.raises(NoAnswerError, match="all threads waited for a lock"):
            apart(work, 60)
        assert "waiting for a lock" in caplog.text
        assert apart(wait_outside, 60) == b"slow"  # asleep, and not in a lock
        assert "waiting for a lock" not in caplog.messages[-1], "it is on its way to sleep, or sleeps"
    finally:
        release.set()
        holder.join()


def test_a_watchdog_of_the_users_is_not_waited_for() -> None:
    """Its thread is not in the child."""
    faulthandler.dump_traceback_later(60)
    try:
        assert apart(lambda: b"done", 5) == b"done"
    finally:
        faulthandler.cancel_dump_traceback_later()


def test_it_computes_after_threads_have_computed_here(two_threads: None) -> None:
    large = torch.randn(300, 300, requires_grad=True)

    def compute() -> int:
        loss = (large @ large).exp().sum() + large.sort(0).values.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return torch.get_num_threads()

    assert compute() == 2
    assert apart(lambda: bytes([compute()]), 20) == b"\2"
