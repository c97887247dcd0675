"""The costs of DT-FM's cases, and the better model beside them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.placement.arrange import Stages
from lightning_sdpipe.placement.cost import CostModel
from lightning_sdpipe.placement.model import Block, even_stages
from lightning_sdpipe.topology.mesh import rows_of
from recipes.baselines import dtfm_cases as cases
from recipes.baselines.dtfm_cost import Cost, evaluate, group_cost, weights
from tests.placement.sites import network_of_sites

WORLD = cases.case(5)
NUMBERS = {str(device): number for number, device in enumerate(WORLD.devices)}


def one_city_per_stage(*cities: str) -> Stages:
    return [[NUMBERS[f"{city}:{index}"] for index in range(8)] for city in cities]


def test_links_cost_what_the_published_code_computes() -> None:
    costs = weights(WORLD, 8, cases.stages(), "dtfm")
    tokyo, seoul = NUMBERS["Tokyo:0"], NUMBERS["Seoul:0"]
    assert costs.exchange[0][0][1] == pytest.approx(0.66, abs=1e-6)
    assert costs.step[0][0][1] == pytest.approx(3.779994, abs=1e-6)
    assert costs.exchange[0][tokyo][seoul] == pytest.approx(1.249818, abs=1e-6)
    assert costs.step[0][tokyo][seoul] == pytest.approx(6.922534, abs=1e-6)
    assert costs.even


@pytest.mark.parametrize(
    ("micro_batches", "together", "apart"),
    [(1, 59.44, 49.22), (4, 27.11, 32.25), (16, 18.98, 28.01), (61, 16.95, 26.97)],
)
def test_pipelining_hides_cuts_so_that_replicas_belong_together(
    micro_batches: int, together: float, apart: float
) -> None:
    """The replicas of a stage in one city; against every pipeline in one city, which is DT-FM's optimum."""
    costs = weights(WORLD, 8, cases.stages(), "pipelined", micro_batches)
    routes = (
        ("Oregon", "Virginia", "London", "Frankfurt", "Ireland", "Ohio", "Tokyo", "Seoul"),
        ("Seoul", "Tokyo", "Ohio", "Oregon", "Virginia", "Ireland", "London", "Frankfurt"),
    )
    assert min(evaluate(one_city_per_stage(*route), costs).total for route in routes) == pytest.approx(
        together, abs=5e-3
    )
    assert evaluate([[*group] for group in zip(*rows_of([8] * 8), strict=True)], costs).total == pytest.approx(
        apart, abs=5e-3
    )


def test_one_micro_batch_is_dtfm_and_none_at_a_time_is_the_pace() -> None:
    stages = [list(range(start, 64, 8)) for start in range(8)]
    one = evaluate(stages, weights(WORLD, 8, cases.stages(), "pipelined", 1))
    assert one == pytest.approx(evaluate(stages, weights(WORLD, 8, cases.stages(), "dtfm")))
    pace = evaluate(stages, weights(WORLD, 8, cases.stages(), "pipedream"))
    assert pace == Cost(one.data, pytest.approx(2 * cases.CUT_BYTES / 2.5e8))


def test_stages_and_cuts_may_differ() -> None:
    network = network_of_sites([("a", 6)], [[0.5]], [[10.0]])
    costs = weights(network, 2, (Block(0, 40, 100, 100), Block(0, 20, 10, 10), Block(0, 0, 0, 0)), "pipelined", 2)
    assert not costs.even
    # stage 0: 2 (0.5 + 40 / (2 · 10)); cuts 2 (0.5 + 100 / 20) and 2 (0.5 + 10 / 20), then 100 / 10 once more
    assert evaluate([[0, 1], [2, 3], [4, 5]], costs) == Cost(5.0, pytest.approx(11.0 + 2.0 + 10.0))
    assert group_cost([0, 1], costs.exchange[1]) == 3.0


def test_a_link_that_does_not_exist_is_infinitely_expensive() -> None:
    network = network_of_sites([("a", 2), ("b", 2)], [[0.5, None], [None, 0.5]], [[10.0, None], [None, 10.0]])
    costs = weights(network, 2, even_stages(2, 10.0, 10.0))
    assert evaluate([[0, 1], [2, 3]], costs).total == float("inf")
    assert evaluate([[0, 2], [1, 3]], costs).total == float("inf")


@pytest.mark.parametrize(
    ("model", "micro_batches", "message"),
    [("fast", 1, "'fast' is not known; use one of dtfm, pipelined, pipedream"), ("dtfm", 0, "num_micro_batches=0")],
)
def test_what_is_no_cost_is_refused(model: CostModel, micro_batches: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        weights(WORLD, 8, cases.stages(), model, micro_batches)


def test_nothing_but_measuring_needs_torch() -> None:
    names = "arrange, cost, matching, model, network, rate, search"
    program = f"import sys; from lightning_sdpipe.placement import {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
