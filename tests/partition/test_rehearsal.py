"""Rehearsals see blocks in their order, and other processes do not hear of them."""

from __future__ import annotations

import random
import resource
from collections import deque

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.apart import apart
from lightning_sdpipe.partition.provenance import StepTrace
from lightning_sdpipe.partition.rehearsal import Alone, StepCalls, rehearse
from lightning_sdpipe.partition.rehearsal_result import RehearsalResult
from lightning_sdpipe.partition.state_watch import in_a_child


class Busy(nn.Module):
    """Changes everything that a step can change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)])
        self.teacher = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("counter", torch.zeros(()))
        self.steps, self.history, self.recent = 0, [1, [2]], deque([3], maxlen=2)
        self.names = {"a": {"b"}}
        self.metric = MeanMetric()
        self.tensor = torch.zeros(2)
        self.dropout = nn.Dropout(0.5)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.steps += 1
        self.history[1].append(self.steps)  # type: ignore[union-attr]
        self.recent.append(4)
        self.names["a"].add("c")
        self.late = batch
        self.counter += 1
        self.tensor.add_(1)
        with torch.no_grad():
            self.teacher.weight.mul_(0.5).add_(self.layers[0].weight)
        self.metric.update(batch)
        self.train(not self.training)
        if not self.layers[0]._forward_hooks:
            self.layers[0].register_forward_hook(lambda *_: None)
        for layer in self.layers:
            batch = self.dropout(layer(batch + random.random() + float(np.random.rand())))
        return batch.square().mean()


def test_a_step_that_changes_everything_is_rehearsed() -> None:
    torch.manual_seed(0)
    module = Busy()
    draws = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    calls = [(torch.randn(4, 2, generator=torch.Generator().manual_seed(i)), (0,)) for i in range(2)]
    chain = ["layers.0", "layers.1", "layers.2"]
    found = rehearse(module, chain, [StepCalls("training_step", calls, True)], torch.device("cpu"))
    assert found.order == [0, 1, 2]
    assert all(each.training for each in module.modules())
    assert torch.equal(torch.get_rng_state(), draws[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == draws[1:]


class Talkative(Busy):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        dist.all_reduce(batch)
        return super().training_step(batch, batch_idx)


def test_other_processes_are_not_called() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        calls = [(torch.ones(4, 2), (0,))]
        with pytest.raises(RuntimeError, match="communicates with other processes"):
            rehearse(Talkative(), ["layers.0"], [StepCalls("training_step", calls, True)], torch.device("cpu"))
    finally:
        dist.destroy_process_group()


class Dropping(nn.Module):
    """Layers are left out in calls of these numbers; the norm is listed behind them and runs before."""

    def __init__(self, dropped: dict[int, set[int]]) -> None:
        super().__init__()
        self.dropped, self.calls = dropped, 0
        self.embed = nn.Linear(2, 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.norm = nn.LayerNorm(2)
        self.other = nn.Linear(2, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.norm(self.embed(batch))
        for number, layer in enumerate(self.layers):
            if self.calls not in self.dropped.get(number, set()):
                x = layer(x)
        self.calls += 1
        return x.sum()


CHAIN = ["embed", "layers.0", "layers.1", "layers.2", "norm"]
CALLS = [(torch.ones(2, 2), (0,))] * 2


@pytest.mark.parametrize("number", range(3))
def test_a_block_that_was_skipped_by_chance_is_waited_for(number: int) -> None:
    module = Dropping({number: {0, 1, 2, 3, 4}})
    found = rehearse(module, CHAIN, [StepCalls("training_step", CALLS, True)], torch.device("cpu"))
    assert [CHAIN[block] for block in found.order] == ["embed", "norm", "layers.0", "layers.1", "layers.2"]
    assert 1 + number in found.traces["training_step"][5].order


@pytest.mark.parametrize("number", range(3))
def test_a_block_that_never_runs_stays_in_its_list(number: int) -> None:
    module = Dropping({number: set(range(100))})
    found = rehearse(module, CHAIN, [StepCalls("training_step", CALLS, True)], torch.device("cpu"))
    assert [CHAIN[block] for block in found.order] == ["embed", "norm", "layers.0", "layers.1", "layers.2"]
    assert len(found.traces["training_step"]) == 8


class Table(nn.Module):
    """The weights of two modules are used, and the modules are not called: queries, and a tied projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.queries = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 5, bias=False)
        self.head.weight = self.embed.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch) + self.queries.weight
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(x, self.embed.weight).sum()


def test_a_block_whose_weight_alone_is_used_is_not_waited_for() -> None:
    calls = [(torch.tensor([[0, 1, 2, 3]]), (0,))] * 2
    chain = ["embed", "layers.0", "layers.1", "queries", "head"]
    found = rehearse(Table(), chain, [StepCalls("training_step", calls, True)], torch.device("cpu"))
    assert len(found.traces["training_step"]) == 2


class Scattering(nn.Module):
    """Frees a large tensor, each a bit larger than the last, after making many small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            batch.new_zeros(8_000_000)  # from now on, malloc keeps such memory in the heap
            for number in range(150):
                large = batch.new_zeros(500_000 + 4_000 * number)
                small = [batch + 1 for _ in range(20)]
                del large, small
        return self.layer(batch).sum()  # type: ignore[no-any-return]


def test_memory_that_the_step_frees_is_free_again() -> None:
    def grown() -> bytes:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        rehearse(Scattering(), ["layer"], [StepCalls("training_step", CALLS, True)], torch.device("cpu"))
        return str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before).encode()

    step = (8_000_000 * 4) >> 10  # KiB
    assert int(apart(grown, 60)) < 3 * step


def test_who_is_in_no_list_stays_behind_whom_it_is_listed_behind() -> None:
    module = Dropping({})
    found = rehearse(module, ["other", *CHAIN], [StepCalls("training_step", CALLS, True)], torch.device("cpu"))
    assert found.order == [0, 1, 5, 2, 3, 4]


def ordered(*orders: list[int]) -> RehearsalResult:
    return RehearsalResult(list("abcd"), {"training_step": [StepTrace(order=order) for order in orders]}, {})


def test_the_order_is_that_of_the_list_where_steps_leave_a_choice() -> None:
    assert ordered([3, 0], [2, 0, 1]).order == [2, 3, 0, 1]


def test_blocks_that_change_places_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"blocks \['[abc]', '[abc]', '[abc]'\] do not run in the same order"):
        _ = ordered([3, 0, 1], [1, 2], [2, 0]).order


class Evaluated(nn.Module):
    """Its evaluations call blocks again, or in another order than training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def training_step(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()

    def validation_step(self, x: Tensor) -> Tensor:
        return self.training_step(x) + self.training_step(x)

    def test_step(self, x: Tensor) -> Tensor:
        first, second, third = self.layers
        x = third(first(second(x)))
        return x.sum()

    def predict_step(self, x: Tensor) -> Tensor:
        x = self.layers[2](self.layers[0](x))
        return x


@pytest.mark.parametrize("watch_in", [in_a_child, None])
def test_evaluations_that_no_pipeline_runs_are_told_from_others(watch_in: Alone | None) -> None:
    names = ("training_step", "validation_step", "test_step", "predict_step")
    calls = [(torch.randn(2, 2), ())] * 2
    steps = [StepCalls(name, calls, name == "training_step") for name in names]
    found = rehearse(Evaluated(), [f"layers.{n}" for n in range(3)], steps, torch.device("cpu"), watch_in)
    assert found.lock_step == {"validation_step": 4, "test_step": 3}
    assert list(found.traces) == ["training_step", "predict_step"]
    assert found.order == [0, 1, 2]
    assert not found.repeated
