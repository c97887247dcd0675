"""Commands of stage 0 to the other stage of its pipeline, on real processes."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace

import pytest

from lightning_sdpipe.membership.turn_order import Command, CommandKind
from lightning_sdpipe.topology.groups import ProcessGroups
from lightning_sdpipe.topology.mesh import Mesh
from lightning_sdpipe.worker.elastic import leader
from lightning_sdpipe.worker.elastic.elastic_batches import ElasticBatchSource
from lightning_sdpipe.worker.elastic.leader import CommandChannel
from tests.workers import run_workers

pytestmark = pytest.mark.distributed

LIMIT = 1.5  # seconds of a wait


def hold(rank: int) -> Command | float:
    commands = CommandChannel(ProcessGroups.open(Mesh.build(2, 2), timedelta(seconds=LIMIT)))
    leader._HOLD_EVERY = LIMIT / 10
    if not commands.speaks:
        return commands.receive()
    duties = SimpleNamespace(commands=commands)
    source = SimpleNamespace(_waits_between_turns=True, _duties=duties, _order=lambda: None)  # it has too few pipelines
    began = time.monotonic()
    while (held := time.monotonic() - began) < 2 * LIMIT:
        assert not ElasticBatchSource.serve(source)  # type: ignore[arg-type]
        time.sleep(0.02)
    commands.send(Command(CommandKind.GO, "on"))
    return held


def test_stages_wait_for_a_command_for_as_long_as_stage_0_holds_and_not_for_their_timeout_only() -> None:
    first, held = run_workers(2, hold)
    assert held > LIMIT
    assert first == Command(CommandKind.GO, "on")
