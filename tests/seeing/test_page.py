"""What people and machines are shown."""

from __future__ import annotations

import dataclasses
import json

import pytest

from lightning_sdpipe.meter import PHASES
from lightning_sdpipe.policies import Worker
from lightning_sdpipe.scheduler.rows import About, Doing
from lightning_sdpipe.seeing.finding import Finding
from lightning_sdpipe.seeing.page import bar, exit_status, in_one_line, text, to_plain
from lightning_sdpipe.seeing.recording import Recording
from tests.seeing.recordings import chunks, recording

A, B = Worker(0, 0), Worker(0, 1)


def pair(updates: int, factor: float, samples: int | None = 32) -> Recording:
    about = {worker: About("gpu7", f"cuda:{worker.pipeline}", worker.pipeline, samples) for worker in (A, B)}
    every = 60.0 * factor + 1
    slow = chunks(B, [60.0 * factor] * updates, every=every)
    return recording({A: chunks(A, [60.0] * updates, every=every), B: slow}, about)


def shown(seen: Recording) -> str:
    return text(to_plain(seen, None), None)


def test_the_last_line_says_how_fast_it_was_and_who_was_slow() -> None:
    line = in_one_line(pair(128, 1.5))
    slow = "stage 0 of pipeline 1 (gpu7, cuda:1) is 1.50 × as slow as its peers (forward)"
    advice = '→ give it fewer batches, since others wait for it at the end of an epoch: SDPipeStrategy(data="dealt")'
    assert line == f"sdpipe: 703 samples/s; {slow}: others waited 16.5 % of the time {advice}"
    assert in_one_line(pair(128, 1.0)) == "sdpipe: 1.0k samples/s; no worker was slower than its replicas"
    assert in_one_line(pair(44, 1.5)) == "sdpipe: 703 samples/s; too short to tell (44 of 96 updates)"
    assert in_one_line(pair(44, 1.5, None)) == "sdpipe: too short to tell (44 of 96 updates)"
    assert in_one_line(pair(44, 1.5, 3200)).startswith("sdpipe: 70.3k samples/s; ")
    assert in_one_line(recording({}, active=())) == "sdpipe: too short to tell (0 of 96 updates)"


def test_a_page_has_findings_bars_and_a_legend() -> None:
    lines = shown(pair(128, 1.5)).splitlines()
    assert lines[0] == (
        "CRITICAL stage 0 of pipeline 1 (gpu7, cuda:1) is 1.50 × as slow as its peers (forward): "
        "others waited 16.5 % of the time  [compute_straggler]"
    )
    assert lines[1].startswith("         → give it fewer batches, ")
    assert lines[1].endswith(': SDPipeStrategy(data="dealt")')
    assert lines[3:] == [
        "stage  pipeline  rank  where         updates  ms    own   the last 64 updates",
        "0      0         0     gpu7, cuda:0  128      91.0  60.0  " + "f" * 4 + "b" * 22 + "." * 14,
        "0      1         1     gpu7, cuda:1  128      91.0  90.0  " + "f" * 18 + "b" * 22,
        "own: without waits for other workers; f forward, b backward, . waits for replicas",
    ]
    assert shown(pair(128, 1.0)).startswith("healthy  no worker is slower than its replicas\n")
    assert shown(pair(44, 1.0)).startswith("slow?    too short to tell (44 of 96 updates)\n")
    assert "no worker has reported an update yet" in shown(recording({}, active=()))


def test_a_page_of_text_has_what_the_run_does_and_which_pipelines_are_lost() -> None:
    does = {A: Doing("training", 0, 3, 75, (("val_loss", "0.5"),))}
    seen = dataclasses.replace(pair(128, 1.0), gone={B: 4.0}, doing=does, now=10.0)
    assert shown(seen).splitlines()[:2] == [
        "training, epoch 1 of 3; about 1 min 15 s left; val_loss 0.5",
        "lost     pipeline 1 6 s ago: its log says why (pipeline-1.log of sdpipe run)",
    ]


def test_a_bar_has_one_letter_for_each_part_of_it() -> None:
    for shares in ([1.0] * len(PHASES), [0.0, 1e-3, *[7.0] * 11], [1.0, *[0.0] * 12]):
        drawn = bar(shares, 40)
        assert len(drawn) == 40
    assert bar([1.0, *[0.0] * 12], 3) == "---"
    assert bar([0.0] * len(PHASES)) == ""


def test_machines_are_told_the_same_with_a_number_for_what_it_means() -> None:
    plain = json.loads(json.dumps(to_plain(pair(128, 1.5), None), allow_nan=False))
    assert plain["schema"] == 3
    (finding,) = plain["findings"]
    assert (finding["kind"], finding["workers"]) == ("compute_straggler", [{"stage": 0, "pipeline": 1}])
    assert finding["evidence"]["ratio"] == 1.5
    assert finding["evidence"]["forward_ms_of_peers"] == 10.0
    assert plain["abstains"] is None
    assert finding["cost"] == {"stood": pytest.approx(30 / 182), "lacks": pytest.approx(30 / 182)}
    (advice,) = finding["advice"]
    assert (advice["python"], advice["gain"]) == ('SDPipeStrategy(data="dealt")', None)
    assert advice["override"] == "strategy.data=dealt"
    assert plain["samples_per_second"] == 703.297
    assert plain["updates"][0]["phases_us"]["wait_group"] == 31_000.0
    assert plain["updates"][0]["host"] == "gpu7"
    assert (plain["state"], plain["pipelines"]) == ("training", {"training": 2, "of": 2, "lost": []})


@pytest.mark.parametrize(
    ("severities", "status"),
    [
        ((), 0),
        (("note",), 0),
        (("warning",), 10),
        (("warning", "critical"), 11),
        (("critical", "blind", "warning"), 12),
    ],
)
def test_exit_statuses(severities: tuple[str, ...], status: int) -> None:
    assert exit_status([Finding("kind", severity, (), 0.0, "") for severity in severities]) == status
