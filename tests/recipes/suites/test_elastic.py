"""What the suites of faults make of what processes said, and the cases that they name."""

from __future__ import annotations

from typing import Any

import hydra
import pytest

from lightning_sdpipe import Exchange
from lightning_sdpipe.sync.capabilities import Combination
from lightning_sdpipe.sync.methods import check, method_for
from recipes.harness.pipelines import Record
from recipes.suites import far_apart, faults, soak
from recipes.suites.elastic import PHASES, Work
from recipes.suites.far_apart.samples import WINDOW, losses, reached, target
from tests.recipes.composed import parameters_of


def record(pipeline: int, *times: float) -> Record:
    return Record(pipeline, 0, [{"at": at, "update": n} for n, at in enumerate(times)])


def trained(pipeline: int, *batches: list[int], end: bool = True) -> Record:
    lines: list[dict[str, Any]] = [{"at": 0.0, "epoch": 0, "trained": batch} for batch in batches]
    return Record(pipeline, 0, lines + ([{"ended": 2}] if end else []))


def test_what_survivors_noticed() -> None:
    survivor, newcomer = record(0, 0.0, 0.1, 0.2, 0.5, 0.6, 0.7, 0.9, 1.0), record(2, 0.95)
    row = faults._figures([survivor], [survivor, record(2, 0.0, 0.1), newcomer], [2], 0.25, 0.65)
    assert row["median_s"] == pytest.approx(0.1)
    assert row["beyond_s"] == pytest.approx(0.2), "the step in which it died"
    assert row["join_beyond_s"] == pytest.approx(0.1)
    assert row["newcomer_s"] == pytest.approx(0.3)


def test_ratios_to_the_limits() -> None:
    case = {"method": "sdpipe", "role": "other", "phase": "pause", "repeat": 0}
    good = case | {"beyond_s": 0.1, "join_beyond_s": 0.05, "newcomer_s": 1.0}
    found = faults.ratios([good, case | {"phase": "forward", "failed": "it hung"}])
    assert found["longest_step/sdpipe/other/pause"]["value"] == pytest.approx(0.2)
    assert found["longest_step/sdpipe/other/forward"]["value"] == float("inf"), "missed"
    step = good | {"method": "allreduce", "phase": "forward", "median_s": 0.1, "transfer_s": 0.75}
    found = faults.ratios([step | {"beyond_s": 0.35, "join_beyond_s": 0.5}])
    assert found["longest_step/allreduce/other/forward"]["value"] == pytest.approx(1.0), "a step and 0.25 s"
    assert found["longest_in_join/allreduce"]["value"] == pytest.approx(0.5), "the transfer and 0.25 s"


def test_every_case_of_the_configuration_can_be_made() -> None:
    suite = parameters_of("faults")
    outside = {*faults.FROM_OUTSIDE, "scheduler", "full_logs", "full_checkpoints"}
    for case in suite["cases"]:
        assert case["phase"] in {*PHASES, *outside}
        assert case["phase"] in faults.LIMITS
        method = hydra.utils.instantiate(suite["methods"][case["method"]])
        stages, schedule = case.get("num_stages", 1), case.get("schedule", "1f1b")
        asked = Combination(method, Exchange(**case.get("exchange", {})), schedule, stages, elastic=True)
        check(method_for(asked), asked)


def test_what_a_soak_holds_against_a_run() -> None:
    work = Work(1, 2, None, batches=2)
    one, two, three = list(range(4)), list(range(4, 8)), list(range(2, 6))
    soak.check([trained(0, one), trained(1, two), trained(1, one, end=False)], work)
    late = Record(1, 0, [{"at": 5.0, "started": 0}])
    with pytest.raises(AssertionError, match=r"pipeline 1 began anew 3.0 s after the first update"):
        soak.check([record(0, 2.0), late], work)
    with pytest.raises(AssertionError, match="4 samples of epoch 0 were not trained"):
        soak.check([trained(0, one)], work)
    with pytest.raises(AssertionError, match="4 samples of epoch 0 were trained twice by survivors"):
        soak.check([trained(0, one, three), trained(1, two)], work)


def test_a_batch_that_died_with_a_pipeline_counts_where_it_was_trained_at_last() -> None:
    def said(at: float, *samples: int) -> dict[str, Any]:
        return {"at": at, "trained": [*samples]}

    work = {"batch_seconds": 1.0, "slow": 2.0, "num_parameters": 100}
    islands = far_apart.Islands(1, 2, None, batches=3, **work)
    dead = Record(0, 0, [{"at": 10.0, "started": 0}, said(11.0, 0), said(12.0, 1)])
    received = {"at": 10.0, "received": 0.5, "bytes": 77}
    sent = [{"at": 13.0, "update": 1, "sent": 200}, {"at": 15.0, "ended": 2, "sent": 300}]
    lives = Record(1, 0, [received, {"at": 10.5, "started": 0}, said(12.5, 2), said(14.5, 1), *sent])
    row = far_apart.measured([dead, lives], islands)
    assert (row["seconds"], row["trained_again"], row["state_bytes"], row["bytes"]) == (4.5, 1, 77, 300)
    assert row["utilisation"] == pytest.approx((1.0 + 2.0 + 2.0) / (2 * 4.5))
    with pytest.raises(ValueError, match="2 of 3 mini-batches were trained"):
        far_apart.measured([dead], islands)


def test_samples_count_in_the_order_of_time_until_the_mean_of_the_last_ones_is_low() -> None:
    def lines(*of: tuple[float, int, float | None]) -> list[dict[str, Any]]:
        said = [{"at": at, "trained": [sample]} for at, sample, _ in of]
        made = [{"at": at + 0.1, "update": 1, "loss": loss} for at, _, loss in of]
        return [each for pair in zip(said, made, strict=True) for each in pair]

    dead, lives = Record(0, 0, lines((1.0, 0, 5.0), (2.0, 1, 4.0))), Record(1, 0, lines((1.5, 3, 3.0), (4.0, 1, 2.0)))
    assert losses([dead, lives]) == [5.0, 3.0, 2.0]
    calm, slower = ([10 * factor**k for k in range(40 * WINDOW)] for factor in (0.999, 0.9995))
    goal = target(calm[: 10 * WINDOW])
    assert reached(calm, goal) == 8 * WINDOW
    assert reached(slower, goal) == pytest.approx(16 * WINDOW, rel=0.05)
    with pytest.raises(ValueError, match="too few"):
        target(calm[:WINDOW])
