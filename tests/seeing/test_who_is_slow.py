"""Real processes: the worker that was made slow is named at the end of the run, and none where all are alike; a trace
shows what they do meanwhile."""

from __future__ import annotations

import csv
import json
import re
import time
from pathlib import Path

import pytest

from lightning_sdpipe.cli import main
from lightning_sdpipe.meter import OWN, PHASES
from lightning_sdpipe.seeing.detectors import compute_straggler
from lightning_sdpipe.seeing.recording import of_log
from tests.own_session import Script, module, script
from tests.seeing.golden.record import PIPELINES, SLOW, STAGES, UPDATES
from tests.seeing.test_trace import check


def trace_when_it_trains(run: Script, directory: Path) -> None:
    """What is written of a living run that was not prepared for it."""
    path = directory / "trace.json"
    command = ["trace", "--updates", "4", "--timeout", "4", "-o", str(path)]
    while main(command) != 0:  # it has not begun
        assert run.process.is_alive(), run.printed()
        time.sleep(0.2)
    trace = json.loads(path.read_text())
    found = check(trace)
    assert found["workers"] == STAGES * PIPELINES
    shared = found["updates"] // found["workers"] - 1  # by neighbours, one of which may be an update ahead
    assert found["arrows"] >= shared * 2 * STAGES * PIPELINES
    assert max(trace["otherData"]["clock_error_us"].values()) < 1e6


def check_metrics(directory: Path) -> None:
    """What a logger of the Trainer got of the first run, and of the second."""
    first, second = sorted(directory.glob("**/metrics.csv"))
    for path in (first, second):
        rows = [row for row in csv.DictReader(path.open()) if row["sdpipe/findings"]]
        assert len(rows) >= 3
        steps = [int(row["step"]) for row in rows]
        assert steps == sorted({*steps})
        assert min(steps) >= 16
        *_, last = rows
        assert float(last["sdpipe/samples_per_second"]) > 0
        for stage in range(STAGES):
            shares = [float(last[key]) for key in last if key.startswith(f"sdpipe/stage_{stage}/")]
            assert len(shares) == 4
            assert sum(shares) == pytest.approx(1, abs=1e-6)


@pytest.mark.distributed
def test_the_slow_worker_is_named_and_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):  # other tests have schedulers, too
        monkeypatch.setenv(name, str(tmp_path))
    with script(tmp_path, module, "tests.seeing.golden.record", str(tmp_path), "straggler", "equal") as run:
        trace_when_it_trains(run, tmp_path)
        assert run.wait() == 0, run.printed()
    slow, equal = re.findall(r"^(?:INFO: )?(sdpipe: .*)$", run.printed(), re.MULTILINE)
    ratio = r"1\.[3-7]\d × as slow as its peers \(injected\)"
    named = rf"stage 0 of pipeline 1 \(.*, cpu\) is {ratio}: others waited \d+\.\d % of the time"
    gain = r"\(up to 1\.\d\d × as fast\)"
    advice = rf'→ let the others continue without it: SDPipeStrategy\(sync="semi_decentralized"\) {gain}'
    assert re.match(rf"sdpipe: \S+ samples/s; {named} {advice}", slow), slow
    assert re.match(r"sdpipe: \S+ samples/s; no worker was slower than its replicas", equal), equal
    check_metrics(tmp_path)
    recording = of_log(tmp_path / "straggler.jsonl")
    assert [finding.workers for finding in compute_straggler(recording)] == [(SLOW,)]
    assert len(recording.series) == STAGES * PIPELINES
    for series in recording.series.values():
        assert len(series) == UPDATES - 1, "the first update only marks the beginning of the next"
        own = sum(series.own()) / len(series) / 1e3
        assert own > 25, "two micro-batches of 15 ms"
        waits = [sum(us[phase] for us in series.us) for phase in range(OWN, len(PHASES))]
        assert sum(waits) > 0
