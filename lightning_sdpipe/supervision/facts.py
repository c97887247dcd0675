"""What a supervisor reads in the status of an elastic run."""

from __future__ import annotations

from lightning_sdpipe.scheduler.log.status import Status
from lightning_sdpipe.supervision.events import Seen


def seen(status: Status, asked: float) -> Seen:
    """``asked`` is when the question was asked."""
    members = status.members
    if members is None:
        return Seen(asked, {}, failure=status.failure)
    return Seen(
        asked,
        {pipeline: _life(incarnation) for pipeline, incarnation in members.lives.items()},
        members.leader,
        members.update,
        frozenset(members.ever),
        {_life(member[1]): reason for member, reason in zip(members.gone, members.reasons, strict=True)},
        status.failure or members.over,
        members.resumed,
    )


def _life(incarnation: int) -> str:
    return f"{incarnation:x}"
