"""A child tries the user's code: its answer comes back, and nothing else."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from lightning_sdpipe import openmp
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.apart import NoAnswerError, apart, is_possible

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


def test_a_watchdog_of_the_users_is_not_waited_for() -> None:
    """Its thread is not in the child."""
    faulthandler.dump_traceback_later(60)
    try:
        assert apart(lambda: b"done", 5) == b"done"
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)
    openmp.end_threads()  # else processes that later tests fork would wait for them


def test_it_computes_after_threads_have_computed_here(two_threads: None) -> None:
    large = torch.randn(300, 300, requires_grad=True)

    def compute() -> int:
        loss = (large @ large).exp().sum() + large.sort(0).values.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return torch.get_num_threads()

    assert compute() == 2
    assert apart(lambda: bytes([compute()]), 20) == b"\2"


def test_what_computes_on_an_accelerator_is_not_forked() -> None:
    assert is_possible(torch.device("cpu"))
    assert not is_possible(torch.device("cuda"))
