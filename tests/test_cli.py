"""The operator's commands, as a terminal shows them."""

from __future__ import annotations

import argparse
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from lightning_sdpipe import cli
from lightning_sdpipe.errors import ConfigurationError, SchedulerError, WorkerFailedError

LOG = str(Path(__file__).parent / "seeing" / "golden" / "straggler.jsonl")
SAYING = {
    "check": ["tests.test_check:residual", "--stages", "2"],
    "env": [],
    "partition": ["tests.test_check:residual"],
    "replay": [LOG],
    "report": [LOG],
    "simulate": ["--num-stages", "2", "--iterations", "20"],
    "status": [LOG],
}
"""Arguments of those that say something without a job."""


def commands() -> list[str]:
    (choices,) = [a.choices for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return sorted(choices)


@pytest.mark.parametrize("command", commands())
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
        (ConfigurationError("no"), 2, "sdpipe {}: no\n"),
        (SchedulerError("gone"), 2, "sdpipe {}: gone\n"),
        (WorkerFailedError("rank 1"), 1, "sdpipe {}: rank 1\n"),
    ],
)
@pytest.mark.parametrize("command", cli._OWN_OPTIONS)
def test_all_commands_end_alike(
    command: str,
    error: BaseException,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "import_module", lambda _: Mock(main=Mock(side_effect=error)))
    assert cli.main([command]) == status
    assert capsys.readouterr().err == said.format(command)


def test_a_simulation_ends_at_the_first_interrupt() -> None:
    command = [sys.executable, "-m", "lightning_sdpipe.cli", "simulate", "--iterations", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            while cpu_seconds(process.pid) < 4:  # it collects garbage most of the time by then
                assert process.poll() is None
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            assert process.wait() == 130
        finally:
            process.kill()
        assert process.stdout is not None
        assert process.stdout.read() == b""


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
