"""Means over groups of real processes: the same on all members, and a share of the traffic between groups."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_sdpipe.exchange import moving, transfers
from lightning_sdpipe.exchange.moving import finish
from lightning_sdpipe.exchange.sharded_mean import ShardedMean
from lightning_sdpipe.policies.replay import mean_of_groups
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
