"""What user code changes is put back, wherever it is found; what cannot be is named."""

from __future__ import annotations

import itertools
import queue
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_sdpipe.partition.mementos import Mementos

LEVEL = 0


class Meter:
    shared = 0
    __slots__ = ("__dict__", "array", "recent", "ticks")

    def __init__(self) -> None:
        self.array, self.generator, self.ordered = np.zeros(2), np.random.default_rng(0), OrderedDict(a=[1])
        self.recent, self.ticks = deque([1]), itertools.count()


def closure() -> tuple[Callable[[], int], list[int]]:
    seen, calls = [0], 0

    def count(more: list[int] = []) -> int:  # noqa: B006
        nonlocal calls
        global LEVEL
        calls, LEVEL = calls + 1, LEVEL + 1
        seen.append(calls)
        more.append(calls)
        return calls + LEVEL + len(more)

    return count, seen


def test_all_that_is_found_is_put_back() -> None:
    meter, (count, seen), generator = Meter(), closure(), torch.Generator()
    found = {"meters": (meter,), "hook": count, "generator": generator}

    def use() -> list[Any]:
        Meter.shared += 1
        meter.array += 1
        meter.ordered["a"].append(2)
        meter.ordered.setdefault("b", [])
        meter.recent = deque([*meter.recent, 2])
        drawn = [meter.generator.random(), float(torch.rand((), generator=generator)), next(meter.ticks)]
        return [count(), Meter.shared, *meter.array, *meter.ordered, *meter.recent, *drawn, *seen]

    mementos = Mementos(found)
    first = use()
    mementos.restore()
    assert use() == first
    mementos.restore()


@pytest.mark.parametrize("value", [(number for number in range(3)), queue.SimpleQueue()])
def test_what_cannot_be_put_back_is_named(value: Any) -> None:
    meter = Meter()
    meter.ticks = value
    assert Mementos(meter).lost == [f"ticks ({type(value).__name__})"]
