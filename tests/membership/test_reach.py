"""Who is put out when pipelines cannot reach each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from lightning_sdpipe.membership.failure_detection import (
    EPOCHS,
    IN_A_ROW,
    LONGEST_PAUSE,
    TRANSFERS,
    TRIED_FOR,
    UNEXPLAINED,
    Reach,
)

EVERY = 5.0


def tries(
    members: list[int], apart: list[tuple[int, int]], said: bool = True
) -> list[tuple[int, tuple[int, list[int]]]]:
    """Epochs in vain until nobody is apart: after how many of them who went, and whom it missed."""
    reach, members, gone, now = Reach(60.0), list(members), [], 0.0
    for number in range(100):
        left = [pair for pair in apart if {*pair} <= {*members}]
        if not left:
            break
        for one, other in left if said else ():
            reach.misses(one, [other])
            reach.misses(other, [one])
        if (found := reach.found_none([*{i for pair in left for i in pair}], members, True, now)) is not None:
            gone.append((number + 1, found))
            members.remove(found[0])
        now += EVERY
    return gone


def test_of_two_the_younger_is_put_out_after_some_epochs() -> None:
    assert tries([1, 0], [(0, 1)]) == [(EPOCHS, (0, [1]))]
    assert tries([5, 1, 0, 2], [(1, 2)]) == [(EPOCHS, (2, [1]))]


def test_one_that_several_cannot_reach_is_put_out_itself_however_old() -> None:
    assert tries([0, 1, 2, 3], [(0, 1), (0, 2), (0, 3)]) == [(EPOCHS, (0, [1, 2, 3]))]


def test_two_halves_that_cannot_reach_each_other_leave_the_older_one() -> None:
    pairs = list(itertools.product([0, 1], [2, 3]))
    assert [who for _, (who, _) in tries([0, 1, 2, 3], pairs)] == [3, 2]


def test_without_a_word_of_anybody_the_youngest_goes_later() -> None:
    assert tries([0, 1, 2], [(0, 1)], said=False) == [(UNEXPLAINED, (1, []))]


@pytest.mark.parametrize(
    ("missed", "waited", "every", "epochs"),
    [
        pytest.param(lambda number: [1] * (number % EPOCHS > 0), True, 2 * IN_A_ROW, 20, id="it is reached after all"),
        pytest.param(lambda number: [1], True, 0.1 * TRIED_FOR / 20, 20, id="epochs follow at once"),
        pytest.param(lambda number: [], False, EVERY, 40, id="exchanges break off, and none is missed"),
        pytest.param(lambda number: [7], True, EVERY, 2 * EPOCHS, id="who is missed is gone"),
    ],
)
def test_nobody_is_put_out_without_a_reason(
    missed: Callable[[int], list[int]], waited: bool, every: float, epochs: int
) -> None:
    reach = Reach(60.0)
    for number in range(epochs):
        reach.misses(0, missed(number))
        assert reach.found_none([0, 1], [0, 1], waited, every * number) is None


def test_who_was_put_out_is_let_in_after_pauses_that_double() -> None:
    reach, now = Reach(60.0), 0.0
    pauses = []
    for _ in range(8):
        reach.put_out(3, now)
        pauses.append(reach.out_until(3) - now)
        reach.let_in(now)
        assert reach.out_until(3) > now
        now = reach.out_until(3)
        reach.let_in(now)
        assert reach.out_until(3) == -math.inf
    assert pauses == pytest.approx([60, 120, 240, 480, 960, 1920, LONGEST_PAUSE, LONGEST_PAUSE])


def test_a_newcomer_that_gets_no_state_is_put_out_for_a_while() -> None:
    reach = Reach(60.0)
    for _ in range(TRANSFERS - 1):
        reach.got_none(2, 5.0)
    assert reach.out_until(2) == -math.inf
    reach.got_none(2, 5.0)
    assert reach.out_until(2) == 65.0
