from __future__ import annotations

from statistics import fmean

import pytest

from lightning_sdpipe.placement.planner import simulate_groups
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized


def test_all_reduce_waits_for_the_slowest_and_averages_over_everybody() -> None:
    drawn = simulate_groups(AllReduceModels(), [1.0, 2.0, 1.0], lambda group: 0.1 * len(group))
    assert set(drawn.groups) == {(0, 1, 2)}
    assert drawn.seconds == pytest.approx(0.3)
    assert drawn.efficiency == pytest.approx(3 / 2.3 / 2.5, rel=0.01)
    assert drawn.members == 3


def test_nobody_waits_without_synchronisation() -> None:
    drawn = simulate_groups(NoSync(), [1.0, 2.0, 4.0], lambda group: 0.0)
    assert drawn.efficiency == pytest.approx(1.0)
    assert set(map(len, drawn.groups)) == {1}


def test_pipelines_of_equal_speed_meet_each_other_and_lose_little() -> None:
    """Two speeds: groups are formed within each most of the time, and between them as often as the policy enforces."""
    times = [1.0] * 4 + [1.6] * 4
    drawn = simulate_groups(SemiDecentralized(), times, lambda group: 0.01)
    assert 0.85 < drawn.efficiency < 1.0
    within = [max(group) < 4 or min(group) >= 4 for group in drawn.groups if len(group) > 1]
    assert fmean(within) > 0.4
    assert not all(within)
    assert drawn == simulate_groups(SemiDecentralized(), times, lambda group: 0.01)
