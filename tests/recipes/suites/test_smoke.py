"""One small real run of each suite; the numbers are not judged here."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from recipes.suites.storm import TOGETHER
from tests.recipes.composed import parameters_of

ECHO = {f"echo{kind}_{p}/4" for kind in ("", "_pairs", "_alone") for p in ("p50", "p99")}
RATIOS = {
    "convergence": {f"{name}/digits/static" for name in ("final", "samples", "time", "rate")},
    "epochs": {
        *("all_reduce/1x4/static", "bound/1x4/static", "bound/1+2+2/none", "rectangle/1+2+2/none"),
    },
    "exchange": {
        *(f"codec/{name}_encode" for name in ("eight_bit", "stochastic", "one_bit")),
        *("codec/eight_bit_decode", "memory/ring/eight_bit", "best/ddp_fp16"),
        *(
            f"{name}/full/{rate}"
            for name in ("half", "eight_bit", "one_bit", "pair8", "ring8")
            for rate in ("100mbit", "1gbit")
        ),
        *("ablation/hierarchy", "ablation/hierarchy/ring", "ablation/fusion", "bytes/hierarchy"),
        *("sdpipe/nosync/b/busy_link", "sdpipe/nosync/b/busy_link/default"),
    },
    "far_apart": {
        *(f"far_apart/{name}" for name in ("utilisation", "calm", "bytes", "bytes/calm")),
        *(f"{ratio}/{method}/100mbit" for ratio in ("share", "longest") for method in ("eight_bit", "all_reduce")),
        "share/best/100mbit",
    },
    "faults": {"longest_step/sdpipe/other/exchange", "longest_in_join/sdpipe", "newcomer/sdpipe"},
    "partial_reduce": {
        *("dynamic/constant/one_x5", "preduce/asp/one_x5", "preduce/eager/one_x5", "preduce/hete/one_x5"),
        *("preduce/backup3/hl3", "preduce/backup3/trace", "scaling/32/preduce_over_backup"),
    },
    "phd": {
        *("phd/all_reduce/2x2", "phd_every4/all_reduce/2x2", "phd_async/nosync/2x2", "sdpipe/phd/2x2"),
        *("phd_samples/2x2", "phd_final/2x2", "lag/2x2"),
    },
    "placement": {
        *(f"optimum/{number}" for number in range(1, 6)),
        *("ga60/ten", "ga60/noise5", "ga60/noise4", "reach/4", "pipelined/5/m61"),
    },
    "scheduler": ECHO | {"echo_rate", "echo_rate_pairs", "echo_rate_alone", "policy_growth/16"},
    "seeing": {
        *("overhead/2x2", "throughput/1x2/none", "named/static1.5", "accused/none", "cost/static2"),
        *("accused/simulated", "viewers"),
    },
    "soak": {"soak/failed", "soak/loss", "soak/still"},
    "storm": {f"{ratio}/diloco/3/storm/real" for ratio in ("members", "kept", "back", "stood")}
    | {
        f"{ratio}/{method}/4/{weather}"
        for method in ("all_reduce", "local_sgd", "diloco", "semi_decentralized", "partial_reduce", "ad_psgd")
        for ratio in ("kept", "back", "stood", *(("members",) if method in TOGETHER else ()))
        for weather in ("kills", "storm")
    },
    "throughput": set(),
}
"""The keys that a debug configuration gives; that of the pipeline runs in tests/recipes/test_bench.py."""
FIGURES = {"convergence": {"digits"}}
ROOT_ONLY = {"best", "full", "ablation", "bytes"}
"""Parts of keys that need network namespaces."""
BY_OTHERS = {"far_apart": "soak"}
"""Suites that make test-all runs, since make test has others with the same trainings."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in BY_OTHERS)) for name in sorted(RATIOS)]
)
def test_a_small_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parameters = parameters_of(name, f"+debug={name}_debug")
    if "output" in parameters:
        parameters = {**parameters, "output": str(tmp_path / "out.json")}
    rows, found = importlib.import_module(f"recipes.suites.{name}").run(**parameters)
    json.dumps(rows)
    expected = RATIOS[name]
    if "No slow links" in capsys.readouterr().err:
        expected = {key for key in expected if not ROOT_ONLY & {*key.split("/")}}
    if name == "soak":
        assert found["soak/failed"]["value"] == 0, rows
        expected = expected & {*found}  # a run may end early
    assert {*found} == expected
    for key, value in found.items():
        assert [*value] == ["value", "low", "high", "goal", "meaning"]
        assert value["low"] <= value["value"] <= value["high"], key
    drawn = {file.name for file in tmp_path.iterdir()} - {"out.rows.jsonl"}
    assert drawn == {f"out.{figure}.{kind}" for figure in FIGURES.get(name, ()) for kind in ("png", "svg")}
