"""How pipelines come into a run, with a scheduler that is played by the test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_sdpipe.elastic.beginning import join
from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.policies.members import Epoch, Member
from lightning_sdpipe.scheduler.elastic_client import Receive, Start

EPOCH = Epoch(3, (Member(1, 7),), "tested")


class Door:
    """Gives one answer after the other."""

    def __init__(self, *answers: Start | Receive) -> None:
        self.answers = list(answers)
        self.said: list[str] = []

    def enrol(self, fingerprint: Mapping[str, str]) -> Start | Receive:
        return self.answers.pop(0)

    def received(self, transfer: str) -> Start | Receive:
        self.said.append(f"received {transfer}")
        return self.answers.pop(0)

    def missed(self, transfer: str, reason: str) -> Start | Receive:
        self.said.append(f"missed {transfer}: {reason}")
        return self.answers.pop(0)


def of_donor(receive: Receive) -> dict[str, Any]:
    if receive.donor == 5:
        raise WorkerFailedError("pipeline 5 is gone")
    return {"of": receive.donor}


def test_a_newcomer_begins_with_the_state_that_came_last() -> None:
    first, second, third = Receive(1, 0, "a", 4), Receive(1, 5, "b", 5), Receive(1, 2, "c", 6)
    door = Door(first, second, third, Start(EPOCH, fresh=False))
    assert join(door, {}, of_donor) == (Start(EPOCH, fresh=False), {"of": 2})
    assert door.said == ["received a", "missed b: pipeline 5 is gone", "received c"]


def test_who_begins_anew_forgets_the_state_of_a_donor_that_was_lost() -> None:
    """Another stage of its pipeline has not got any."""
    door = Door(Receive(1, 0, "a", 4), Start(EPOCH, fresh=True))
    assert join(door, {}, of_donor) == (Start(EPOCH, fresh=True), None)
