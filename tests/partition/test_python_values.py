"""Values of Python as text and back."""

from __future__ import annotations

import json
import random
from collections import deque
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

from lightning_sdpipe.partition.python_values import LARGEST, NotPackedError, pack, unpack

CPU = torch.device("cpu")


class Phase(Enum):
    COLD = 0
    WARM = 1


def there_and_back(value: Any, now: Any) -> Any:
    return unpack(json.loads(json.dumps(pack(value))), now, CPU)


@pytest.mark.parametrize(
    "value",
    [None, True, 3, float("inf"), "a", (1, (2.5, None)), {1, "b"}, {"a": [1], 2: {"b": ()}}, deque([1, 2]), 2**100],
)
def test_plain_values_come_back(value: Any) -> None:
    back = there_and_back(value, None)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_tensors_come_back_into_those_that_are_there(dtype: torch.dtype) -> None:
    value = torch.randn(2, 3).to(dtype)
    now = torch.zeros(2, 3, dtype=dtype)
    assert there_and_back(value, now) is now
    assert torch.equal(now, value)
    assert torch.equal(there_and_back(value.t(), now), value.t())  # of another shape
    assert there_and_back(torch.empty(0, 2, dtype=dtype), None).shape == (0, 2)
    assert there_and_back(value[0, 0].requires_grad_(dtype == torch.float32), None).shape == ()


def test_who_holds_a_container_sees_the_change() -> None:
    now: dict[str, Any] = {"a": [1, 2], "gone": 1, "t": torch.zeros(2), "n": np.zeros(2)}
    inner, tensor, array = now["a"], now["t"], now["n"]
    assert there_and_back({"a": [3], "t": torch.ones(2), "n": np.ones(2)}, now) is now
    assert now.keys() == {"a", "t", "n"}
    assert now["n"] is array
    assert array.tolist() == [1, 1]
    assert now["a"] is inner
    assert inner == [3]
    assert now["t"] is tensor
    assert torch.equal(tensor, torch.ones(2))
    bounded = deque([1, 2, 3], maxlen=3)
    assert there_and_back(deque([2, 3, 4]), bounded).maxlen == 3


def test_arrays_and_members_come_back() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3).T
    assert np.array_equal(there_and_back(array, None), array)
    assert there_and_back(np.float32(0.5), 1.0) == np.float32(0.5)
    assert there_and_back(Phase.WARM, Phase.COLD) is Phase.WARM
    with pytest.raises(NotPackedError, match="in the place of a str"):
        there_and_back(Phase.WARM, "cold")


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand((), generator=g).item()),
        (lambda: np.random.default_rng(3), lambda g: g.random()),
        (lambda: np.random.Generator(np.random.MT19937(3)), lambda g: g.random()),
        (lambda: np.random.RandomState(3), lambda g: g.rand()),
        (lambda: random.Random(3), lambda g: g.random()),
    ],
)
def test_generators_go_on_where_the_other_is(make: Any, draw: Any) -> None:
    ahead, behind = make(), make()
    for _ in range(3):
        draw(ahead)
    assert there_and_back({"g": ahead}, {"g": behind})["g"] is behind
    assert draw(behind) == draw(ahead)


@pytest.mark.parametrize("value", [object(), [print], 1j, torch.zeros(LARGEST), [np.zeros(LARGEST // 8)] * 2])
def test_what_does_not_travel(value: Any) -> None:
    with pytest.raises(NotPackedError):
        pack(value)
