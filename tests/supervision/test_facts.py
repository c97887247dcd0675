"""What a supervisor reads in a status."""

from __future__ import annotations

import msgspec

from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler.log.status import MembersStatus
from lightning_sdpipe.scheduler.server.service import SchedulerService
from lightning_sdpipe.supervision.events import Seen
from lightning_sdpipe.supervision.status_poller import seen


def test_an_elastic_run() -> None:
    status = SchedulerService(SemiDecentralized(), 2, 3).status(0.0)
    assert seen(status, 4.0) == Seen(4.0, {}), "nobody has come"
    members = MembersStatus(
        4, "pipeline 1 lost", 2, {}, "", {2: 255, 0: 16}, [0, 1, 2], [(1, 32)], None, 412, "a.ckpt", ["stage 0 failed"]
    )
    status = msgspec.structs.replace(status, members=members)
    assert seen(status, 5.0) == Seen(
        5.0, {2: "ff", 0: "10"}, 2, 412, frozenset({0, 1, 2}), {"20": "stage 0 failed"}, None, "a.ckpt"
    )
    over = msgspec.structs.replace(members, over="too few came")
    assert seen(msgspec.structs.replace(status, members=over), 6.0).failure == "too few came"
