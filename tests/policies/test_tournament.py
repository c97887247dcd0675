"""Who sits beside whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.policies.pairing import by_turns


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
