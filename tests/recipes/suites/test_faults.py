"""What the suites of faults make of what processes said, and the cases that they name."""

from __future__ import annotations

from collections import Counter
from inspect import signature
from typing import Any

import hydra
import pytest

from lightning_sdpipe import Exchange
from lightning_sdpipe.sync.capabilities import Combination, check
from lightning_sdpipe.sync.methods import method_for
from recipes.suites import faults, soak
from recipes.suites.faults.elastic_world import Record
from recipes.suites.faults.injected_faults import PHASES
from recipes.suites.faults.torchft_peer import _figures
from recipes.suites.soak import events
from tests.recipes.composed import parameters_of


def record(pipeline: int, *times: float) -> Record:
    return Record(pipeline, 0, [{"what": "update", "at": at, "update": n} for n, at in enumerate(times)])


def test_what_survivors_noticed() -> None:
    survivor = record(0, 0.0, 0.1, 0.2, 0.5, 0.6, 0.7, 0.9, 1.0)
    newcomer = record(2, 0.95)
    row = faults._figures(
        [survivor], [survivor, record(2, 0.0, 0.1), newcomer], [2], 0.25, 0.65, [0.26], 0.0, "forward"
    )
    assert row["median_s"] == pytest.approx(0.1)
    assert row["beyond_s"] == pytest.approx(0.2), "the step in which it died"
    assert row["detected_s"] == pytest.approx(0.01)
    assert row["regrouped_s"] == pytest.approx(0.35), "the first that began afterwards"
    assert row["join_beyond_s"] == pytest.approx(0.1)
    assert row["newcomer_s"] == pytest.approx(0.3)


def test_ratios_to_the_limits() -> None:
    case = {"method": "sdpipe", "role": "other", "phase": "pause", "repeat": 0}
    good = case | {"beyond_s": 0.1, "join_beyond_s": 0.05, "newcomer_s": 1.0}
    found = faults.ratios([good, case | {"phase": "forward", "failed": "it hung"}])
    assert found["longest_step/sdpipe/other/pause"]["value"] == pytest.approx(0.2)
    assert found["longest_step/sdpipe/other/forward"]["value"] == float("inf"), "missed"
    assert found["newcomer/sdpipe"]["value"] == pytest.approx(0.5)
    step = good | {"method": "allreduce", "phase": "forward", "median_s": 0.1, "transfer_s": 0.75}
    found = faults.ratios([step | {"beyond_s": 0.35, "join_beyond_s": 0.5}])
    assert found["longest_step/allreduce/other/forward"]["value"] == pytest.approx(1.0), "a step and 0.25 s"
    assert found["longest_in_join/allreduce"]["value"] == pytest.approx(0.5), "the transfer and 0.25 s"


def test_every_case_of_the_configuration_can_be_made() -> None:
    suite = parameters_of("faults")
    outside = {"sigterm", "silent", "scheduler", "two_at_once", "all_but_one", "full_logs", "full_checkpoints"}
    for case in suite["cases"]:
        assert case["method"] in suite["methods"]
        assert case["phase"] in {*PHASES, *outside}
        assert case["phase"] in faults.LIMITS
        method = hydra.utils.instantiate(suite["methods"][case["method"]])
        stages, schedule = case.get("num_stages", 1), case.get("schedule", "1f1b")
        asked = Combination(method, Exchange(**case.get("exchange", {})), schedule, stages, elastic=True)
        check(method_for(asked), asked)


def test_parameters_are_those_of_the_suites() -> None:
    for suite, name in ((faults, "faults"), (soak, "soak")):
        assert parameters_of(name).keys() == signature(suite.run).parameters.keys()


def test_torchfts_figures() -> None:
    found = _figures([record(0, 0.0, 0.1, 0.2, 1.4, 1.5)], 0.25)
    assert found["median_s"] == pytest.approx(0.1)
    assert found["longest_s"] == pytest.approx(1.2)


def trained(pipeline: int, *batches: list[int], ended: bool = True) -> Record:
    lines: list[dict[str, Any]] = [{"what": "trained", "at": 0.0, "epoch": 0, "samples": batch} for batch in batches]
    return Record(pipeline, 0, lines + ([{"what": "end"}] if ended else []))


def began(pipeline: int, at: float, first: float) -> Record:
    return Record(pipeline, 0, [{"what": "start", "at": at, "update": 0}, {"what": "update", "at": first, "update": 1}])


def test_what_a_soak_holds_against_a_run() -> None:
    work = soak.Regression(1, 2, None, Exchange(), "1f1b", 0.0, batches=1, epochs=1)
    one, two, three = list(range(4)), list(range(4, 8)), list(range(2, 6))
    soak.check([trained(0, one), trained(1, two), trained(1, one, ended=False)], work)
    with pytest.raises(AssertionError, match=r"pipeline 1 began anew 3.0 s after the first update"):
        soak.check([began(0, 1.0, 2.0), began(1, 5.0, 6.0)], work)
    with pytest.raises(AssertionError, match="4 samples of epoch 0 were not trained"):
        soak.check([trained(0, one)], work)
    with pytest.raises(AssertionError, match="4 samples of epoch 0 were trained twice by survivors"):
        soak.check([trained(0, one, three), trained(1, two)], work)
    assert Counter(events.INSIDE) <= Counter(PHASES)
