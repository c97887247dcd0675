"""What the suite of islands far apart makes of the diaries of its processes."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.suites.far_apart import CALM, KILLED, WAITS, Islands, measured, ratios, samples_ratios, to_target
from recipes.suites.far_apart.samples import WINDOW, losses, reached, target
from recipes.suites.faults.elastic_world import Record

ISLANDS = Islands(2, None, batch_seconds=1.0, slow=2.0, num_parameters=100, batches=3, latency=0.0)


def trained(at: float, *samples: int) -> dict[str, Any]:
    return {"what": "trained", "at": at, "samples": [*samples]}


def test_a_batch_that_died_with_a_pipeline_counts_where_it_was_trained_at_last() -> None:
    dead = Record(0, 0, [{"what": "start", "at": 10.0}, trained(11.0, 0), trained(12.0, 1)])
    sent = [{"what": "sent", "at": 13.0, "bytes": 200}, {"what": "sent", "at": 15.0, "bytes": 300}]
    received = {"what": "received", "at": 10.0, "seconds": 0.5, "bytes": 77}
    lives = Record(1, 0, [received, {"what": "start", "at": 10.5}, trained(12.5, 2), trained(14.5, 1), *sent])
    row = measured([dead, lives], ISLANDS)
    assert row["seconds"] == 4.5
    assert row["trained_again"] == 1
    assert row["state_bytes"] == 77
    assert row["utilisation"] == pytest.approx((1.0 + 2.0 + 2.0) / (2 * 4.5))
    assert row["all_reduce_bytes"] / row["bytes"] == pytest.approx(4 * 100 * 3 / 300)


def test_a_batch_that_is_in_no_model_is_no_figure_but_a_failure() -> None:
    with pytest.raises(ValueError, match="2 of 3 mini-batches were trained"):
        measured([Record(0, 0, [{"what": "start", "at": 0.0}, trained(1.0, 0), trained(2.0, 1)])], ISLANDS)


def test_the_quorum_is_measured_against_waiting_for_all() -> None:
    common = {"repeat": 0, "kills": 0, "utilisation": 0.5, "bytes": 10, "state_bytes": 2e6, "all_reduce_bytes": 1000}
    seconds = {KILLED: 9.0, CALM: 4.0, WAITS: 6.0}
    found = ratios([{"run": name, "seconds": each, **common} for name, each in seconds.items()])
    assert found["far_apart/quorum"]["value"] == 1.5
    assert found["far_apart/bytes"]["value"] == 100
    assert "newcomers, 2 MB, are not counted" in found["far_apart/bytes"]["meaning"]


def test_samples_count_in_the_order_of_time_where_they_were_trained_at_last() -> None:
    def update(at: float, loss: float | None) -> dict[str, Any]:
        return {"what": "update", "at": at, "loss": loss}

    dead = Record(0, 0, [trained(1.0, 0), update(1.1, 5.0), trained(2.0, 1), update(2.1, 4.0), trained(3.0, 2)])
    lives = Record(1, 0, [trained(1.0, 3), update(1.5, 3.0), trained(4.0, 1), update(4.1, 2.0), update(4.2, None)])
    assert losses([dead, lives]) == [5.0, 3.0, 2.0]


def test_samples_to_a_loss_are_those_until_the_mean_of_the_last_ones_is_as_low() -> None:
    calm = [10 * 0.999**k for k in range(10 * WINDOW)]
    slower = [10 * 0.9995**k for k in range(40 * WINDOW)]
    goal = target(calm)
    assert reached(calm, goal) == 8 * WINDOW
    assert reached(slower, goal) == pytest.approx(16 * WINDOW, rel=0.05)
    assert reached(slower[: 2 * WINDOW], goal) == float("inf")
    with pytest.raises(ValueError, match="too few"):
        target(calm[:WINDOW])


def test_samples_with_kills_are_over_those_without_and_over_all_reduce_at_its_best() -> None:
    def falls(factor: float) -> list[float]:
        return [10 * factor**k for k in range(10 * WINDOW)]

    row = to_target(falls(0.999), [falls(0.999), falls(0.998)], [falls(0.9975), falls(0.9999)])
    assert row["calm"] == row["killed"] == 8 * WINDOW
    found = samples_ratios([{"run": "bert", **row}, {"run": KILLED}])
    assert found["samples/far_apart"]["value"] == 1
    assert found["samples/all_reduce"]["value"] == pytest.approx(1.25, rel=0.05)
    assert samples_ratios([{"run": KILLED}]) == ratios([]) == {}
