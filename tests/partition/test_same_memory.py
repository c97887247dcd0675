"""Weights that are different objects over the same memory stay one memory, and what cannot is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_sdpipe import AllReduce, SDPipeStrategy
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.buckets import flatten
from lightning_sdpipe.partition.materialise import Initialisation, materialise
from lightning_sdpipe.partition.ownership import assign_owners, keep_only
from lightning_sdpipe.partition.same_memory import held_together, same_memory
from tests.features.running import Regression, assert_same
from tests.strategy.test_strategy import fit

CPU = torch.device("cpu")


def chain() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


def tied_by_data() -> nn.Sequential:
    module = chain()
    module[3].weight.data = module[0].weight.data
    return module


def test_equal_memory_has_equal_owners_also_on_meta_and_in_the_next_run() -> None:
    spans = [range(0, 1), range(1, 3), range(3, 4)]
    with torch.device("meta"):
        on_meta = tied_by_data()
    for module, device in ((tied_by_data(), CPU), (on_meta, torch.device("meta"))):
        for _ in range(2):  # the second time, of what the worker of stage 1 has kept
            ownership = assign_owners(module, ["0", "1", "2", "3"], spans)
            assert ownership.memory.parameters == [("0.weight", "3.weight")]
            assert ownership.stages["0.weight"] == ownership.stages["3.weight"] == (0, 2)
            assert ownership.stages["3.bias"] == (2,)
            keep_only(module, ownership, 1, device)


def test_disjoint_views_of_one_memory_are_separate() -> None:
    module, matrix = chain(), torch.randn(4, 8)
    module[0].weight.data, module[1].weight.data = matrix[:, :4], matrix[:, 4:]
    module[0].bias.data, module[1].bias.data = torch.arange(8.0).split(4)
    module.register_parameter("nothing", nn.Parameter(torch.zeros(0)))
    assert same_memory(module).parameters == []


def part(module: nn.Sequential) -> None:
    module[1].weight.data = module[0].weight.data[:2]


def transposed(module: nn.Sequential) -> None:
    module[1].weight.data = module[0].weight.data.t()


def flat(module: nn.Sequential) -> None:
    whole = nn.Parameter(torch.zeros(20))
    module.register_parameter("whole", whole)
    module[1].weight.data, module[1].bias.data = whole.data[:16].view(4, 4), whole.data[16:]


def other_type(module: nn.Sequential) -> None:
    module[1].weight = nn.Parameter(module[0].weight.data.view(torch.int32), requires_grad=False)


def buffer(module: nn.Sequential) -> None:
    module.register_buffer("table", module[0].weight.data)


def view_in_attribute(module: nn.Sequential) -> None:
    module[2].first = {"row": module[1].weight.detach()[0]}


def alias_with_gradient(module: nn.Sequential) -> None:
    module[2].alias = module[1].weight.view(4, 4)


@pytest.mark.parametrize(
    ("overlap", "names"),
    [
        (part, "'0.weight' and parameter '1.weight'"),
        (transposed, "'0.weight' and parameter '1.weight'"),
        (flat, "'whole' and parameter '1.weight'"),
        (other_type, "'0.weight' and parameter '1.weight'"),
        (buffer, "'0.weight' and buffer 'table'"),
        (view_in_attribute, "'1.weight' and a tensor in an attribute of '2'"),
        (alias_with_gradient, "'1.weight' and a tensor in an attribute of '2'"),
    ],
)
def test_other_overlaps_are_refused(overlap: Callable[[nn.Sequential], None], names: str) -> None:
    module = chain()
    overlap(module)
    with pytest.raises(ConfigurationError, match=f"Parameter {names} overlap in memory"):
        same_memory(module)


def test_a_frozen_parameter_over_memory_that_trains_is_averaged_with_it() -> None:
    module = tied_by_data()
    module[0].requires_grad_(False)
    module[1].table = module[2].weight.detach()
    together = held_together(module, same_memory(module))
    for _ in range(2):
        frozen, trained = sorted(flatten(module.parameters(), together), key=lambda bucket: bucket.trains)
        assert (frozen.buffer.numel(), trained.buffer.numel()) == (4, 3 * 20)
        assert trained.all_parameters[0] is module[3].weight
    with torch.no_grad():
        module[0].weight.fill_(7)
        module[2].weight.fill_(8)
    assert (module[3].weight == 7).all()
    assert (module[1].table == 8).all()
    trained.check()
    module[0].weight.data = module[0].weight.data.clone()
    with pytest.raises(RuntimeError, match="was given other memory"):
        trained.check()


def test_ties_on_meta_get_one_memory() -> None:
    initialisation = Initialisation()
    with initialisation.recording(), torch.device("meta"):
        module = tied_by_data()
    ownership = assign_owners(module, ["0", "1", "2", "3"], [range(0, 2), range(2, 4)])
    materialise(module, ownership, 1, initialisation)
    keep_only(module, ownership, 1, CPU)
    flatten([p for p in module.parameters() if not p.is_meta], held_together(module, ownership.memory))
    assert module[0].weight.data_ptr() == module[3].weight.data_ptr()
    assert module[0].weight is not module[3].weight


class TiedByData(Regression):
    """Each of the two has moments of its own, and decays: another step than that of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 1))
        self.net[2].weight.data = self.net[0].weight.data

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.5)


@pytest.mark.distributed
def test_weights_tied_by_data_train_as_in_one_process(tmp_path: Path) -> None:
    _, expected = fit(tmp_path / "one", "auto", 1, 8, TiedByData())
    strategy = SDPipeStrategy(num_stages=2, sync=AllReduce(), start_method="fork")
    _, model = fit(tmp_path / "four", strategy, 4, 4, TiedByData())
    assert_same([model.state_dict()], expected.state_dict())
    assert model.net[0].weight.data_ptr() == model.net[2].weight.data_ptr()
    assert model.net[0].weight is not model.net[2].weight
