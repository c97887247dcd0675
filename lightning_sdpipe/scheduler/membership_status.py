"""Who is in an elastic run, as an operator and a supervisor see it."""

from __future__ import annotations

import msgspec


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
    """Pipelines and incarnations of them that were members and must not come back; the last ones."""
    holds: str
    """Why nobody may train now; empty if they may."""
    over: str | None
    """Why the run has failed, if it has."""
