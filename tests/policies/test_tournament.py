"""Who sits beside whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.policies.pairing import by_nearness, by_turns


@given(n=st.integers(1, 20), size=st.integers(2, 5), turn=st.integers(0, 100))
def test_splitting_loses_nobody(n: int, size: int, turn: int) -> None:
    parts = by_turns(list(range(n)), size, turn)
    assert sorted(worker for part in parts for worker in part) == list(range(n))
    assert len(parts) == -(-n // size)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("n", [4, 6, 10, 16])
def test_in_n_minus_1_turns_everybody_meets_everybody(n: int) -> None:
    met = {tuple(sorted(pair)) for turn in range(n - 1) for pair in by_turns(list(range(n)), 2, turn)}
    assert len(met) == n * (n - 1) // 2


@given(
    st.lists(st.integers(0, 20), min_size=1, unique=True),
    st.integers(2, 5),
    st.integers(0, 100),
    st.lists(st.integers(0, 3), min_size=18, max_size=18),
)
def test_nearness_loses_nobody_and_leaves_one_alone_at_most(
    workers: list[int], size: int, turn: int, site_of: list[int]
) -> None:
    """Workers from 18 on are at no site: newcomers."""
    near = [[worker for worker in range(18) if site_of[worker] == site] for site in range(4)]
    parts = by_nearness(sorted(workers), size, turn, near)
    assert sorted(worker for part in parts for worker in part) == sorted(workers)
    assert max(map(len, parts)) <= size
    present = [[worker for worker in site if worker in workers] for site in near]
    together = [part for part in parts if any(set(part) <= set(site) for site in near)]
    assert sum(map(len, together)) >= sum(len(site) for site in present if len(site) > 1)
