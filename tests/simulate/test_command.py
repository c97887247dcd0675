"""``sdpipe simulate``."""

from __future__ import annotations

import re

import pytest

from lightning_sdpipe.cli import main

SMALL = ["simulate", "--stages", "2", "--pipelines", "3", "--iterations", "20"]


def test_it_shows_what_a_policy_costs_and_how_its_groups_were(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--policy", "local_sgd", "--set", "every=4"]) == 0
    page = capsys.readouterr().out
    assert "groups           100, of 1.20 workers (1 to 3)" in page
    assert "local step: 90, everybody came: 10" in page
    assert "of pipelines that never wait" in page


def test_unequal_devices_gain_what_dealing_can_give(capsys: pytest.CaptureFixture[str]) -> None:
    """Six devices of three generations: while the slowest trains one batch, all of them could train eleven."""
    six = ["--stages", "1", "--pipelines", "6", "--jitter", "0"]
    assert main(["simulate", *six, "--factors", "1", "1", "2", "2", "3", "3"]) == 0
    (gain,) = re.findall(r"([\d.]+) times as long", capsys.readouterr().out)
    assert 1.69 <= float(gain) <= 11 / 6


def test_a_pipeline_of_unlike_devices_is_as_fast_as_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    """The fleet of one large device and four of half its speed: 1 + 2 × (½ + ½) mini-batches, less two bubbles."""
    fleet = ["--stages", "1,2,2", "--micro-batches", "8", "--heterogeneity", "none", "--jitter", "0"]
    rates = []
    for speeds in ("1/0.5,0.5/0.5,0.5", "1/0.8,0.2/0.4,0.6"):
        assert main(["simulate", *fleet, "--policy", "no_sync", "--batch-seconds", "0.5", "--speeds", speeds]) == 0
        page = capsys.readouterr().out
        assert "ρ of pipelines" in page
        rates += map(float, re.findall(r"mini-batches/s +([\d.]+)", page))
    assert rates == [pytest.approx(1 + 2 / (1 + 1 / 8), rel=0.01)] * 2, "only their sum counts"
    assert main(["simulate", *fleet, "--policy", "no_sync", "--batch-seconds", "0.5"]) == 0
    assert float(re.findall(r"mini-batches/s +([\d.]+)", capsys.readouterr().out)[0]) > rates[0]


@pytest.mark.parametrize("heterogeneity", ["none", "a", "static", "trace"])
def test_it_knows_the_conditions(heterogeneity: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--heterogeneity", heterogeneity, "--schedule", "pipedream"]) == 0
    assert "ρ of each stage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "no_such"], "no policy 'no_such'"),
        (["--set", "window=-1"], "window=-1"),
        (["--schedule", "zero_bubble"], "schedule='zero_bubble' is not allowed"),
        (["--speeds", "1,1,1"], "one for each stage of each pipeline: like 1,1/1,1/1,1 here"),
        (["--speeds", "1,1/1,1/1,0"], "--speeds are above 0"),
        (["--stages", "1,2", "--pipelines", "2", "--speeds", "1/1"], "like 1/1,1 here"),
        (["--factors", "1", "1", "1", "2"], "--factors are 4, and there are 6 devices: give one for each"),
        (["--heterogeneity", "b", "--factors", "1", "2"], "--factors go with --heterogeneity static, not with b"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(SMALL + arguments) == 2
    assert message in capsys.readouterr().err
