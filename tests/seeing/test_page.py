"""What people and machines are shown."""

from __future__ import annotations

import json

import pytest

from lightning_sdpipe.meter import PHASES
from lightning_sdpipe.policies import Worker
from lightning_sdpipe.scheduler.rows import About
from lightning_sdpipe.seeing.detectors import Finding
from lightning_sdpipe.seeing.page import bar, exit_status, in_one_line, render, to_plain
from lightning_sdpipe.seeing.recording import Recording
from tests.seeing.recordings import chunks, recording

A, B = Worker(0, 0), Worker(0, 1)


def pair(updates: int, factor: float, samples: int | None = 32) -> Recording:
    about = {worker: About("gpu7", f"cuda:{worker.pipeline}", worker.pipeline, samples) for worker in (A, B)}
    slow = chunks(B, [60.0 * factor] * updates, every=100.0)
    return recording({A: chunks(A, [60.0] * updates, every=100.0), B: slow}, about)


def test_the_last_line_says_how_fast_it_was_and_who_was_slow() -> None:
    line = in_one_line(pair(128, 1.5))
    assert line == "sdpipe: 640 samples/s; stage 0 of pipeline 1 (gpu7, cuda:1) 1.50 × as slow as its peers (forward)"
    assert in_one_line(pair(128, 1.0)) == "sdpipe: 640 samples/s; no worker was slower than its replicas"
    assert in_one_line(pair(44, 1.5)) == "sdpipe: 640 samples/s; too short to tell (44 of 96 updates)"
    assert in_one_line(pair(44, 1.5, None)) == "sdpipe: too short to tell (44 of 96 updates)"
    assert in_one_line(pair(44, 1.5, 3200)).startswith("sdpipe: 64.0k samples/s; ")
    assert in_one_line(recording({}, active=())) == "sdpipe: too short to tell (0 of 96 updates)"


def test_a_page_has_findings_bars_and_a_legend() -> None:
    lines = render(pair(128, 1.5), None).splitlines()
    assert lines[0] == (
        "WARNING  stage 0 of pipeline 1 (gpu7, cuda:1) 1.50 × as slow as its peers (forward)  [compute_straggler]"
    )
    assert lines[2:] == [
        "stage  pipeline  rank  where         updates  ms     own   the last 64 updates",
        "0      0         0     gpu7, cuda:0  128      100.0  60.0  " + "f" * 4 + "b" * 20 + "." * 16,
        "0      1         1     gpu7, cuda:1  128      100.0  90.0  " + "f" * 16 + "b" * 20 + "." * 4,
        "own: without waits for other workers; f forward, b backward, . waits for replicas",
    ]
    assert render(pair(128, 1.0), None).startswith("healthy  no worker is slower than its replicas\n")
    assert render(pair(44, 1.0), None).startswith("slow?    too short to tell (44 of 96 updates)\n")
    assert "no worker has told of an update yet" in render(recording({}, active=()), None)


def test_a_bar_has_one_letter_for_each_part_of_it() -> None:
    for shares in ([1.0] * len(PHASES), [0.0, 1e-3, *[7.0] * 11], [1.0, *[0.0] * 12]):
        drawn = bar(shares, 40)
        assert len(drawn) == 40
    assert bar([1.0, *[0.0] * 12], 3) == "---"
    assert bar([0.0] * len(PHASES)) == ""


def test_machines_are_told_the_same_with_a_number_for_what_it_means() -> None:
    plain = json.loads(json.dumps(to_plain(pair(128, 1.5), None), allow_nan=False))
    assert plain["schema"] == 1
    (finding,) = plain["findings"]
    assert (finding["kind"], finding["workers"]) == ("compute_straggler", [{"stage": 0, "pipeline": 1}])
    assert finding["evidence"]["ratio"] == 1.5
    assert finding["evidence"]["forward_ms_of_peers"] == 10.0
    assert plain["abstains"] is None
    assert plain["samples_per_second"] == 640.0
    assert plain["updates"][0]["phases_us"]["wait_group"] == 40_000.0
    assert plain["updates"][0]["host"] == "gpu7"


@pytest.mark.parametrize(
    ("severities", "status"),
    [((), 0), (("warning",), 10), (("warning", "critical"), 11), (("critical", "blind", "warning"), 12)],
)
def test_exit_statuses(severities: tuple[str, ...], status: int) -> None:
    assert exit_status([Finding("kind", severity, (), 0.0, "") for severity in severities]) == status
