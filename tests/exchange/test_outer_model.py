from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.outer_model import Fragments, Nesterov, OuterModel, OuterOptimizer
from lightning_sdpipe.exchange.payloads import Full


def test_it_is_the_nesterov_of_torch() -> None:
    start = torch.randn(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outer, param = OuterOptimizer(Nesterov(0.5, 0.8), start), nn.Parameter(start.clone())
    sgd = torch.optim.SGD([param], lr=0.5, momentum=0.8, nesterov=True)
    for seed in range(5):
        moved = torch.randn(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        outer.step(moved)
        param.grad = -moved
        sgd.step()
        torch.testing.assert_close(outer.base, param.detach())


def test_without_momentum_and_with_a_rate_of_one_it_is_the_mean() -> None:
    start, mean = (torch.randn(50, generator=torch.Generator().manual_seed(s)) for s in range(2))
    outer = OuterOptimizer(Nesterov(1.0, 0.0), start)
    outer.step(mean - start)
    torch.testing.assert_close(outer.base, mean)
    assert outer.momentum is None


def test_one_fragment_without_delay_is_diloco() -> None:
    schedule = Fragments(3)
    assert [schedule.begin(k) for k in range(7)] == [[], [], [], [0], [], [], [0]]
    assert [schedule.end(k) for k in range(7)] == [schedule.begin(k) for k in range(7)]


def test_fragments_take_turns_and_arrive_late() -> None:
    schedule = Fragments(6, 3, delay=1, mix=0.25)
    assert [schedule.begin(k) for k in range(1, 10)] == [[], [0], [], [1], [], [2], [], [0], []]
    assert [schedule.end(k) for k in range(1, 10)] == [[], [], [0], [], [1], [], [2], [], [0]]


def test_a_worker_keeps_a_share_of_its_own_fragment() -> None:
    model, x = OuterModel(Full(), 0, Nesterov(), mix=0.25), torch.tensor([4.0])
    model.begin([torch.tensor([8.0])])
    model.take_over(x, 0)
    assert float(x) == 7.0


@given(st.data())
def test_each_fragment_has_a_round_in_any_period_and_ends_it_before_the_next(data: st.DataObject) -> None:
    every = data.draw(st.integers(1, 30))
    schedule = Fragments(every, data.draw(st.integers(1, every)), data.draw(st.integers(0, every - 1)))
    start = every + data.draw(st.integers(0, 50))
    begun = [k for updates in range(start, start + every) for k in schedule.begin(updates)]
    assert sorted(begun) == list(range(schedule.fragments))
    under_way: set[int] = set()
    for updates in range(1, 4 * every):
        begin, end = schedule.begin(updates), schedule.end(updates)
        assert not under_way & set(begin)
        under_way |= set(begin)
        assert under_way >= set(end)
        under_way -= set(end)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Nesterov(0.0), "lr=0.0.*above 0"),
        (lambda: Nesterov(float("inf")), "lr=inf"),
        (lambda: Nesterov(momentum=1.0), "momentum=1.0.*below 1"),
        (lambda: Fragments(0), "every=0"),
        (lambda: Fragments(4, 5), "fragments=5.*every=4"),
        (lambda: Fragments(4, delay=4), "delay=4.*every=4"),
        (lambda: Fragments(4, mix=1.0), "mix=1.0.*below 1"),
    ],
)
def test_refuses_what_makes_no_rounds(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
