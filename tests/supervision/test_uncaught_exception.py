"""Which exception ends a script, as the process that runs it tells its supervisor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_sdpipe.supervision.script import REPORT, UncaughtException, command, decode

CHAINED = """
import sys

class Own(RuntimeError):
    pass

def second():
    try:
        {}["a"]
    except KeyError as error:
        raise Own("picture 17\\nand more") from error

# torch does so when a process group is open: its lines are no traceback
sys.excepthook = lambda kind, error, frames: print("[rank0]: Traceback", file=sys.stderr)
print("Traceback (most recent call last):\\nValueError: only printed", file=sys.stderr)
second()
"""

AS_HYDRA = """
import sys
try:
    raise LookupError("no such option")
except LookupError:
    sys.exit(1)
"""

NOT_THE_END = """
import atexit, os, threading

class Untidy:
    def __del__(self):
        raise RuntimeError("in a finaliser")

def in_a_thread():
    raise OSError("in a thread")

@atexit.register
def at_exit():
    raise LookupError("at exit")

untidy = Untidy()
threading.Timer(0.05, in_a_thread).start()
if not os.fork():
    raise ValueError("in a child")
os.wait()
"""

WOKEN = """
from types import SimpleNamespace
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler.client.client import SchedulerClient
from lightning_sdpipe.scheduler.client.membership_client import MembershipClient

client = SchedulerClient(MembershipClient("tcp://127.0.0.1:9", Worker(0, 0), 1))
client._connection = SimpleNamespace(
    send=lambda frame: True, check=lambda: None, receive=lambda left: e.must_end("stage 0 was silent for 31.2 s")
)
client.greet()
"""


def run(script: list[str], where: Path) -> tuple[subprocess.CompletedProcess[str], UncaughtException | None]:
    reading, report = os.pipe()
    environment = os.environ | {REPORT: str(report), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(
        command(script), capture_output=True, text=True, check=False, cwd=where, env=environment, pass_fds=[report]
    )
    os.close(report)
    with os.fdopen(reading, "rb") as file:
        return ended, decode(file.read())


def raised_by(script: str, where: Path) -> UncaughtException | None:
    (where / "script.py").write_text(script)
    return run(["script.py"], where)[1]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (CHAINED, UncaughtException("Own", "picture 17", "script.py:11 in second")),
        (AS_HYDRA, UncaughtException("LookupError", "no such option", "script.py:4 in <module>")),
        ("raise NotImplementedError", UncaughtException("NotImplementedError", "", "script.py:1 in <module>")),
        (
            "import none_such",
            UncaughtException("ModuleNotFoundError", "No module named 'none_such'", "script.py:1 in <module>"),
        ),
        ("import sys; sys.exit(3)", None),
        (NOT_THE_END, None),
    ],
)
def test_what_leaves_a_script(script: str, expected: UncaughtException | None, tmp_path: Path) -> None:
    assert raised_by(script, tmp_path) == expected


AS_IT_IS = """
import os, sys, pickle
import beside

class Here:
    pass

assert pickle.loads(pickle.dumps(Here)) is Here
print(__name__, sys.argv, __file__, __spec__ and __spec__.name, sys.path[0], "SDPIPE_REPORT" in os.environ)
print(sorted(name for name in globals() if name != "Here"), sys.modules["__main__"].Here is Here)
1 / 0
"""


@pytest.mark.parametrize("script", [["within/script.py", "a", "--b"], ["-m", "within.script", "a", "--b"]])
def test_a_script_runs_as_it_would_by_itself(script: list[str], tmp_path: Path) -> None:
    within = tmp_path / "within"
    within.mkdir()
    (within / "script.py").write_text(AS_IT_IS)
    (within / "beside.py").touch()
    (tmp_path / "beside.py").touch()
    mine, raised = run(script, tmp_path)
    alone = subprocess.run(
        [sys.executable, *script], capture_output=True, text=True, check=False, cwd=tmp_path, env=os.environ
    )
    for different in ("'__cached__', ", "'__annotations__', "):
        mine.stdout, alone.stdout = mine.stdout.replace(different, ""), alone.stdout.replace(different, "")
    assert mine.stdout == alone.stdout
    assert mine.stderr.splitlines()[-4:] == alone.stderr.splitlines()[-4:]
    assert "supervision" not in mine.stderr
    assert (mine.returncode, alone.returncode) == (1, 1)
    assert raised == UncaughtException("ZeroDivisionError", "division by zero", "script.py:11 in <module>")


def test_what_is_not_whole() -> None:
    said = UncaughtException("ValueError", "no", "").encode()
    assert decode(said) == UncaughtException("ValueError", "no", "")
    for cut in (b"", said[:-1], b"x\n", b"{}\n"):
        assert decode(cut) is None


def test_the_same_exception_with_other_numbers() -> None:
    one, other = (
        UncaughtException("IndexError", "index 17 of 20", "a.py:3 in f"),
        UncaughtException("IndexError", "index 4 of 20", "a.py:3 in f"),
    )
    assert one.is_like(other)
    assert not one.is_like(UncaughtException("IndexError", "index 17 of 20", "a.py:4 in f"))
    assert not one.is_like(UncaughtException("KeyError", "index 17 of 20", "a.py:3 in f"))
    assert not one.is_like(UncaughtException("IndexError", "no index 17", "a.py:3 in f"))


def test_failures_that_follow_those_of_other_processes() -> None:
    assert UncaughtException("lightning_sdpipe.errors.WorkerFailedError", "", "").follows_another
    assert UncaughtException("lightning_sdpipe.scheduler.client.client.RunAborted", "", "").follows_another
    assert UncaughtException(
        "RuntimeError", "[gloo/transport/tcp/pair.cc:534] Connection closed by peer", ""
    ).follows_another
    assert not UncaughtException("ValueError", "", "").follows_another


def test_a_process_that_woke_too_late_follows_those_that_went_on(tmp_path: Path) -> None:
    """Stopped for longer than the scheduler waits, it hears of it at whichever of its lines it asks first."""
    raised = raised_by(WOKEN, tmp_path)
    assert raised is not None
    assert raised.message == "this process of pipeline 0 must end: stage 0 was silent for 31.2 s"
    assert raised.follows_another


def test_long_messages_are_cut() -> None:
    assert len(str(UncaughtException("ValueError", "x" * 5000, ""))) == 301
