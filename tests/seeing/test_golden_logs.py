"""Recorded trainings: of 4 × 4 on an idle machine, the worker that was made slow is found, and none among
equals."""

from __future__ import annotations

import gzip
import statistics
from pathlib import Path

import pytest

from lightning_sdpipe.seeing.detectors import findings
from lightning_sdpipe.seeing.recording import Recording, of_log
from tests.seeing.golden.record import LARGE_SLOW, LARGE_UPDATES

GOLDEN = Path(__file__).parent / "golden"


def recorded(name: str, directory: Path) -> Recording:
    """``name`` of the compressed logs."""
    log = directory / "scheduler.jsonl"
    log.write_bytes(gzip.decompress((GOLDEN / f"{name}.jsonl.gz").read_bytes()))
    return of_log(log)


@pytest.mark.parametrize("method", ["all_reduce", "sdpipe"])
def test_one_of_sixteen_is_named(tmp_path: Path, method: str) -> None:
    """It was 1.6 times as slow where it computes, beside what all spend otherwise."""
    found = findings(recorded(f"{method}_straggler_4x4", tmp_path))
    assert [(finding.kind, finding.workers) for finding in found] == [("compute_straggler", (LARGE_SLOW,))]
    assert 1.35 < found[0].evidence["ratio"] < 1.6
    assert "(injected)" in found[0].text


@pytest.mark.parametrize("method", ["all_reduce", "sdpipe"])
def test_none_of_sixteen_equals_is_named(tmp_path: Path, method: str) -> None:
    """Though its own time varies by a twentieth on a machine of two cores."""
    recording = recorded(f"{method}_equal_4x4", tmp_path)
    assert len(recording.series) == 16
    assert {len(series) for series in recording.series.values()} == {LARGE_UPDATES - 1}
    assert findings(recording) == []
    own = [list(series.own()) for series in recording.series.values()]
    beyond = sum(max(0, each - statistics.median(times)) for times in own for each in times)
    assert 0.02 < beyond / sum(map(sum, own)) < 0.1
