"""Groups that lose members before they go out."""

from __future__ import annotations

import pytest

from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.policies.decisions import check_group, of_those

A, B, C = (Worker(0, pipeline) for pipeline in range(3))


def test_those_that_are_left_of_a_group_weigh_in_proportion() -> None:
    left = of_those(Group((A, B, C), (0.5, 0.25, 0.25), 7, "tested"), [A, C])
    check_group(left, 7)
    assert left.members == (A, C)
    assert left.weights == pytest.approx((2 / 3, 1 / 3))


def test_neighbours_that_are_gone_are_left_out() -> None:
    ring = Group((A, B, C), (1 / 3,) * 3, 7, "tested", neighbours=((B, C), (A, C), (A, B)))
    left = of_those(ring, [A, C])
    check_group(left, 7)
    assert left.neighbours == ((C,), (A,))
    alone = of_those(ring, [B])
    check_group(alone, 7)
    assert (alone.members, alone.weights) == ((B,), (1.0,))
