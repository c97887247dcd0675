"""Objects that a step makes and passes to its blocks, and batches that are objects."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe.errors import ConfigurationError
from tests.partition.cutting import Stepping, assert_equal_when_cut


class Cache:
    def __init__(self) -> None:
        self.layers: list[Tensor] = []

    def update(self, x: Tensor) -> Tensor:
        self.layers.append(x)
        return self.layers[-2] if len(self.layers) > 1 else x


class Output(OrderedDict[str, Any]):
    """Keeps its entries as attributes too, and refuses to be updated, as the outputs of transformers do."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        super().__setattr__(name, value)

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError


@dataclass(slots=True)
class Context:
    depth: int = 0
    cache: Cache = field(default_factory=Cache)
    names: set[str] = field(default_factory=set)
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=2))
    kinds: Counter[str] = field(default_factory=Counter)
    output: Output = field(default_factory=Output)
    more: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(scale=1.0))
    loss: Any = 0.0
    made: Any = None
    table: Any = None


class Block(nn.Linear):
    def forward(self, x: Tensor, context: Context) -> Any:
        context.depth += 1
        context.names.add(f"block {context.depth}")
        context.recent.append(context.depth)
        context.kinds["linear"] += context.depth
        context.more.scale = context.more.scale * 0.9
        x = super().forward(x) + context.cache.update(x) / (context.depth + len(context.names) + sum(context.recent))
        context.loss = context.loss + x.square().mean()
        context.made = context.depth, x.mean()
        context.output["sum"] = getattr(context.output, "sum", 0) + x
        context.output[f"state {context.depth}"] = len(context.output)
        return torch.tanh(x) * context.more.scale / context.kinds["linear"] + context.output["sum"]


class Returning(Block):
    def forward(self, x: Tensor, context: Context) -> Any:
        return super().forward(x, context), {"context": context}


class InArray(nn.Linear):
    def forward(self, x: Tensor, context: Context) -> Tensor:  # type: ignore[override]
        context.table[0] += 1
        return super().forward(x) * float(context.table[0])


def passing(model: Any, batch: Tensor) -> Tensor:
    context, x = Context(table=np.zeros(2)), batch
    for block in model:
        x = block(x, context)
    assert list(context.output)[1:] == [f"state {n}" for n in range(1, context.depth + 1)]
    x = x + getattr(context.output, "sum", 0)
    return x.sum() + context.loss + (0 if context.made is None else context.made[1] * context.made[0])


def returning(model: Any, batch: Tensor) -> Tensor:
    context, x = Context(), batch
    for block in model:
        x, returned = block(x, context)
        assert returned["context"] is context
    return x.sum() + returned["context"].loss


def blocks(kind: type[nn.Linear]) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(kind(4, 4) for _ in range(4))


class Layer:
    def __init__(self, whole: Whole) -> None:
        self.whole = whole


class Whole:
    """Its parts know it, and it has a set whose copy may be in another order."""

    def __init__(self) -> None:
        self.layers = [Layer(self) for _ in range(3)]
        self.seen: list[Tensor] = []
        self.known = set(map(Layer, [self] * 20))
        for one in list(self.known)[::2]:
            self.known.discard(one)


class Counting(nn.Linear):
    def forward(self, x: Tensor, whole: Whole, seen: list[Tensor]) -> Tensor:  # type: ignore[override]
        seen.append(x.mean())
        return super().forward(x) * len(whole.layers[0].whole.seen) / len(whole.known)


def in_circles(model: Any, batch: Tensor) -> Tensor:
    whole, x = Whole(), batch
    for block in model:
        x = block(x, whole, whole.seen)
    return x.sum() + sum(whole.seen)


@pytest.mark.parametrize("stages", [2, 4])
def test_what_is_reached_in_several_ways_changes_once(stages: int) -> None:
    assert_equal_when_cut(Stepping(blocks(Counting), in_circles), [torch.randn(3, 4), torch.randn(3, 4)], stages)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(("kind", "step"), [(Block, passing), (Returning, returning)])
def test_what_blocks_change_in_an_object_that_they_are_given(kind: Any, step: Any, stages: int) -> None:
    assert_equal_when_cut(Stepping(blocks(kind), step), [torch.randn(3, 4), torch.randn(3, 4)], stages)


def test_what_cannot_travel_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"Block 'model.0', .*, made a numpy.ndarray"):
        assert_equal_when_cut(Stepping(blocks(InArray), passing), [torch.randn(3, 4)] * 2, 2)


class Graph:
    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.edges = SimpleNamespace(index=torch.arange(len(x)).flip(0))


@dataclass(slots=True)
class Slotted:
    x: Tensor
    edges: Any


class Message(nn.Linear):
    def forward(self, x: Tensor, edges: Tensor) -> Tensor:  # type: ignore[override]
        return torch.tanh(super().forward(x + x[edges]))


def convolve(model: Any, graph: Any) -> Tensor:
    x = graph.x
    for block in model:
        x = block(x, graph.edges.index)
    return (x * graph.x).sum()


@pytest.mark.parametrize("kind", [Graph, lambda x: Slotted(x, Graph(x).edges)])
def test_tensors_in_a_batch_that_is_an_object_are_the_batchs(kind: Any) -> None:
    graphs = [kind(torch.randn(3, 4)), kind(torch.randn(5, 4))]
    cut = assert_equal_when_cut(Stepping(blocks(Message), convolve), graphs, 2)
    (values,) = cut.travel["training_step"].crossing.values()
    assert [(key.block, key.kind) for leaves in values for key in leaves] == [(1, "output")]
