from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.effects import Effect, EffectRecorder, hear_assignments, intercept, replay


class Block(nn.Module):
    """Does whatever ``act`` says, besides returning its input."""

    def __init__(self, act: Any = lambda *_: None) -> None:
        super().__init__()
        self.inner, self.act = nn.Identity(), act
        self.kept: list[Any] = []

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Tensor:
        self.act(self, x, *others, **named)
        y: Tensor = self.inner(x)
        return y


def effects_of(model: nn.Module, *args: Any, **kwargs: Any) -> list[Effect]:
    """What a call of ``model.block`` does besides its output."""
    stop = hear_assignments()
    try:
        block = model.get_submodule("block")
        output, effects = EffectRecorder("block", block).call(block, args, kwargs)
    finally:
        stop()
    assert effects[0] == Effect("output", (), output)
    return effects[1:]


def model(act: Any = lambda *_: None) -> nn.Module:
    made = nn.Module()
    made.block = Block(act)
    return made


X = torch.ones(2)


def test_attributes_that_were_set_are_seen_and_set_again() -> None:
    def act(self: Block, x: Tensor) -> None:
        self.loss, self.count, self.inner.seen = x, 3, {"x": x}

    made, other = model(act), model()
    effects = effects_of(made, X)
    assert [(e.kind, e.place) for e in effects] == [
        ("attribute", ("block", "loss")),
        ("attribute", ("block", "count")),
        ("attribute", ("block.inner", "seen")),
    ]
    assert replay([Effect("output", (), "out"), *effects], other, (X,), {}) == "out"
    assert (other.block.loss is X, other.block.count, other.block.inner.seen["x"] is X) == (True, 3, True)


def test_lists_and_dicts_that_were_changed_are_changed_alike() -> None:
    def act(self: Block, x: Tensor, values: list[Any], nested: Any, sums: dict[str, Any]) -> None:
        values.append(x)
        nested[1]["deep"].clear()
        sums["new"], sums["old"] = x, 5
        self.kept.append("kept")

    given: Any = [0], (1, {"deep": [1, 2]})
    arguments = copy.deepcopy(given)
    effects = effects_of(model(act), X, *given, sums={"old": 1, "same": 2})
    assert [(e.kind, e.place) for e in effects] == [
        ("extend", ("argument", 0, 1)),
        ("replace", ("argument", 0, 2, 1, "deep")),
        ("update", ("argument", 1, "sums")),
        ("extend", ("attribute", "block", "kept")),
    ]
    other, sums = model(), {"old": 1, "same": 2}
    replay([Effect("output", (), X), *effects], other, (X, *arguments), {"sums": sums})
    assert arguments == ([0, X], (1, {"deep": []}))
    assert sums == {"old": 5, "same": 2, "new": X}
    assert other.block.kept == ["kept"]


def test_hooks_are_called_as_they_were_and_may_change_what_later_ones_see() -> None:
    made, seen = model(), list[Any]()
    made.block.inner.register_forward_hook(lambda module, args, output: output + 1)
    made.block.inner.register_forward_hook(
        lambda module, args, kwargs, output: seen.append((args, kwargs, output)), with_kwargs=True
    )
    made.block.register_forward_hook(lambda module, args, output: seen.append((args, output)))
    effects = effects_of(made, X)
    assert [e.place for e in effects] == [("block.inner",), ("block",)]
    first = seen.copy()
    seen.clear()
    elsewhere = torch.zeros(2)
    replay([Effect("output", (), X), *effects], made, (elsewhere,), {})
    assert torch.equal(seen[0][2], first[0][2])
    assert seen[0][0][0] is X, "a module within the block gets the arguments that it got"
    assert seen[1][0][0] is elsewhere, "the block itself gets those of the stand-in"


def test_nothing_is_seen_where_nothing_happened() -> None:
    made = model(lambda self, x, values: None)
    made.block.cache = [1, 2]
    assert effects_of(made, X, [3]) == []
    made.block.cache = [4]  # another list: what it held before is no longer looked at
    assert effects_of(made, X, [3]) == []


def test_assignments_are_as_before_when_nobody_listens() -> None:
    original = nn.Module.__setattr__
    first, second = hear_assignments(), hear_assignments()
    first()
    assert nn.Module.__setattr__ is not original
    second()
    assert nn.Module.__setattr__ is original


class Counting(nn.Linear):
    """Has a way of its own to be called, as Hugging Face's checkpointing layers have."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) + 1


class Copying(nn.Linear):
    """Has a way of its own to be copied, as parametrized modules have."""

    def __deepcopy__(self, memo: Any) -> Copying:
        memo[id(self)] = made = Copying.__new__(Copying)
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made


@pytest.mark.parametrize("kind", [nn.Linear, Counting, Copying])
@pytest.mark.parametrize("compiled", [False, True])
def test_calls_are_intercepted_with_all_that_a_call_is(kind: type[nn.Linear], compiled: bool) -> None:
    block = kind(2, 2)
    if compiled:
        block.compile(backend="eager")
    block.register_forward_hook(lambda module, args, output: output * 2)
    expected, before, attributes = block(X), type(block).__call__, dict(vars(block))
    calls = []

    def call(original: Any, args: Any, kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    undo = intercept(block, call)
    if kind is not Counting:
        assert type(block) is kind, "by which user code sorts the weights of modules, and initialises them"
    assert torch.equal(block(X), expected)
    assert [args[0] is X for args in calls] == [True]
    with pytest.raises(ConfigurationError, match=f"A {kind.__name__} of the model was copied or pickled"):
        copy.deepcopy(block)
    undo()
    undo = intercept(block, call, copies=True)
    twin = copy.deepcopy(block)
    assert (type(twin), "__reduce_ex__" in vars(twin), len(calls)) == (kind, False, 1)
    with torch.no_grad():
        block.weight.zero_()
    assert torch.equal(twin(X), expected)
    with torch.no_grad():
        block.weight.copy_(twin.weight)
    undo()
    assert (type(block), type(block).__call__, vars(block)) == (kind, before, attributes)
    assert torch.equal(copy.deepcopy(block)(X), expected)
    assert len(calls) == 1
