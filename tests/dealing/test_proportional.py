"""Equal pieces for workers of different speeds."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.dealing.proportional import divide, divide_again, micro_batches_by_speed, proportional_shares
from lightning_sdpipe.errors import ConfigurationError

SPEEDS = st.lists(st.tuples(st.floats(0, 50), st.floats(0.01, 10)), min_size=1, max_size=6)


def one_by_one(pieces: int, workers: dict[int, tuple[float, float]]) -> dict[int, int]:
    given = dict.fromkeys(workers, 0)
    for _ in range(pieces):
        first = min(workers, key=lambda i: (workers[i][0] + workers[i][1] * (given[i] + 1), i))
        given[first] += 1
    return given


@given(st.integers(0, 200), SPEEDS)
def test_each_piece_goes_to_who_finishes_it_first(pieces: int, speeds: list[tuple[float, float]]) -> None:
    workers = dict(enumerate(speeds))
    ours, simple = proportional_shares(pieces, workers), one_by_one(pieces, workers)
    assert sum(ours.values()) == pieces

    def end(given: dict[int, int]) -> float:
        return max(workers[i][0] + workers[i][1] * n for i, n in given.items() if n or not pieces)

    assert end(ours) == pytest.approx(end(simple))


def test_millions_of_pieces_are_divided_at_once() -> None:
    assert proportional_shares(1_750_000_000, {0: (0.0, 1.0), 1: (0.0, 2.0), 2: (0.0, 4.0)}) == {
        0: 1_000_000_000,
        1: 500_000_000,
        2: 250_000_000,
    }
    assert proportional_shares(5, {}) == {}


def test_micro_batches_follow_the_speed_and_their_sum_is_constant() -> None:
    assert micro_batches_by_speed([1.0, 1.0, 1.0, 1.0], 28) == [7, 7, 7, 7]
    assert micro_batches_by_speed([1.0, 1.0, 1.0, 2.0], 28) == [8, 8, 8, 4]
    assert micro_batches_by_speed([1.0, 1.0, 2.0, 4.0], 32, least=4) == [12, 11, 5, 4]
    assert micro_batches_by_speed([1.0, 1.0, 1.0, 100.0], 8, least=2) == [2, 2, 2, 2]


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6), st.integers(1, 4), st.integers(0, 40))
def test_everybody_has_what_its_schedule_needs(seconds: list[float], least: int, more: int) -> None:
    total = least * len(seconds) + more
    parts = micro_batches_by_speed(seconds, total, least)
    assert sum(parts) == total
    assert min(parts) >= least


@pytest.mark.parametrize(
    ("seconds", "total", "message"),
    [
        ([1.0, 1.0], 7, "7 micro-batches cannot be divided among 2 pipelines that need 4 each"),
        ([1.0, 0.0], 8, "seconds=[1.0, 0.0] is not allowed"),
    ],
)
def test_what_cannot_be_divided_is_refused(seconds: list[float], total: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        micro_batches_by_speed(seconds, total, 4)


def test_pieces_are_divided_by_speed_and_every_worker_gets_one() -> None:
    assert divide(range(8), {0: 1.0, 1: 1.0}) == {0: [0, 2, 4, 6], 1: [1, 3, 5, 7]}
    assert divide(range(6), {0: 2.0, 1: 1.0}) == {0: [1, 4], 1: [0, 2, 3, 5]}
    assert divide(range(4), {3: 1.0, 5: 100.0}) == {3: [0, 2, 3], 5: [1]}
    assert divide([7], {3: 9.0, 5: 1.0}) == {3: [], 5: [7]}
    assert divide([], {3: 9.0}) == {3: []}


@given(st.integers(0, 40), st.lists(st.floats(0.01, 10), min_size=1, max_size=6), st.data())
def test_every_piece_is_held_once_whoever_dies_and_whenever(
    number: int, speeds: list[float], data: st.DataObject
) -> None:
    """All that are left come to each division with all that they were given, until nothing is missing."""
    seconds = dict(enumerate(speeds))
    held = divide(range(number), seconds)
    for _ in range(len(speeds)):
        left = data.draw(st.sets(st.sampled_from(sorted(seconds)), min_size=1))
        seconds = {worker: seconds[worker] for worker in seconds if worker in left}
        more = divide_again(number, held, seconds)
        held = {worker: held[worker] + more[worker] for worker in seconds}
        assert sorted(piece for pieces in held.values() for piece in pieces) == list(range(number))
        assert not any(divide_again(number, held, seconds).values())
