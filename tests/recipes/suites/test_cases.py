"""What an emulated run could reach at most."""

from __future__ import annotations

import pytest

from lightning_sdpipe.policies.local_sgd import NoSync
from recipes.suites.cases import EmulatedCase, Named


@pytest.mark.parametrize(("schedule", "slots"), [("1f1b", 4 + 3), ("pipedream", 4)])
def test_the_bound_is_that_of_whole_mini_batches(schedule: str, slots: int) -> None:
    """Without a flush, too, where they are not split and there is no bubble once the pipeline is full."""
    nothing = Named("none", {"_target_": "lightning_sdpipe.heterogeneity.delays.Delays", "probability": 0.0})
    case = EmulatedCase("test", nothing, nothing, 4, 4, schedule, 4, 2000, 0, 1.0, 0, 0.025, 10)
    bound = case.bound(NoSync())
    assert bound == pytest.approx(4 / (slots * 0.025), rel=0.01)
