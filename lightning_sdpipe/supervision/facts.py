"""What a supervisor reads in the status of an elastic run."""

from __future__ import annotations

from lightning_sdpipe.scheduler.status import Status
from lightning_sdpipe.supervision.events import Seen


def seen(status: Status, asked: float) -> Seen:
    """``asked`` is when the question was asked."""
    members = status.members
    if members is None:
        return Seen(asked, {}, failure=status.failure)
    steps = []
    for pipeline in members.lives:
        known = [step for stage in status.stages if (step := stage.iterations[pipeline]) is not None]
        if len(known) == len(status.stages):
            steps.append(min(known))
    return Seen(
        asked,
        {pipeline: _life(incarnation) for pipeline, incarnation in members.lives.items()},
        members.leader,
        max(steps, default=None),
        frozenset(members.ever),
        {_life(member[1]): reason for member, reason in zip(members.gone, members.reasons, strict=True)},
        status.failure or members.over,
    )


def _life(incarnation: int) -> str:
    return f"{incarnation:x}"
