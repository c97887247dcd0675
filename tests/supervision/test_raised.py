"""Reading the exception that ended a process from what its interpreter printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_sdpipe.supervision.raised import Raised, last_raised

CHAINED = """
import sys

class Own(RuntimeError):
    pass

def first():
    raise KeyError("a")

def second():
    try:
        first()
    except KeyError as error:
        raise Own("picture 17\\nand more") from error

print("Traceback (most recent call last):", file=sys.stderr)
print("ValueError: only printed", file=sys.stderr)
second()
"""

WOKEN = """
from types import SimpleNamespace
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import elastic_messages as e
from lightning_sdpipe.scheduler.client import SchedulerClient

class Woken(SchedulerClient):
    worker, meanwhile = Worker(0, 0), None
    _connection = SimpleNamespace(receive=lambda left: e.MustEnd("stage 0 was silent for 31.2 s"))

    def __init__(self):
        pass

Woken()._receive(e.MustEnd, lambda reply: False, float("inf"))
"""


def words_of(script: str, tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(script)
    return subprocess.run([sys.executable, path], capture_output=True, text=True, check=False).stderr


def test_the_last_exception_of_a_chain(tmp_path: Path) -> None:
    assert last_raised(words_of(CHAINED, tmp_path)) == Raised("Own", "picture 17", "script.py:14 in second")


NOT_THE_END = """
import atexit, threading

class Untidy:
    def __del__(self):
        try:
            {}["pool"]
        except KeyError as error:
            raise RuntimeError("in a finaliser") from error

def in_a_thread():
    raise OSError("in a thread")

@atexit.register
def at_exit():
    raise LookupError("at exit")

untidy = Untidy()
helper = threading.Timer(0.2, in_a_thread)
helper.start()
"""


def test_what_python_reports_besides_ends_no_process(tmp_path: Path) -> None:
    said = words_of(NOT_THE_END, tmp_path)
    assert all(word in said for word in ("in a finaliser", "in a thread", "at exit"))
    assert last_raised(said) is None
    said = words_of(NOT_THE_END + 'raise ValueError("the end")', tmp_path)
    assert all(word in said for word in ("in a finaliser", "in a thread", "at exit"))
    assert last_raised(said) == Raised("ValueError", "the end", "script.py:21 in <module>")


def test_an_exception_without_a_message(tmp_path: Path) -> None:
    found = last_raised(words_of("raise NotImplementedError", tmp_path))
    assert found == Raised("NotImplementedError", "", "script.py:1 in <module>")
    assert str(found) == "NotImplementedError"


def test_a_script_that_cannot_be_read(tmp_path: Path) -> None:
    assert last_raised(words_of("import nothing_of_that_name", tmp_path)) == Raised(
        "ModuleNotFoundError", "No module named 'nothing_of_that_name'", "script.py:1 in <module>"
    )


@pytest.mark.parametrize(
    "output",
    [
        "",
        "all is well\n",
        "Traceback (most recent call last):\n",
        'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    g()\n',
        "Traceback (most recent call last):\n100% done\n",
    ],
)
def test_no_whole_traceback(output: str) -> None:
    assert last_raised(output) is None


def test_what_goes_to_a_terminal() -> None:
    coloured = (
        'Epoch 0:  50%\r\x1b[1mTraceback (most recent call last):\x1b[0m\r\n  File \x1b[35m"/a/b.py"\x1b[0m, line '
        "\x1b[35m7\x1b[0m, in \x1b[35mf\x1b[0m\r\n    g()\r\n\x1b[1;35mValueError\x1b[0m: \x1b[35mno\x1b[0m\r\n"
    )
    assert last_raised(coloured) == Raised("ValueError", "no", "b.py:7 in f")


def test_the_same_exception_with_other_numbers() -> None:
    one, other = (
        Raised("IndexError", "index 17 of 20", "a.py:3 in f"),
        Raised("IndexError", "index 4 of 20", "a.py:3 in f"),
    )
    assert one.is_like(other)
    assert not one.is_like(Raised("IndexError", "index 17 of 20", "a.py:4 in f"))
    assert not one.is_like(Raised("KeyError", "index 17 of 20", "a.py:3 in f"))
    assert not one.is_like(Raised("IndexError", "no index 17", "a.py:3 in f"))


def test_failures_that_follow_those_of_other_processes() -> None:
    assert Raised("lightning_sdpipe.errors.WorkerFailedError", "", "").follows_another
    assert Raised("lightning_sdpipe.scheduler.client.RunAborted", "", "").follows_another
    assert not Raised("ValueError", "", "").follows_another


def test_a_process_that_woke_too_late_follows_those_that_went_on(tmp_path: Path) -> None:
    """Stopped for longer than the scheduler waits, it hears of it at whichever of its lines it asks first."""
    raised = last_raised(words_of(WOKEN, tmp_path))
    assert raised is not None
    assert raised.message == "this process of pipeline 0 must end: stage 0 was silent for 31.2 s"
    assert raised.follows_another


def test_long_messages_are_cut() -> None:
    assert len(str(Raised("ValueError", "x" * 5000, ""))) == 301
