"""What the module's own hooks make of its state is what is saved, and what is loaded."""

from __future__ import annotations

import copy
import re
from datetime import timedelta
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe.checkpoints import whole
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.ownership import Ownership, assign_owners, keep_only
from lightning_sdpipe.topology.groups import ProcessGroups
from lightning_sdpipe.topology.mesh import Mesh
from tests.workers import run_workers

CPU = torch.device("cpu")
Halves = list[tuple[nn.Module, Ownership]]


class Counting(nn.Module):
    """Its extra state changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen: Any = {"batches": torch.zeros(1), "names": []}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class Reading(nn.Linear):
    """Its extra state is read from a buffer, and loaded into another."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.known = 0

    def get_extra_state(self) -> Any:
        return {"seen": int(self.seen)}

    def set_extra_state(self, state: Any) -> None:
        self.known = state["seen"]


def stages(module: nn.Module) -> Halves:
    """The module of each of two stages, which hold a block each."""
    spans = [range(1), range(1, 2)]
    halves = [(half, assign_owners(half, ["0", "1"], spans)) for half in (copy.deepcopy(module) for _ in spans)]
    for stage, (half, ownership) in enumerate(halves):
        keep_only(half, ownership, stage, CPU)
    return halves


def loaded(module: nn.Module, state: dict[str, Any], strict: bool) -> dict[str, Any]:
    """What two stages hold after they have loaded ``state``."""
    halves = stages(module)
    parts: dict[str, Any] = {}
    for stage, (half, ownership) in enumerate(halves):
        whole.load_module_state(half, state, strict)
        held = whole.held_module_state(half, ownership, stage)
        parts |= {name: value for name, value in held.items() if value is not None}
    return parts


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def rename(state: dict[str, Any], *_: Any) -> None:
    for name in list(state):
        if name.startswith("old."):
            state[name.removeprefix("old.")] = state.pop(name)


def unpack(state: dict[str, Any], *_: Any) -> None:
    state["0.weight"], state["1.weight"] = state.pop("weights").chunk(2)


@pytest.mark.parametrize("strict", [True, False])
def test_hooks_may_rename_what_is_loaded(strict: bool) -> None:
    saved, module = model(1).state_dict(), model(2)
    module.register_load_state_dict_pre_hook(lambda _, *arguments: rename(*arguments))
    found = loaded(module, {f"old.{name}": value for name, value in saved.items()}, strict)
    torch.testing.assert_close(found, dict(saved), rtol=0, atol=0)


def test_hooks_may_divide_what_is_loaded() -> None:
    saved, module = dict(model(1).state_dict()), model(2)
    module.register_load_state_dict_pre_hook(lambda _, *arguments: unpack(*arguments))
    packed = {name: value for name, value in saved.items() if "bias" in name}
    packed["weights"] = torch.cat([saved["0.weight"], saved["1.weight"]])
    torch.testing.assert_close(loaded(module, packed, True), saved, rtol=0, atol=0)


def test_what_does_not_fit_is_refused_unless_names_may_be_missing() -> None:
    saved = model(1).state_dict()
    del saved["0.weight"]
    for half, _ in stages(model(2)):
        with pytest.raises(ConfigurationError, match=r'does not fit Sequential.*\n.*"0\.weight".*\n?.*strict=False'):
            whole.load_module_state(half, saved, True)
    found = loaded(model(2), saved, False)
    assert torch.equal(found["1.weight"], saved["1.weight"])
    assert torch.equal(found["0.weight"], model(2).state_dict()["0.weight"])


def test_names_alone_leave_what_is_there() -> None:
    """A stage's checkpoint, as newcomers of an elastic run get it."""
    for stage, (half, ownership) in enumerate(stages(model(1))):
        state = whole.held_module_state(half, ownership, stage)
        newcomer, _ = stages(model(2))[stage]
        whole.load_module_state(newcomer, state, True)
        here = whole.held_module_state(newcomer, ownership, stage)
        torch.testing.assert_close(here, state, rtol=0, atol=0)


def test_extra_state_is_asked_of_the_stage_that_has_the_module() -> None:
    module: Any = nn.Sequential(Reading(), Reading())
    for number, part in enumerate(module, 1):
        part.seen.fill_(number)
    expected = module.state_dict()
    parts: dict[str, Any] = {}
    for stage, (half, ownership) in enumerate(stages(module)):
        whole.check_module_state(half, ownership, stage, True)
        held = whole.held_module_state(half, ownership, stage)
        parts |= {name: value for name, value in held.items() if value is not None}
        newcomer: Any = stages(nn.Sequential(Reading(), Reading()))[stage][0]
        whole.load_module_state(newcomer, held, True)
        assert [part.known for part in newcomer] == [stage + 1 if number == stage else 0 for number in range(2)]
        whole.load_module_state(newcomer, expected, True)
        assert [part.known for part in newcomer] == [1, 2], "as in one process"
    torch.testing.assert_close(parts, dict(expected), rtol=0, atol=0)


def _prefixed(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
    for name in list(state):
        state[f"model.{name}"] = state.pop(name)


def test_parts_of_renamed_state_are_those_that_a_stage_holds() -> None:
    module = model(1)
    module.register_state_dict_post_hook(_prefixed)
    expected = module.state_dict()
    parts: dict[str, Any] = {}
    for stage, (half, ownership) in enumerate(stages(module)):
        whole.check_module_state(half, ownership, stage, True)
        part = whole.part_of_module_state(half, ownership, stage)
        assert not parts.keys() & part.keys()
        parts |= part
    torch.testing.assert_close(parts, dict(expected), rtol=0, atol=0)


def _fused(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
    state["weights"] = torch.cat([state.pop("0.weight"), state.pop("1.weight")])


def _halved(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
    state["first"] = state.pop("0.weight").half()


@pytest.mark.parametrize("hook", [_fused, _halved])
def test_what_hooks_compute_from_other_stages_is_refused(hook: Any) -> None:
    module = model(1)
    module.register_state_dict_post_hook(hook)
    half, ownership = stages(module)[1]
    with pytest.raises(ConfigurationError, match="stage"):
        whole.check_module_state(half, ownership, 1, False)


def test_extra_state_that_cannot_be_sent_is_refused() -> None:
    module = nn.Sequential(Counting(), Counting())
    module[0].seen = object()
    (first, ownership), (last, _) = stages(module)
    with pytest.raises(
        ConfigurationError, match=r"'0\._extra_state' in the state_dict is a object, which cannot be sent"
    ):
        whole.check_module_state(first, ownership, 0, True)
    whole.check_module_state(first, ownership, 0, False)
    whole.check_module_state(last, ownership, 1, False)


def _gather(rank: int, prefixed: bool) -> dict[str, Any]:
    groups = ProcessGroups.open(Mesh.build(2, 2), timedelta(seconds=10))
    torch.manual_seed(0)
    module = nn.Sequential(Counting(), Counting())
    if prefixed:
        module.register_state_dict_post_hook(_prefixed)
    stage = groups.mesh.locate(rank)[0]
    half, ownership = stages(module)[stage]
    own: Any = half[stage]
    own.seen["batches"] += 1 + stage
    own.seen["names"].append(f"stage {stage}")
    state = whole.gather_module_state(half, ownership, groups)
    optimizer = torch.optim.SGD(half.parameters(), 0.1)
    parts = whole.OptimizerParts(optimizer, half, ownership, stage)
    for place, parameter in parts.places.items():
        optimizer.state[parameter] = _kept(place, torch.zeros_like(parameter))
    cast(Any, optimizer.state)["rounds"] = 7
    gathered = parts.gather(groups)
    return {**state, "optimizer": gathered} if rank == 0 else {}


def _kept(place: int, like: Tensor) -> dict[Any, Any]:
    """What optimizers keep for a parameter: also in lists, tuples and dicts, by numbers, and empty."""
    return {
        "scale": np.float64(place),
        "step": torch.tensor(float(place)),
        "mean": like + place,
        "factors": [like + place, like[:1]],
        "shape": (2, "float32"),
        3: {0: like, "clipped": None},
        "index": torch.arange(place, dtype=torch.int16),
    }


@pytest.mark.distributed
@pytest.mark.parametrize("prefixed", [False, True])
def test_everything_comes_from_where_it_changes(prefixed: bool) -> None:
    state, _ = run_workers(2, _gather, prefixed)
    prefix = "model." if prefixed else ""
    torch.manual_seed(0)
    expected = nn.Sequential(Counting(), Counting())
    for name, value in expected.state_dict().items():
        if isinstance(value, Tensor):
            assert torch.equal(state[prefix + name], value)
    optimizer = torch.optim.SGD(expected.parameters(), 0.1)
    for place, parameter in enumerate(expected.parameters()):
        optimizer.state[parameter] = _kept(place, torch.zeros_like(parameter))
    cast(Any, optimizer.state)["rounds"] = 7
    found, saved = state["optimizer"], optimizer.state_dict()
    assert found["param_groups"] == saved["param_groups"]
    without_numpy = re.compile(r"np\.float64\((.*?)\)")  # a number that was sent is one of Python
    assert without_numpy.sub(r"\1", str(found["state"])) == without_numpy.sub(r"\1", str(saved["state"]))
    extra = [state[f"{prefix}{stage}._extra_state"] for stage in range(2)]
    assert [(int(each["batches"]), each["names"]) for each in extra] == [(1, ["stage 0"]), (2, ["stage 1"])]
