"""What a supervisor reads in the status of an elastic run."""

from __future__ import annotations

from lightning_sdpipe.scheduler.status import Status
from lightning_sdpipe.supervision.events import Seen


def seen(status: Status, asked: float) -> Seen:
    """``asked`` is when the question was asked."""
    members = status.membership
    if members is None:
        return Seen(asked, {}, failure=status.failure)
    steps = []
    for pipeline, _ in members.members:
        known = [step for stage in status.stages if (step := stage.iterations[pipeline]) is not None]
        if len(known) == len(status.stages):
            steps.append(min(known))
    return Seen(
        asked,
        {pipeline: _life(incarnation) for pipeline, incarnation in members.members},
        members.members[0][0] if members.members else None,
        max(steps, default=None),
        frozenset(members.ever),
        frozenset(_life(incarnation) for _, incarnation in members.gone),
        status.failure or members.over,
    )


def _life(incarnation: int) -> str:
    return f"{incarnation:x}"
