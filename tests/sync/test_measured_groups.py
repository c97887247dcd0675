"""PHD-PSGD's groups: the paper's cluster, and the search against every grouping there is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.sync.measured_groups import cost, generate_groups, hosts_as_groups

MODEL = 98e6
"""Bytes of ResNet-50 (§5.2)."""
WITHIN, BETWEEN = 15e9, 56e9 / 8
TIMES = (0.10, 0.11, 0.19, 0.21)


def papers_cluster() -> tuple[list[float], list[list[float]]]:
    """Four nodes of four alike; one type per node."""
    compute = [TIMES[device // 4] for device in range(16)]
    inside, outside = MODEL / WITHIN, MODEL / BETWEEN
    return compute, [[inside if a // 4 == b // 4 else outside for a in range(16)] for b in range(16)]


def groupings(rest: tuple[int, ...], size: int) -> Iterator[list[tuple[int, ...]]]:
    if not rest:
        yield []
        return
    for company in itertools.combinations(rest[1:], size - 1):
        left = tuple(i for i in rest[1:] if i not in company)
        for others in groupings(left, size):
            yield [(rest[0], *company), *others]


def test_the_papers_groups_are_its_nodes() -> None:
    compute, links = papers_cluster()
    found = generate_groups(compute, links, 4)
    assert found.groups == tuple(tuple(range(k, k + 4)) for k in range(0, 16, 4))
    assert found.optimal
    assert found.seconds == pytest.approx(0.636133, abs=5e-7)
    one_of_each = [[k, k + 4, k + 8, k + 12] for k in range(4)]
    assert cost(one_of_each, compute, links) == pytest.approx(0.896)


@given(shape=st.sampled_from([(6, 2), (6, 3), (8, 2), (8, 4), (9, 3), (4, 1), (4, 4)]), data=st.data())
def test_no_grouping_is_cheaper(shape: tuple[int, int], data: st.DataObject) -> None:
    count, size = shape
    seconds = st.floats(0.01, 1.0)
    compute = data.draw(st.lists(seconds, min_size=count, max_size=count))
    links = data.draw(st.lists(st.lists(seconds, min_size=count, max_size=count), min_size=count, max_size=count))
    found = generate_groups(compute, links, size)
    assert sorted(i for group in found.groups for i in group) == list(range(count))
    assert found.optimal
    assert found.seconds == pytest.approx(cost(found.groups, compute, links))
    assert found.seconds == pytest.approx(min(cost(g, compute, links) for g in groupings(tuple(range(count)), size)))


def test_a_search_that_is_cut_short_says_so_and_has_an_answer() -> None:
    compute = [0.1 + 0.01 * (7 * i % 32) for i in range(32)]
    links = [[0.01 + 0.01 * ((i * j) % 5) for j in range(32)] for i in range(32)]
    found = generate_groups(compute, links, 4, steps=1000)
    assert not found.optimal
    assert sorted(i for group in found.groups for i in group) == list(range(32))
    in_order = [list(range(k, k + 4)) for k in range(0, 32, 4)]
    assert found.seconds < cost(in_order, compute, links)


def test_the_pipelines_of_each_host() -> None:
    assert hosts_as_groups(["b", "a", "b", "a"]) == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("compute", "links", "size", "message"),
    [
        ([1.0] * 3, [[0.0] * 3] * 3, 2, "3 pipelines .* cannot form groups of 2"),
        ([1.0] * 2, [[0.0] * 2], 1, "table of 1 × 2 links"),
        ([1.0, 0.0], [[0.0] * 2] * 2, 1, r"compute=\[1.0, 0.0\]"),
    ],
)
def test_what_does_not_fit_is_refused(compute: list[float], links: list[list[float]], size: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        generate_groups(compute, links, size)
