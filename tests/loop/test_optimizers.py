"""All stages number the parameters of an optimizer alike, whatever order their processes have made of sets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_sdpipe import p2p
from lightning_sdpipe.checkpoints.whole import OptimizerParts
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.loop.optimizers import agree_on_groups
from lightning_sdpipe.partition.ownership import assign_owners
from lightning_sdpipe.pipeline.digest import options_of

RANK_ZERO = [["0.weight", "1.bias"], ["1.weight", "0.bias"]]


@pytest.fixture(autouse=True)
def rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p, "broadcast_value", lambda value, source, group: RANK_ZERO)


class Groups:
    rank, world = 1, None


def optimizer_of(module: nn.Module, groups: list[list[str]]) -> torch.optim.Adam:
    return torch.optim.Adam([{"params": [module.get_parameter(name) for name in names]} for names in groups])


def names_in(optimizer: torch.optim.Optimizer, module: nn.Module) -> list[list[str]]:
    names = {id(p): name for name, p in module.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def agree(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    groups: Any = Groups
    agree_on_groups(optimizer, module, groups)


def test_they_take_rank_zeros_order() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = optimizer_of(module, [["1.bias", "0.weight"], ["1.weight", "0.bias"]])
    agree(optimizer, module)
    assert names_in(optimizer, module) == RANK_ZERO


@pytest.mark.parametrize(
    ("groups", "what"),
    [
        ([["0.weight", "1.bias", "0.bias"], ["1.weight"]], "group 0 has '0.bias' here only"),
        ([["0.weight", "1.bias"]], "group 1 has '1.weight' there only"),
        ([["0.weight", "1.bias"], ["1.weight"]], "group 1 has '0.bias' there only"),
    ],
)
def test_other_groups_are_refused(groups: list[list[str]], what: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match=f"different parameter groups on rank 1 and on rank 0: {what}"):
        agree(optimizer_of(module, groups), module)


def test_a_parameter_that_the_module_does_not_have_counts_by_its_number() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = optimizer_of(module, RANK_ZERO)
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(1)))
    with pytest.raises(ConfigurationError, match="group 0 has 'a parameter that the module does not have' here only"):
        agree(optimizer, module)


def test_a_parameter_that_no_stage_owns_is_refused() -> None:
    """Its gradient would be lost between the pipeline's backward and Lightning's."""
    module = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    OptimizerParts(optimizer, module, assign_owners(module, ["0"], [range(1)]), 0)
    with pytest.raises(ConfigurationError, match=r"a parameter of shape \(3,\) that the module does not have"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def test_a_newcomer_may_number_them_in_another_order_than_its_donor() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ownership = assign_owners(module, ["0", "1"], [range(2)])
    donors, newcomers = RANK_ZERO, [names[::-1] for names in RANK_ZERO]
    donor, newcomer = optimizer_of(module, donors), optimizer_of(module, newcomers)
    for number, parameter in enumerate(module.parameters()):
        donor.state[parameter] = {"step": torch.tensor(float(number))}
    parts = OptimizerParts(newcomer, module, ownership, 0)
    parts.load(OptimizerParts(donor, module, ownership, 0).held())
    assert [newcomer.state[parameter]["step"] for parameter in module.parameters()] == [0, 1, 2, 3]
    assert names_in(newcomer, module) == newcomers


def test_options_are_those_that_the_optimizer_was_made_with() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    optimizer.param_groups[0]["own_counter"] = 3
    (options,) = options_of([optimizer])
    assert (options["lr"], options["momentum"]) == (0.1, 0.9)
    assert not {"params", "own_counter"} & options.keys()
