"""``sdpipe simulate``."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from lightning_sdpipe.cli import main

SMALL = ["simulate", "--num-stages", "2", "--num-pipelines", "3", "--iterations", "20"]


def test_it_shows_what_a_policy_costs_and_how_its_groups_were(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--policy", "local_sgd", "--set", "every=4"]) == 0
    page = capsys.readouterr().out
    assert "groups           100, of 1.20 workers (1 to 3)" in page
    assert "local step: 90, everybody came: 10" in page
    assert "of pipelines that never wait" in page


def test_unequal_devices_gain_what_dealing_can_give(capsys: pytest.CaptureFixture[str]) -> None:
    """Six devices of three generations: while the slowest trains one batch, all of them could train eleven."""
    six = ["--num-stages", "1", "--num-pipelines", "6", "--heterogeneity", "static", "--jitter", "0"]
    assert main(["simulate", *six, "--factors", "1", "1", "2", "2", "3", "3"]) == 0
    (gain,) = re.findall(r"([\d.]+) times as long", capsys.readouterr().out)
    assert 1.69 <= float(gain) <= 11 / 6


@pytest.mark.parametrize("heterogeneity", ["none", "a", "static", "trace"])
def test_it_knows_the_conditions(heterogeneity: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--heterogeneity", heterogeneity, "--schedule", "pipedream"]) == 0
    assert "ρ of each stage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "no_such"], "no policy 'no_such'"),
        (["--set", "window=-1"], "window=-1"),
        (["--schedule", "zero_bubble"], "not simulated"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(SMALL + arguments) == 2
    assert message in capsys.readouterr().err


def test_it_needs_neither_torch_nor_numpy_to_run() -> None:
    code = (
        "import sys\n"
        "from lightning_sdpipe.simulate import Work, simulate\n"
        "from lightning_sdpipe.heterogeneity import Delays\n"
        "from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized\n"
        "assert not simulate(SemiDecentralized(), Work(2, 2, 5, heterogeneity=Delays(0.1, 1.0))).stuck\n"
        "sys.exit(', '.join({'torch', 'numpy', 'lightning'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
