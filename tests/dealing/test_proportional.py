"""Equal pieces for workers of different speeds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.dealing.proportional import divide, divide_again, proportional_shares, shares_by_speed

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


def test_everybody_gets_a_piece_if_there_are_enough() -> None:
    assert shares_by_speed(28, dict.fromkeys(range(4), (0.0, 1.0))) == {0: 7, 1: 7, 2: 7, 3: 7}
    assert shares_by_speed(28, {0: (0, 1.0), 1: (0, 1.0), 2: (0, 1.0), 3: (0, 2.0)}) == {0: 8, 1: 8, 2: 8, 3: 4}
    assert shares_by_speed(16, {0: (1, 1.0), 1: (3, 3.0)}) == {0: 13, 1: 3}, "what idles first gets less"
    assert shares_by_speed(4, {0: (0, 1.0), 1: (0, 1.0), 2: (0, 100.0)}) == {0: 2, 1: 1, 2: 1}
    assert shares_by_speed(2, {0: (0, 1.0), 1: (0, 1.0), 2: (0, 100.0)}) == {0: 1, 1: 1, 2: 0}


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6), st.integers(0, 40))
def test_all_pieces_are_given(seconds: list[float], more: int) -> None:
    given = shares_by_speed(len(seconds) + more, {i: (0.0, each) for i, each in enumerate(seconds)})
    assert sum(given.values()) == len(seconds) + more
    assert min(given.values()) >= 1


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
