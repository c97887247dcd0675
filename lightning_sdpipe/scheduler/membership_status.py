"""Who is in an elastic run, as an operator and a supervisor see it."""

from __future__ import annotations

import msgspec

from lightning_sdpipe.policies.membership import Membership

GONE = 64
"""Starts that must not come back which are told, the last ones."""


class MembershipStatus(msgspec.Struct, frozen=True):
    """The newest epoch of membership, and what became of others."""

    epoch: int
    reason: str
    """Why it began."""
    members: list[tuple[int, int]]
    """Pipelines, the oldest first (it leads), and the incarnation of each."""
    ever: list[int]
    """Pipelines that were members at any time, as far as this scheduler knows."""
    gone: list[tuple[int, int]]
    """Pipelines and incarnations of them that must not come back; the last ones."""
    holds: str
    """Why nobody may train now; empty if they may."""
    over: str | None
    """Why the run has failed, if it has."""
    states: dict[int, str] = {}
    """Of each pipeline that is there, in a word or two."""


def membership_status(membership: Membership) -> MembershipStatus | None:
    """None until a pipeline has come."""
    epoch, over, states = membership.epoch, membership.over, membership.states()
    if not epoch.number and over is None and not states:
        return None
    return MembershipStatus(
        epoch.number,
        epoch.reason,
        [(member.pipeline, member.incarnation) for member in epoch.members],
        sorted(membership.ever),
        [(member.pipeline, member.incarnation) for member in membership.buried(GONE)],
        membership.holds,
        over.reason if over is not None and over.failed else None,
        states,
    )
