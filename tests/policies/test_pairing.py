from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.policies.pairing import matching, ring, shift_one


def test_neighbours_of_a_ring() -> None:
    assert [ring(0, size) for size in range(1, 6)] == [(), (1,), (1, 2), (1, 3), (1, 4)]
    assert all(place in ring(other, 7) for place in range(7) for other in ring(place, 7))


def test_four_workers_shift_by_one() -> None:
    assert [[shift_one(place, 4, number) for place in range(4)] for number in range(3)] == [
        [2, 3, 0, 1],
        [3, 2, 1, 0],
        [2, 3, 0, 1],
    ]
    assert [[shift_one(place, 3, number) for place in range(3)] for number in range(2)] == [[2, None, 0], [None, 2, 1]]


@given(st.integers(1, 40), st.integers(0, 1000))
def test_partners_agree(size: int, number: int) -> None:
    for pairs in (
        [shift_one(place, size, number) for place in range(size)],
        [None if partner == place else partner for place, partner in enumerate(matching(size, 7, number))],
    ):
        alone = [place for place, partner in enumerate(pairs) if partner is None]
        assert len(alone) == size % 2
        for place, partner in enumerate(pairs):
            assert partner is None or (partner != place and pairs[partner] == place)


@pytest.mark.parametrize("size", [2, 5, 8])
def test_in_half_as_many_rounds_each_of_one_half_meets_each_of_the_other(size: int) -> None:
    half = (size + 1) // 2
    met = {(place, shift_one(place, size, number)) for number in range(half) for place in range(half)}
    assert {pair for pair in met if pair[1] is not None} == {(a, b) for a in range(half) for b in range(half, size)}
