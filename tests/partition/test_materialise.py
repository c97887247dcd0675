"""What a rank holds of a model that was built on meta has the values of a whole initialisation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.materialise import Initialisation, materialise
from lightning_sdpipe.partition.ownership import Ownership, assign_owners
from lightning_sdpipe.partition.plan import plan
from tests.partition.families import FAMILIES


class Initialised(nn.Module):
    """Every way of initialising that the others do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Conv1d(6, 4, 3), nn.LSTM(4, 4), nn.Linear(6, 6)])
        nn.init.orthogonal_(self.layers[0].weight)
        nn.init.trunc_normal_(self.layers[1].weight, std=0.02)
        nn.init.trunc_normal_(self.layers[1].bias, mean=3, a=1.5)
        nn.init.sparse_(self.layers[2].weight_hh_l0, 0.5)
        self.layers.apply(self.scale)
        self.layers[3].weight = self.layers[0].weight
        self.register_buffer("table", torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.register_buffer("mask", torch.ones(4, 4).tril() * torch.arange(4))
        self.order = nn.Parameter(torch.randperm(9).float())
        self.brain = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        with torch.no_grad():
            self.layers[3].bias.copy_(self.layers[0].bias * 2)
            self.layers[1].bias[1:3] = self.table[0]

    @staticmethod
    def scale(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.uniform_(module.bias, -3, 3)


def build(name: str) -> nn.Module:
    return Initialised() if name == "initialised" else FAMILIES[name]()[0]


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}


@pytest.mark.parametrize("name", ["initialised", *FAMILIES])
def test_each_stage_gets_the_values_of_one_process(name: str) -> None:
    torch.manual_seed(7)
    whole = build(name)
    following = torch.randn(3)
    expected = tensors(whole)
    for stage in range(3):
        torch.manual_seed(7)
        initialisation = Initialisation()
        with initialisation.recording(), torch.device("meta"):
            model = build(name)
        torch.rand(5)  # whatever happens before the model is cut
        made = plan(model, 3)
        ownership = assign_owners(model, made.chain, made.module_spans)
        materialise(model, ownership, stage, initialisation)
        assert torch.equal(torch.randn(3), following)
        found = tensors(model)
        assert found.keys() == expected.keys()
        for key, value in found.items():
            if stage in ownership.stages[key]:
                assert torch.equal(value, expected[key]), key
                assert value.requires_grad == expected[key].requires_grad
                assert value.stride() == expected[key].stride()
            else:
                assert value.device.type == "meta", key
    names = dict(model.named_parameters(remove_duplicate=False))
    tied = [(a, b) for a in names for b in names if whole.get_parameter(a) is whole.get_parameter(b)]
    assert all(names[a] is names[b] for a, b in tied)


class LiveBytes(TorchDispatchMode):
    """The largest number of bytes that were alive at once in CPU tensors made within the context."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outcome = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outcome):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return outcome


def test_a_rank_never_holds_more_than_its_part_and_one_tensor() -> None:
    initialisation = Initialisation()
    with LiveBytes() as building, initialisation.recording(), torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(16)])
    made = plan(model, 4)
    with LiveBytes() as replaying:
        materialise(model, assign_owners(model, made.chain, made.module_spans), 2, initialisation)
    layer = 4 * (64 * 64 + 64)
    assert building.peak == 0
    assert 4 * layer <= replaying.peak <= 5 * layer


def test_a_model_that_was_put_on_meta_elsewhere_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    ownership = Ownership({"weight": (0,), "bias": (1,)})
    with pytest.raises(ConfigurationError, match=r"1 parameters and buffers of Linear.*in configure_model"):
        materialise(model, ownership, 0, Initialisation())
    materialise(model, Ownership({"weight": (1,), "bias": (1,)}), 0, Initialisation())


def test_who_holds_a_parameter_has_the_one_that_trains() -> None:
    initialisation = Initialisation()
    with initialisation.recording(), torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    held = list(model.parameters())  # as for an optimizer's groups
    materialise(model, assign_owners(model, ["0", "1"], [range(2)]), 0, initialisation)
    assert all(parameter is mine for parameter, mine in zip(model.parameters(), held, strict=True))
    assert all(isinstance(parameter, nn.Parameter) and parameter.is_cpu for parameter in held)
