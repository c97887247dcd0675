"""One file about a run, which needs nothing else."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from lightning_sdpipe.cli import main
from lightning_sdpipe.policies import Worker
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler.log.event_log import read_log
from lightning_sdpipe.scheduler.rows import About, Doing
from lightning_sdpipe.seeing import html
from lightning_sdpipe.seeing.page import to_plain
from lightning_sdpipe.seeing.recording import last_run, of_log
from lightning_sdpipe.simulate import Work, jittered, simulate
from tests.seeing.pages import Page
from tests.seeing.recordings import chunks, recording, simulated_log

GOLDEN = Path(__file__).parent / "golden"
LIMIT = 2 << 20


def test_a_report_is_one_page_without_scripts_that_loads_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run.html"
    assert main(["report", str(GOLDEN / "stalls.jsonl"), "-o", str(output)]) == 0
    assert capsys.readouterr().out == f"Report: {output}\n"
    assert output.stat().st_size < LIMIT
    page = Page(output.read_text())
    assert "script" not in page.seen
    assert page.sources == set()
    assert {"rect", "polyline"} <= page.seen, "phases, and the speed over time"
    assert "workers stall in turn" in page.text
    assert (
        '→ let the others continue without workers that stall: SDPipeStrategy(sync="semi_decentralized")' in page.text
    )
    assert "vm, cpu" in page.text


def test_names_are_text_and_many_workers_stay_small(tmp_path: Path) -> None:
    own = jittered(0.06, 0.3)
    run = simulate(SemiDecentralized(), Work(2, 48, 40, own))
    about = About("<script>alert(1)</script>", "cuda:0", 0, 8, "1f1b", 2)
    log = simulated_log(tmp_path / "log.jsonl", SemiDecentralized(), run, own, about)
    assert main(["report", str(log), "-o", str(tmp_path / "run.html")]) == 0
    assert (tmp_path / "run.html").stat().st_size < LIMIT
    page = Page((tmp_path / "run.html").read_text())
    assert "script" not in page.seen
    assert "The 64 workers with the longest own time; 32 more are left" in page.text
    assert "Lag of models" not in page.text, "it would take too long"


def test_a_run_in_groups_has_their_sizes_and_its_lag(tmp_path: Path) -> None:
    own = jittered(0.06, 0.3)
    log = simulated_log(
        tmp_path / "log.jsonl", SemiDecentralized(), simulate(SemiDecentralized(), Work(2, 4, 40, own)), own
    )
    assert main(["report", str(log), "-o", str(tmp_path / "run.html")]) == 0
    page = Page((tmp_path / "run.html").read_text())
    for title in ("Speed of each pipeline", "Groups by size and reason", "Lag of models"):
        assert title in page.text
    assert "everybody came" in page.text


def page_with_losses() -> str:
    """Return the page of a run: a pipeline was lost after 28 s and back 10 s later, another was lost for good."""
    one, two, three = (Worker(0, pipeline) for pipeline in range(3))
    lives = [chunks(two, [200.0] * 140), chunks(two, [200.0] * 560, life=2)]
    later = [msgspec.structs.replace(chunk, at=chunk.at + 38) for chunk in lives[1]]
    told = {one: chunks(one, [200.0] * 750), two: [*lives[0], *later], three: chunks(three, [200.0] * 50)}
    seen = dataclasses.replace(recording(told, active=[one, two]), gone={three: 11.0})
    return html.page("train.py", to_plain(seen, None), seen, live=True).decode()


def test_all_lives_of_a_pipeline_are_counted_and_their_ends_are_marked() -> None:
    text = Page(page_with_losses()).text
    assert "140 + 560 = 700" in text
    assert "2 of 3: pipeline 2 lost 2 min 19 s ago" in text
    for words in ("pipeline 1 was lost after 28 s", "pipeline 1 is back after 38 s", "pipeline 2 was lost after 11 s"):
        assert words in text
    assert "Training" in text
    assert "1,500" in text, "updates of all"


_SEEN = """<script>
  const height = (each) => each.getBoundingClientRect().bottom;
  const marks = [...document.querySelectorAll(".mark")].map((each) => [each.textContent, height(each)]);
  const parts = [document.querySelector(".state"), document.querySelector("#pipelines")];
  const texts = parts.map((each) => [each.innerText, height(each)]);
  document.body.innerHTML = `<pre>${JSON.stringify([...texts, ...marks])}</pre>`;
</script>"""
"""What a browser shows of the page, and how far below its top each ends, in pixels."""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_shows_the_state_the_pipelines_and_the_losses_without_scrolling(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page_with_losses().replace("</body>", f"{_SEEN}</body>"))
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1280,800",
        "--dump-dom",
        file.as_uri(),
    ]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (found,) = re.findall(r"<pre>(.+)</pre>", shown)
    texts, bottoms = zip(*json.loads(found), strict=True)
    assert texts == (
        "Training",
        "2 of 3: pipeline 2 lost 2 min 19 s ago",
        "pipeline 1 was lost after 28 s",
        "pipeline 1 is back after 38 s",
        "pipeline 2 was lost after 11 s",
    )
    assert 0 < min(bottoms) <= max(bottoms) < 800


@pytest.mark.parametrize(("state", "over"), [("waiting: 1 of 2 pipelines", False), ("finished", True)])
def test_only_a_run_that_is_over_has_an_end(state: str, over: bool) -> None:
    worker = Worker(0, 0)
    seen = dataclasses.replace(recording({worker: chunks(worker, [60.0] * 8)}), state=state)
    text = Page(html.page("train.py", to_plain(seen, None), seen, live=True).decode()).text
    assert ("pipelines that trained at the end" in text) == over
    assert ("time so far" in text) != over


def test_a_page_has_the_epoch_the_time_that_is_left_and_the_newest_metrics() -> None:
    worker = Worker(0, 0)
    does = {worker: Doing("validating", 2, 10, 130, (("val_loss", "0.25"),))}
    seen = dataclasses.replace(recording({worker: chunks(worker, [60.0] * 8)}, active=()), doing=does, clock=1e9)
    live = dataclasses.replace(seen, state="validating", restarts=(0.24,))
    text = Page(html.page("train.py", to_plain(live, None), live, live=True).decode()).text
    for words in ("Validating", "epoch3 of 10", "time leftabout 2 min 10 s", "val_loss0.25", "1 of 1"):
        assert words in text
    assert "the scheduler was started again after 0 s" in text
    over = dataclasses.replace(seen, state="finished", over=True)
    text = Page(html.page("train.py", to_plain(over, None), over).decode()).text
    assert "Finished at 2001-09-" in text
    assert "val_loss0.25" in text
    assert "time left" not in text


def test_a_run_goes_on_in_the_log_where_its_scheduler_was_started_again(tmp_path: Path) -> None:
    first, *lines = (GOLDEN / "straggler.jsonl").read_bytes().splitlines(True)
    begun = json.loads(first)
    again = json.dumps(begun | {"at": begun["at"] + 20}, separators=(",", ":")).encode() + b"\n"
    half = len(lines) // 2
    joins = [line for line in lines if b'"joined"' in line][:4]
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join([first, *lines[:half], again, *joins, *lines[half:]]))
    whole, both = of_log(GOLDEN / "straggler.jsonl"), of_log(path)
    assert both.restarts == (begun["at"] + 20,)
    assert both.begun == whole.begun
    assert {worker: series.made for worker, series in both.series.items()} == {
        worker: series.made for worker, series in whole.series.items()
    }
    others = [re.sub(rb'^({"rows":\[\[.,.\],)\d+', rb"\g<1>7", line) for line in lines]
    path.write_bytes(b"".join([first, *lines, again, *others]))
    assert len(last_run(read_log(path))) == 1, "its processes are others"


def test_a_log_without_rows_has_a_report(tmp_path: Path) -> None:
    first = (GOLDEN / "straggler.jsonl").read_bytes().splitlines(True)[0]
    (tmp_path / "log.jsonl").write_bytes(first)
    assert main(["report", str(tmp_path / "log.jsonl"), "-o", str(tmp_path / "run.html")]) == 0
    assert "too short to tell (0 of 96 updates)" in Page((tmp_path / "run.html").read_text()).text


@pytest.mark.parametrize(
    ("log", "output", "says"),
    [
        ("straggler.jsonl", "run.png", "a report is a page"),
        ("nothing.jsonl", "run.html", "cannot be read"),
        ("straggler.jsonl", "no/such/folder/run.html", "cannot be written"),
    ],
)
def test_what_cannot_be_written_is_said(
    log: str, output: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(GOLDEN / log), "-o", str(tmp_path / output)]) == 2
    assert says in capsys.readouterr().err
