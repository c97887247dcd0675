"""What the stages of one pipeline give to those of another cut is the whole of what these hold."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sdpipe.checkpoints.worker import Checkpoints
from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.partition.ownership import Ownership, assign_owners, keep_only
from lightning_sdpipe.topology.groups import ProcessGroups
from lightning_sdpipe.topology.mesh import OnePipeline
from lightning_sdpipe.worker.elastic.state_transfer import merged
from tests.checkpoints.test_whole import Reading

CUTS = [[5], [2, 3], [1, 1, 3], [3, 1, 1]]


def model() -> nn.Module:
    """The fourth block has the weight of the first, the second is normalised, the third has extra state, and the last
    one nothing."""
    torch.manual_seed(1)
    blocks = [nn.Linear(2, 2), nn.BatchNorm1d(2), Reading(), nn.Linear(2, 2), nn.Tanh()]
    blocks[3].weight = blocks[0].weight
    module = nn.Sequential(*blocks)
    module.register_parameter("scale", nn.Parameter(torch.ones(1)))
    module.register_buffer("count", torch.zeros(1))
    return module


def ownership(cut: list[int]) -> Ownership:
    spans = [range(sum(cut[:stage]), sum(cut[: stage + 1])) for stage in range(len(cut))]
    return assign_owners(model(), [str(block) for block in range(5)], spans)


def checkpoints_of(cut: list[int], whole: nn.Module, optimizer: Any) -> list[tuple[Checkpoints, dict[str, Any]]]:
    """Each stage's, and what it has of ``whole`` and its optimizer."""
    found = []
    for stage in range(len(cut)):
        module, owners, mesh = copy.deepcopy(whole), ownership(cut), OnePipeline.of(len(cut), 0, 1, alike=False)
        groups: Any = ProcessGroups(mesh, mesh.rank(stage, 0), None, None)  # type: ignore[arg-type]
        keep_only(module, owners, stage, torch.device("cpu"))
        own = torch.optim.Adam(module.parameters())
        checkpoints = Checkpoints(module, owners, groups, False)  # type: ignore[arg-type]
        checkpoints.take_part_of(own)
        checkpoints.load_optimizer(own, optimizer.state_dict())
        with checkpoints.of_this_stage():
            state = {"state_dict": checkpoints.module_state(), "optimizer_states": [checkpoints.optimizer_state(own)]}
        found.append((checkpoints, state | {"loops": stage, "elastic": {"updates": 3}}))
    return found


@pytest.mark.parametrize(("donor", "newcomer"), list(product(CUTS, CUTS)), ids=str)
def test_a_stage_gets_what_it_holds_from_the_donors_stages(donor: list[int], newcomer: list[int]) -> None:
    whole = model()
    optimizer = torch.optim.Adam(whole.parameters())
    whole(torch.randn(4, 2)).sum().backward()
    whole.scale.grad = torch.ones(1)  # type: ignore[union-attr]
    optimizer.step()
    gives, takes = (checkpoints_of(cut, whole, optimizer) for cut in (donor, newcomer))
    theirs = ownership(newcomer)
    for stage, (_, holds) in enumerate(takes):
        givers = ownership(donor).givers(theirs, stage)
        parts = [gives[j][0].given(gives[j][1], theirs, stage) | {"elastic": {"updates": 3}} for j in givers]
        found = merged(parts)
        torch.testing.assert_close(found["state_dict"], holds["state_dict"], rtol=0, atol=0)
        assert found["optimizer_states"][0]["param_groups"] == holds["optimizer_states"][0]["param_groups"]
        of_all = holds["optimizer_states"][0]["state"]
        torch.testing.assert_close(found["optimizer_states"][0]["state"], of_all, rtol=0, atol=0)
        assert found["loops"] == len(donor) - 1, "the last stage has what is no tensor"
        names = [name for part in parts for name, value in part["state_dict"].items() if value is not None]
        assert len(names) == len(set(names)), "everything comes once"


def test_parts_of_different_updates_are_no_state() -> None:
    parts = [{"elastic": {"updates": number}} for number in (3, 4)]
    with pytest.raises(WorkerFailedError, match=r"states after \[3, 4\] updates"):
        merged(parts)
