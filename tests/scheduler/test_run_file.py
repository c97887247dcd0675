"""A scheduler can be found while it lives, and by its own account only."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_sdpipe.cli import main
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.scheduler.credentials import make_keys
from lightning_sdpipe.scheduler.run_file import RunFile, published, running
from lightning_sdpipe.scheduler.server.process import SchedulerProcess

KEYS = make_keys()[1]
HERE = RunFile("tcp://127.0.0.1:5555", KEYS, None, 2, 3, "2026-01-01 00:00:00+00:00")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "sdpipe"


def nothing_answers(_: RunFile) -> bool:
    return False


def test_it_is_found_while_it_lives_and_readable_by_its_owner_only(folder: Path) -> None:
    with published(HERE):
        (path,) = folder.iterdir()
        assert path.name == f"{socket.gethostname()}-{os.getpid()}.json"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert running(nothing_answers) == [HERE]
        assert KEYS.secret not in f"{HERE} {HERE!r}"
        path.chmod(0o640)
        assert running(nothing_answers) == [], "others may have written it"
    assert list(folder.iterdir()) == []


def test_what_a_killed_one_has_left_is_removed_on_its_own_host_only(folder: Path) -> None:
    killed = (
        "import os, signal, sys\n"
        "from lightning_sdpipe.scheduler.run_file import RunFile, published\n"
        "with published(RunFile('tcp://127.0.0.1:1', None, None, 1, 1, '')):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = subprocess.run([sys.executable, "-c", killed], check=False)
    assert process.returncode == -signal.SIGKILL
    (left,) = folder.iterdir()
    elsewhere = left.with_name("another-host-7.json")
    elsewhere.write_bytes(left.read_bytes().replace(b"127.0.0.1", b"10.0.0.99"))
    elsewhere.chmod(0o600)
    (folder / "unfinished").write_text("{")
    assert running(nothing_answers) == []
    assert sorted(path.name for path in folder.iterdir()) == ["another-host-7.json", "unfinished"]
    assert [run.address for run in running(lambda run: True)] == ["tcp://10.0.0.99:1"]
    elsewhere.write_bytes(elsewhere.read_bytes().replace(b"10.0.0.99", b"127.0.0.1"))
    assert running(lambda run: True) == [], "its loopback is not ours"


def test_a_folder_that_cannot_be_written_is_said_and_ends_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("")
    with published(HERE):
        assert [path.name.endswith(".json") for path in (folder.parent / "cache" / "sdpipe").iterdir()] == [True]
        assert running(nothing_answers) == [HERE]
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    with published(HERE):
        assert "`sdpipe status` will not find this run without an address" in caplog.text


def test_status_finds_the_only_scheduler_of_a_run_and_lists_several(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status"]) == 2
    assert "no scheduler of this account runs on this host" in capsys.readouterr().err
    assert main(["status", "logs/none.jsonl"]) == 2
    assert "there is no file logs/none.jsonl; give the log of a run" in capsys.readouterr().err
    assert main(["trace", "logs/none.jsonl"]) == 2
    assert "logs/none.jsonl is not the address of a scheduler, like tcp" in capsys.readouterr().err
    with SchedulerProcess.embedded(AllReduceModels(), 1, 2) as first:
        assert main(["status", "--json"]) == 0, "the keys are in the file"
        assert json.loads(capsys.readouterr().out)["signals"] == 0
        with SchedulerProcess.embedded(AllReduceModels(), 2, 2) as second:
            assert main(["status"]) == 2
            said = capsys.readouterr().err
            assert f"{first.address}  {sys.argv[0]} in {os.getcwd()}, process {os.getpid()}, since 20" in said
            assert re.search(rf"{second.address}  .* since [-\d]+ [:\d]+: 2 stages × 2 pipelines\n", said)
            for scheduler in (first, second):
                assert scheduler.credentials is not None
                assert scheduler.credentials.secret not in said
            assert main(["status", second.address]) == 0
    assert list(folder.iterdir()) == []
