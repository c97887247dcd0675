"""Real processes: the worker that was made slow is named at the end of the run, and none where all are alike."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_sdpipe.meter import OWN, PHASES
from lightning_sdpipe.seeing.detectors import compute_straggler
from lightning_sdpipe.seeing.recording import of_log
from tests.seeing.golden.record import PIPELINES, SLOW, STAGES, UPDATES


@pytest.mark.distributed
def test_the_slow_worker_is_named_and_nobody_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.seeing.golden.record", str(tmp_path), "straggler", "equal"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    slow, equal = re.findall(r"^sdpipe: .*$", run.stdout + run.stderr, re.MULTILINE)
    ratio = r"1\.[3-7]\d × as slow as its peers \(injected\)"
    named = rf"stage 0 of pipeline 1 \(.*, cpu\) {ratio}: others stood still \d+\.\d %"
    more = r"(; \d more findings?)?"  # the machine that runs the tests may stall
    assert re.fullmatch(rf"sdpipe: \S+ samples/s; {named}{more}", slow), slow
    assert re.fullmatch(rf"sdpipe: \S+ samples/s; no worker was slower than its replicas{more}", equal), equal
    recording = of_log(tmp_path / "straggler.jsonl")
    assert [finding.workers for finding in compute_straggler(recording)] == [(SLOW,)]
    assert len(recording.series) == STAGES * PIPELINES
    for series in recording.series.values():
        assert len(series) == UPDATES - 1, "the first update only marks the beginning of the next"
        own = sum(series.own()) / len(series) / 1e3
        assert own > 25, "two micro-batches of 15 ms"
        waits = [sum(us[phase] for us in series.us) for phase in range(OWN, len(PHASES))]
        assert sum(waits) > 0
