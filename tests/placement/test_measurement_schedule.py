"""Who is measured with whom when."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.placement.links import MOST_DEVICES, SAMPLE, circle, schedule, together


@given(st.integers(1, 17))
def test_everybody_meets_everybody_once_in_disjoint_pairs(count: int) -> None:
    rounds = circle(count)
    assert sorted(pair for meeting in rounds for pair in meeting) == list(combinations(range(count), 2))
    assert all(len({rank for pair in meeting for rank in pair}) == 2 * len(meeting) for meeting in rounds)
    assert len(rounds) == max(0, count - 1 + count % 2)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_all_pairs_are_measured_and_no_host_takes_part_in_two_pairs_at_once(hosts: list[str]) -> None:
    rounds = schedule(hosts)
    assert sorted(pair for meeting in rounds for pair in meeting) == list(combinations(range(len(hosts)), 2))
    for meeting in rounds:
        busy = Counter(host for pair in meeting for host in {hosts[rank] for rank in pair})
        assert set(busy.values()) <= {1}


def test_many_devices_are_sampled_per_pair_of_hosts() -> None:
    hosts = [f"host{rank // 8}" for rank in range(MOST_DEVICES + 8)]
    pairs = [pair for meeting in schedule(hosts) for pair in meeting]
    between = Counter(tuple(sorted((hosts[a], hosts[b]))) for a, b in pairs if hosts[a] != hosts[b])
    assert len(between) == 9 * 8 // 2
    assert set(between.values()) == {SAMPLE}
    of_two = [pair for pair in pairs if {hosts[rank] for rank in pair} == {"host0", "host1"}]
    assert len({rank for pair in of_two for rank in pair}) == 2 * SAMPLE


@pytest.mark.parametrize(
    ("hosts", "rounds"), [("aabb", [[(0, 2), (1, 3)]]), ("ab", []), ("aab", []), ("aabbb", [[(0, 2), (1, 3)]])]
)
def test_as_many_pairs_of_two_hosts_as_there_can_be_are_busy_together(
    hosts: str, rounds: list[list[tuple[int, int]]]
) -> None:
    assert together(list(hosts)) == rounds
    failed = [pair for pairs in rounds for pair in pairs][:1]
    left = [[pair for pair in pairs if pair not in failed] for pairs in rounds]
    assert together(list(hosts), failed) == [pairs for pairs in left if pairs], "what has failed is not tried again"
