"""Means over groups of real processes: the same on all members, and a share of the traffic between groups."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_sdpipe.exchange import moving, transfers
from lightning_sdpipe.exchange.moving import finish
from lightning_sdpipe.exchange.payloads import EightBit
from lightning_sdpipe.exchange.sharded_mean import ShardedMean
from lightning_sdpipe.policies.following_stages import mean_of_groups
from tests.exchange.test_group_mean import group, replicas, values
from tests.workers import run_workers

GROUPS = [[0, 3], [1, 4], [2, 5]]
SIZES = (1, 3, 1000)
MEETINGS: Sequence[Sequence[int]] = [(0, 1, 3, 4), (0, 1, 2, 3, 4, 5), (0, 1, 3), (0, 2), (1, 4)]
"""Of two groups, of all, with one that is absent, with one of each, and of one group, which is none."""


def counterpart(pipeline: int) -> int:
    return (pipeline + 3) % 6


def meet(rank: int, sharded: bool) -> list[tuple[list[Tensor], int]]:
    """What this worker holds after each meeting, and the elements that it sent to other groups."""
    moving.PIECE = 300  # so that the longest has several
    sent = 0
    begin = transfers.begin

    def counted(outgoing, into, links, tag):  # type: ignore[no-untyped-def]
        nonlocal sent
        sent += sum(len(tensor) for to, tensor in outgoing.items() if to != counterpart(links.pipeline))
        return begin(outgoing, into, links, tag)

    transfers.begin = counted
    here = replicas(rank)
    mover, outcomes = ShardedMean(here, GROUPS, sharded), []
    for sequence, members in enumerate(MEETINGS):
        tensors = [values(here.pipeline % 3, size) for size in SIZES]  # equal within a group
        sent = 0
        if here.pipeline in members:
            there = sorted(members)
            parts = mover.parts(group(there, (), 0))
            weights = dict(zip((p for part in parts for p in part), mean_of_groups(parts), strict=True))
            finish(mover.start(tensors, group(there, [weights[p] for p in there], sequence)))
        outcomes.append((tensors, sent))
    return outcomes


@pytest.mark.distributed
def test_members_get_the_mean_of_the_groups_and_slow_links_carry_a_share() -> None:
    sharded, whole = (run_workers(6, meet, how)[::-1] for how in (True, False))
    for number, members in enumerate(MEETINGS):
        for place, size in enumerate(SIZES):
            met = sorted({m % 3 for m in members})
            mean = sum(values(g, size).double() for g in met) / len(met)
            for by_pipeline in (sharded, whole):
                for pipeline in range(6):
                    got = by_pipeline[pipeline][number][0][place]
                    expected = mean if pipeline in members else values(pipeline % 3, size).double()
                    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)
                    if pipeline in members:
                        assert torch.equal(got, by_pipeline[members[0]][number][0][place])
    totals = [[sum(outcomes[n][1] for outcomes in how) for n in range(len(MEETINGS))] for how in (sharded, whole)]
    model = sum(SIZES)
    assert totals[0][:2] == [2 * model, 4 * model], "each group sends the model once, and in rings of three 4/3 times"
    assert totals[0][0] / totals[1][0] == pytest.approx(1 / 2, rel=0.01)
    assert totals[0][4] == totals[1][4] == 0


def meet_in_eight_bits(rank: int, groups: list[list[int]]) -> tuple[list[Tensor], list[int]]:
    """What this worker holds after each of several meetings of all, and the bytes that it sent to other groups."""
    moving.PIECE = 4000
    here = replicas(rank)
    (own,) = [number for number, members in enumerate(groups) if here.pipeline in members]
    sent: list[int] = []
    begin = transfers.begin

    def counted(outgoing, into, links, tag):  # type: ignore[no-untyped-def]
        sent[-1] += sum(tensor.nbytes for to, tensor in outgoing.items() if to not in groups[own])
        return begin(outgoing, into, links, tag)

    transfers.begin = counted
    mover, model, held = ShardedMean(here, groups, payload=EightBit(block=64)), values(0, 10_000), []
    everybody = sorted(member for members in groups for member in members)
    for number in range(4):
        model += 0.01 * values(10 * number + own, 10_000)  # the group's step
        sent.append(0)
        finish(mover.start([model], group(everybody, [1 / len(everybody)] * len(everybody), number)))
        held.append(model.clone())
    return held, sent


@pytest.mark.distributed
@pytest.mark.parametrize("groups", [[[0, 2], [1, 3]], [[0], [1]]], ids=["pairs", "of one"])
def test_in_eight_bits_the_mean_stays_where_it_is_and_the_members_of_a_group_stay_equal(
    groups: list[list[int]],
) -> None:
    count = sum(map(len, groups))
    outcomes = run_workers(count, meet_in_eight_bits, groups)[::-1]
    mean = values(0, 10_000).double()
    for number in range(4):
        mean += 0.01 * sum(values(10 * number + own, 10_000).double() for own in range(2)) / 2
        models = [[outcomes[pipeline][0][number] for pipeline in members] for members in groups]
        for members in models:
            assert all(torch.equal(model, members[0]) for model in members)
        first, second = (members[0].double() for members in models)
        torch.testing.assert_close((first + second) / 2, mean, rtol=0, atol=1e-5)
        assert (first - second).norm() < 0.05 * 0.01 * (2 * 10_000) ** 0.5, "far less than what they moved apart by"
    in_full = 4 * 10_000 / len(groups[0])
    for _, sent in outcomes:
        assert all(in_full / 4 < each < 1.15 * in_full / 4 for each in sent[1:])
