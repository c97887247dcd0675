"""A recording holds what was measured, and can be replayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_sdpipe.heterogeneity import Trace, read_tracks
from lightning_sdpipe.heterogeneity.speed import sample
from recipes.tools.record import main


def test_rates_follow_the_device() -> None:
    now = 0.0

    def clock() -> float:
        return now

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def kernel() -> None:
        sleep(0.01 if now < 2.0 else 0.04)

    assert sample(kernel, 4, 1.0, 0.2, clock, sleep) == pytest.approx([100.0, 100.0, 25.0, 25.0])
    assert now == pytest.approx(4.0)


def test_the_command_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cpu.json"
    assert main([str(file), "--seconds", "0.2", "--interval", "0.05"]) == 0
    (track,) = read_tracks(file)
    assert (len(track.speeds), track.interval_seconds) == (4, 0.05)
    assert max(track.speeds) == 1.0
    assert Trace([file]).track(0) == track
    assert "4 samples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--interval", "0"], "interval"),
        (["--seconds", "1", "--interval", "2"], "interval"),
        (["--share", "1.5"], "share"),
        (["--device", "meteor:1"], "meteor:1"),
    ],
)
def test_impossible_recordings_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([str(tmp_path / "trace.json"), *arguments]) == 2
    assert message in capsys.readouterr().err
