"""The operator's commands, as a terminal shows them."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lightning_sdpipe import __version__, cli
from lightning_sdpipe.command_line import Parser, carried_out, depths_of, numbers_of, speeds_of
from lightning_sdpipe.errors import ConfigurationError, SchedulerError, WorkerFailedError
from tests.patience import until

LOG = str(Path(__file__).parent / "seeing" / "golden" / "straggler.jsonl")
SAYING = {
    "check": ["tests.test_check:residual", "--stages", "2"],
    "env": [],
    "partition": ["tests.test_check:residual"],
    "replay": [LOG],
    "report": [LOG],
    "simulate": ["--stages", "2", "--iterations", "20"],
    "status": [LOG],
}
"""Arguments of those that say something without a job."""


ONE_NAME = {
    "num-stages": "stages",
    "num-pipelines": "pipelines",
    "num-micro-batches": "micro-batches",
    "seconds": "for",
    "out": "output",
    "file": "output",
    "num-workers": "pipelines",
}
"""Names that options might have, and the one that they have."""


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_options_and_errors_have_one_form(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(command, capsys)
    assert text.startswith(f"usage: sdpipe {command} ")
    assert "None" not in text
    assert "%(" not in text
    options = set(re.findall(r"^  (?:-\w, )?--([\w-]+)|^  -\w \S+, --([\w-]+)", text, re.MULTILINE))
    assert not {name for pair in options for name in pair} & ONE_NAME.keys()
    assert ("--output" in text) == ("-o " in text)
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--no-such-option", *SAYING.get(command, ["one"])])
    assert ended.value.code == 2
    assert re.fullmatch(rf"sdpipe {command}: .*; see sdpipe {command} --help\n", capsys.readouterr().err)


def test_the_version_and_a_list_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"sdpipe {__version__}\n"
    with pytest.raises(SystemExit, match="0"):
        cli.main([])
    assert "usage: sdpipe" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        cli.main(["no_such_command"])
    said = capsys.readouterr().err
    assert all(command in said for command in cli.COMMANDS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("simulate --stages 1 --pipelines 0", "give --pipelines too, 1 or more."),
        ("scheduler --stages 1 --pipelines 2 --worker-timeout 0", "give seconds above 0"),
        ("scheduler --stages 1 --pipelines 2 --bind tcp://127.0.0.1:99999", "give a port from 0 to 65535"),
        ("scheduler --stages 1 --pipelines 2 --lifeline-port 99999", "give a port from 0 to 65535"),
        ("serve tcp://127.0.0.1:5555 --port -1", "give a port from 0 to 65535"),
        ("status tcp://127.0.0.1:99999", "give a port from 0 to 65535"),
    ],
)
def test_what_cannot_be_meant_is_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words.split()) == 2
    assert re.fullmatch(rf"sdpipe {words.split()[0]}: .*{said}", capsys.readouterr().err.splitlines()[-1])


@pytest.mark.parametrize(
    ("words", "stages", "factors", "speeds"),
    [
        ("--stages 2", (2,), None, None),
        ("--stages 1,2,2 --factors 1,1.5", (1, 2, 2), [1, 1.5], None),
        ("--stages 1 2 2 --factors 1 1.5 model:make", (1, 2, 2), [1, 1.5], None),
        ("--factors=1, 1.5 --stages=1 2, 2", (1, 2, 2), [1, 1.5], None),
        ("--speeds 1 0.5", None, None, [1, 0.5]),
        ("model:make --speeds 1/0.5, 0.5/0.5 0.5", None, None, [[1], [0.5, 0.5], [0.5, 0.5]]),
    ],
)
def test_lists_have_commas_or_spaces(words: str, stages: Any, factors: Any, speeds: Any) -> None:
    parser = Parser("list", "")
    for name, kind in (("--stages", depths_of), ("--factors", numbers_of), ("--speeds", speeds_of)):
        parser.add_argument(name, type=kind)
    parser.add_argument("model", nargs="?")
    given = parser.parse_args(words.split())
    assert (given.stages, given.factors, given.speeds) == (stages, factors, speeds)
    assert given.model == ("model:make" if "model:make" in words else None)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_it_is_printed_where_there_is_no_unicode(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It ends with 0, or with 1, as a check does that finds something; where it needs a job, its help is printed."""
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.syspath_prepend(os.getcwd())
    monkeypatch.chdir(tmp_path)
    if command in SAYING:
        assert cli.main([command, *SAYING[command]]) in (0, 1)
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    terminal.flush()
    printed = terminal.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert len(printed) > 100
    assert printed.count("?") <= printed.count("?\n"), "each character that is missing has others in its place"


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
        (ConfigurationError("no"), 2, "sdpipe {}: no\n"),
        (SchedulerError("gone"), 2, "sdpipe {}: gone\n"),
        (PermissionError(13, "Permission denied", "/root/x"), 2, "sdpipe {}: /root/x: Permission denied\n"),
        (OSError(28, "No space left on device"), 1, "sdpipe {}: No space left on device\n"),
        (WorkerFailedError("rank 1"), 1, "sdpipe {}: rank 1\n"),
    ],
)
@pytest.mark.parametrize("command", cli.COMMANDS)
def test_all_commands_end_alike(
    command: str,
    error: BaseException,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    function = cli.COMMANDS[command][0].partition(":")[2]
    monkeypatch.setattr(cli, "import_module", lambda _: Mock(**{function: Mock(side_effect=error)}))
    assert cli.main([command]) == status
    assert capsys.readouterr().err == said.format(command)


@pytest.mark.parametrize("stdout", ["closed", "full"])
def test_a_reader_that_has_gone_and_a_full_disk_leave_no_traceback(stdout: str) -> None:
    command = [sys.executable, "-m", "lightning_sdpipe.cli", "replay", LOG]
    read, write = os.pipe()
    os.close(read)
    with open("/dev/full", "w") as full:
        taken = write if stdout == "closed" else full.fileno()
        done = subprocess.run(command, stdout=taken, stderr=subprocess.PIPE, text=True)
    os.close(write)
    full_disk = (1, "sdpipe replay: No space left on device\n")
    assert (done.returncode, done.stderr) == ((141, "") if stdout == "closed" else full_disk)


def test_what_is_printed_last_comes_before_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert carried_out(lambda: print("end"), "sdpipe") == 0
    assert capsys.readouterr().out == "end\n"


@pytest.mark.parametrize("after", [0.0, 4.0])
def test_a_simulation_ends_at_the_first_interrupt(after: float) -> None:
    """While it is imported as when it collects garbage most of the time; by the signal, of which a shell makes 130."""
    command = [sys.executable, "-m", "lightning_sdpipe.cli", "simulate", "--iterations", "1000000"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if these tests run in a background
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    signal.signal(signal.SIGINT, before)
    with process:
        try:
            until(lambda: ends_at_once(process.pid) and cpu_seconds(process.pid) >= after)
            process.send_signal(signal.SIGINT)
            assert process.wait() == -signal.SIGINT
        finally:
            process.kill()
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read() + process.stderr.read() == b""


def ends_at_once(pid: int) -> bool:
    """Whether SIGINT is neither caught nor ignored there, as soon as Python has begun."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [int(mask, 16) for mask in re.findall(r"^Sig(?:Ign|Cgt):\t(\w+)", status, re.MULTILINE)]
    return cpu_seconds(pid) > 0.1 and not any(mask >> (signal.SIGINT - 1) & 1 for mask in masks)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
