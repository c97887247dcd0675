"""What a supervisor reads in the status of an elastic run."""

from __future__ import annotations

from lightning_sdpipe.scheduler.status import Status
from lightning_sdpipe.supervision.events import Seen


def seen(status: Status, asked: float) -> Seen:
    """``asked`` is when the question was asked."""
    members = status.membership
    if members is None:
        return Seen(asked, {}, failure=status.failure)
    steps = [
        min(known)
        for pipeline, _ in members.members
        if None not in (known := [stage.iterations[pipeline] for stage in status.stages])
    ]
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
