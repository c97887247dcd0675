"""The benchmark of the scheduler runs and says what the format asks for; its numbers are not judged here."""

from __future__ import annotations

import pytest

from recipes.suites import scheduler as suite


def test_rows_and_ratios_have_their_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "SIGNALS_PER_MEASUREMENT", 8)
    monkeypatch.setattr(suite, "POLICY_SIZES", (4, 16))
    monkeypatch.setattr(suite, "SIMULATED_ITERATIONS", 3)
    rows, ratios = suite.run(clients=(2, 4), repeats=1, seed=3)
    assert {row["what"] for row in rows} == {"echo", "one group", "pairs", "alone", "policy", "simulation"}
    assert {row["clients"] for row in rows if row["what"] == "echo"} == {2, 4}
    assert {"echo_p50/2", "echo_p99/4", "echo_rate", "policy_growth/16"} <= set(ratios)
    for ratio in ratios.values():
        assert set(ratio) == {"value", "low", "high", "goal", "meaning"}
        assert 0 < ratio["low"] <= ratio["value"] <= ratio["high"]
