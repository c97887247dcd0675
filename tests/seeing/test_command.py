"""``sdpipe status``: of recorded logs, and of a scheduler."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_sdpipe.cli import main
from lightning_sdpipe.scheduler.rows import About
from lightning_sdpipe.seeing.detectors import compute_straggler, findings
from lightning_sdpipe.seeing.recording import of_log
from tests.scheduler.live_scheduler import two_of_this_account
from tests.seeing.golden.record import SLOW

GOLDEN = Path(__file__).parent / "golden"


def test_the_log_of_a_run_with_a_slow_worker_names_it_alone(capsys: pytest.CaptureFixture[str]) -> None:
    (finding,) = findings(of_log(GOLDEN / "straggler.jsonl"))
    assert (finding.kind, finding.workers) == ("compute_straggler", (SLOW,))
    assert main(["status", str(GOLDEN / "straggler.jsonl"), "--once"]) == 10
    page = capsys.readouterr().out
    assert page.startswith(f"WARNING  stage {SLOW.stage} of pipeline {SLOW.pipeline} (")
    assert " i injected sleep" in page, "the legend"
    assert main(["status", str(GOLDEN / "straggler.jsonl")]) == 0, "who asks for no verdict gets a page"
    capsys.readouterr()
    assert main(["status", str(GOLDEN / "straggler.jsonl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0]["kind"] == "compute_straggler"


def test_the_log_of_a_run_of_equal_workers_names_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(GOLDEN / "equal.jsonl"), "--once"]) == 0
    assert capsys.readouterr().out.startswith("healthy  no worker is slower than its replicas")


def test_a_log_that_is_cut_anywhere_is_read_or_refused_by_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (GOLDEN / "straggler.jsonl").read_bytes()
    path = tmp_path / "log.jsonl"
    for size in range(0, len(whole), len(whole) // 40):
        path.write_bytes(whole[:size])
        status = main(["status", str(path), "--once"])
        assert status in (0, 2, 10, 12)
        assert (status == 2) == (b"\n" not in whole[:size])
    path.write_bytes(whole.replace(b'{"rows"', b'{"rwos"', 1))
    assert main(["status", str(path), "--once"]) == 2
    assert f"of {path} is not that of a scheduler's log" in capsys.readouterr().err


def test_a_log_without_rows_is_blind(tmp_path: Path) -> None:
    lines = (GOLDEN / "straggler.jsonl").read_bytes().splitlines(True)
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join(line for line in lines if not line.startswith(b'{"rows"')))
    assert main(["status", str(path), "--once"]) == 12


def test_of_two_schedulers_in_one_log_the_last_counts(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    shutil.copy(GOLDEN / "straggler.jsonl", path)
    path.write_bytes(path.read_bytes() + (GOLDEN / "equal.jsonl").read_bytes())
    assert compute_straggler(of_log(path)) == []


def test_a_scheduler_tells_what_its_workers_did(capsys: pytest.CaptureFixture[str]) -> None:
    with two_of_this_account() as (server, both):
        assert main(["status", server.address, "--once"]) == 0
        assert "slow?    too short to tell (0 of 96 updates)" in capsys.readouterr().out
        for client in both:
            client.about = About("here", "cpu", client.worker.pipeline, 4)
            client.join()
            for iteration in range(40):
                client.step_ended(iteration, 0.0)
            client.leave()
        assert main(["status", server.address, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert [(row["pipeline"], row["host"], row["updates"]) for row in told["updates"]] == [
            (0, "here", 39),
            (1, "here", 39),
        ]
        assert told["abstains"].startswith("too short to tell (")
        assert told["workers"][0]["state"] == "away"


def test_a_run_is_watched_until_an_interrupt(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_of_this_account() as (server, both):
        looks = []

        def sleep(seconds: float) -> None:
            looks.append(seconds)
            if len(looks) == 2:
                raise KeyboardInterrupt
            for client in both:
                client.join()
                for iteration in range(40):
                    client.step_ended(iteration, 0.0)
                client.leave()

        clock = SimpleNamespace(sleep=sleep, process_time=lambda: 0.0)  # other threads sleep, too
        monkeypatch.setattr("lightning_sdpipe.seeing.command.time", clock)
        assert main(["status", server.address, "--watch", "2"]) == 130
    shown = capsys.readouterr().out
    assert "too short to tell (" in shown
    assert "a cell: what the worker does" in shown
    assert min(looks) >= 2
