"""The two detectors of Python state find the same: that of the rehearsal by reads, and that by digests and marks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.state_watch import Call, watch
from tests.partition import test_touches as touches
from tests.partition.cutting import Stepping, planned
from tests.partition.test_side_channels import batches

REFUSED = next(mark for mark in touches.test_what_a_stage_would_miss_is_refused.pytestmark if "what" in mark.args[0])
ALLOWED = [(loss_of, "") for loss_of in (touches.early, touches.begun_anew, touches.only_late, touches.in_every_block)]


@pytest.mark.parametrize(("loss_of", "what"), [*REFUSED.args[1], *ALLOWED])
def test_they_find_the_same(loss_of: Any, what: str) -> None:
    try:
        planned(Stepping(touches.Model(), loss_of), batches(2), 2)
        refused = False
    except ConfigurationError as error:
        refused = f"changes {what}" in str(error)
    module = Stepping(touches.Model(), loss_of)
    calls = [Call(nullcontext, partial(module.training_step, batch)) for batch in batches(2)]
    watched = watch(module, [f"model.layers.{number}" for number in range(4)], calls)
    for call in calls:
        call.step()
    found = [change.name for span in (range(2), range(2, 4)) if (change := watched.missed(span)) is not None]
    assert refused == bool(what)
    assert bool(found) == (bool(what) and loss_of is not touches.amidst)  # which writes the value that is there
    assert all(name.startswith(what) for name in found)
