"""The suite of seeing a run: what it judges, and small runs of what starts no processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from lightning_sdpipe.policies import Worker
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.simulate import Work, jittered, simulate
from recipes.suites import seeing
from recipes.suites.ratios import Row
from recipes.suites.seeing import named
from tests.recipes.composed import parameters_of
from tests.seeing.recordings import simulated

suite = partial(parameters_of, "seeing")
SLOW = Worker(1, 3)


def judged(policy: PolicyConfig, factor: float, slow: Worker = SLOW) -> Row:
    """Of a simulated run of 2 × 4."""
    steady = jittered(0.06, 0.05)

    def own(worker: Worker, number: int) -> float:
        return steady(worker, number) * (factor if worker == SLOW else 1.0)

    run = simulate(policy, Work(2, 4, 280, own, "1f1b", 2))
    return named.judged(named.together(simulated(run, own)), slow, 1.0 if factor == 1 else 2.0)


@pytest.mark.parametrize("policy", [SemiDecentralized(), AllReduceModels()], ids=lambda p: type(p).__name__)
def test_a_run_is_judged_by_whom_it_names_and_what_it_says_that_costs(policy: PolicyConfig) -> None:
    slow, none = judged(policy, 2.0), judged(policy, 1.0)
    assert (slow["right"], slow["accused"], slow["updates"]) == (True, False, named.WITHIN)
    assert (none["right"], none["accused"]) == (True, False)
    wrong = judged(policy, 2.0, slow=Worker(0, 0))
    assert not wrong["right"]
    rows = [
        {"what": "a", "shape": "2x4", "run": 0, "condition": condition} | row
        for condition, row in (("none", none), ("static2", slow), ("static1.5", slow), ("static1.2", wrong))
    ]
    found = named.ratios(rows)
    assert {key: ratio["value"] for key, ratio in found.items() if not key.startswith("cost")} == {
        "named/static1.5": 1.0,
        "named/static1.2": 0.0,
        "accused/none": 0.0,
    }
    assert 0.9 <= found["cost/static2"]["value"] <= 1.0


def test_a_goal_that_is_met_from_below_has_a_family_of_its_own() -> None:
    assert {"overhead", "accused"} <= seeing.LOWER_IS_BETTER
    assert not {"named", "cost", "throughput"} & seeing.LOWER_IS_BETTER


def test_what_starts_no_processes_measures() -> None:
    given: dict[str, Any] = {"overhead": {"updates": 200, "repeats": 1}, "simulated": {"runs": 10}}
    parameters = suite()
    parameters |= {"only": ["overhead", "simulated"]}
    parameters |= {name: parameters[name] | values for name, values in given.items()}
    rows, ratios = seeing.run(**parameters)
    assert [row["what"] for row in rows] == ["meter", "simulated"]
    assert ratios.keys() == {"overhead/2x2", "accused/simulated"}
    assert 0 < ratios["overhead/2x2"]["value"] < 0.1
    assert ratios["accused/simulated"]["value"] == 0.0
