"""The costs of DT-FM's cases, and the better model beside them."""

from __future__ import annotations

import pytest

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.placement.cost import CostModel
from lightning_sdpipe.placement.model import Block
from recipes.baselines import dtfm_cases as cases
from recipes.baselines.dtfm_cost import Cost, evaluate, group_cost, weights
from tests.placement.sites import network_of_sites

WORLD = cases.case(5)


def test_links_cost_what_the_published_code_computes() -> None:
    costs = weights(WORLD, 8, cases.stages(), "dtfm")
    tokyo, seoul = ([str(device) for device in WORLD.devices].index(each) for each in ("Tokyo:0", "Seoul:0"))
    assert costs.exchange[0][0][1] == pytest.approx(0.66, abs=1e-6)
    assert costs.step[0][0][1] == pytest.approx(3.779994, abs=1e-6)
    assert costs.exchange[0][tokyo][seoul] == pytest.approx(1.249818, abs=1e-6)
    assert costs.step[0][tokyo][seoul] == pytest.approx(6.922534, abs=1e-6)
    assert costs.even


def test_stages_and_cuts_may_differ() -> None:
    network = network_of_sites([("a", 6)], [[0.5]], [[10.0]])
    costs = weights(network, 2, (Block(0, 40, 100, 100), Block(0, 20, 10, 10), Block(0, 0, 0, 0)), "pipelined", 2)
    assert not costs.even
    # stage 0: 2 (0.5 + 40 / (2 · 10)); cuts 2 (0.5 + 100 / 20) and 2 (0.5 + 10 / 20), then 100 / 10 once more
    assert evaluate([[0, 1], [2, 3], [4, 5]], costs) == Cost(5.0, pytest.approx(11.0 + 2.0 + 10.0))
    assert group_cost([0, 1], costs.exchange[1]) == 3.0


@pytest.mark.parametrize(
    ("model", "micro_batches", "message"),
    [("fast", 1, "'fast' is not known; use one of dtfm, pipelined, pipedream"), ("dtfm", 0, "num_micro_batches=0")],
)
def test_what_is_no_cost_is_refused(model: CostModel, micro_batches: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        weights(WORLD, 8, cases.stages(), model, micro_batches)
