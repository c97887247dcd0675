"""Decisions of a policy. Carrying one out needs no knowledge of the policy that made it."""

from __future__ import annotations

import math
from collections.abc import Collection
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, TypeAlias

import msgspec

from lightning_sdpipe.policies.events import Count, Worker

Weight: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
TOLERANCE = 1e-9
"""Tolerance of the sum of a group's weights around 1."""


class Reason(StrEnum):
    """The built-in policies' reasons for sending out a group; other policies may have others."""

    WINDOW_CLOSED = "window closed"
    """The window ended and the recent groups plus this one connect the stage."""
    EVERYBODY_CAME = "everybody came"
    """Every active worker of the stage was ready: none was left to wait for."""
    ENFORCED = "enforced"
    """The stage waited, holding the token, until the sync-graph was connected (SDPipe §3.4)."""
    TOKEN_BUSY = "token busy"
    """Waiting was needed to connect the sync-graph, but another stage holds the token: waiting could deadlock."""
    WORKER_LOST = "worker lost"
    """The workers that the group waited for left or were lost, and the remaining ones need not wait any longer."""
    MATCHED = "matched"
    """The workers were drawn to average with each other (AD-PSGD)."""
    STALENESS = "staleness"
    """Some members had waited for others whose models lacked too many of their steps (``staleness=``)."""
    LOCAL_STEP = "local step"
    """The policy has the worker go on alone this time."""
    HANDED_OVER = "handed over"
    """Some members lack the outcome of the last round, and the passive one has it."""
    MADE_AGAIN = "made again"
    """A round broke off, and no remaining worker has its outcome."""


class Group(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="group"):
    """Workers of one stage that average their models now.

    ``members`` is sorted. ``weights`` belong to the members in that order and add up to 1: each member's model becomes
    the weighted sum of all members' models. ``sequence`` is unique in the run and increasing. ``reason`` is for people.

    ``passive`` members take part without being answered: they average while they compute (asynchronous AD-PSGD), or
    average and go on waiting (PHD-PSGD under its bound). The latter are ``standing``: their models contain the step
    that they are ready with. A passive member with all of the weight hands the outcome of a round over to the others
    (:attr:`source`). Unless it is empty, ``neighbours`` lists for each member, in order, the members that it averages
    with instead of all.

    ``epoch`` is for elastic runs, and no policy sets it: the epoch of membership whose process group holds all members;
    0 in any other run.
    """

    members: tuple[Worker, ...]
    weights: tuple[Weight, ...]
    sequence: Count
    reason: str
    passive: tuple[Worker, ...] = ()
    neighbours: tuple[tuple[Worker, ...], ...] = ()
    standing: tuple[Worker, ...] = ()
    epoch: Count = 0

    @property
    def stage(self) -> int:
        """Stage that all members belong to."""
        return self.members[0].stage

    @property
    def source(self) -> Worker | None:
        """Member that hands the outcome of a round over to the others; None if members average."""
        for worker in self.passive:
            if self.weights[self.members.index(worker)] == 1.0:
                return worker
        return None


Decision: TypeAlias = Group


def without_passive(group: Group) -> Group:
    """Return ``group`` without its passive members; the others have equal weights."""
    members = tuple(member for member in group.members if member not in group.passive)
    weights = (1 / len(members),) * len(members)
    return msgspec.structs.replace(
        group, members=members, weights=weights, passive=(), standing=(), reason=Reason.LOCAL_STEP
    )


def of_those(group: Group, there: Collection[Worker]) -> Group:
    """Return ``group`` with only the members in ``there``; their weights keep their proportions."""
    pairs = [pair for pair in zip(group.members, group.weights, strict=True) if pair[0] in there]
    total = math.fsum(weight for _, weight in pairs)
    neighbours = [
        tuple(neighbour for neighbour in each if neighbour in there)
        for member, each in zip(group.members, group.neighbours, strict=False)
        if member in there
    ]
    return msgspec.structs.replace(
        group,
        members=tuple(member for member, _ in pairs),
        weights=tuple(weight / total if total else 1 / len(pairs) for _, weight in pairs),
        neighbours=tuple(neighbours) if len(pairs) > 1 else (),
        passive=tuple(member for member in group.passive if member in there),
        standing=tuple(member for member in group.standing if member in there),
    )


class BrokenRule(ValueError):
    """A policy decided something that cannot be carried out: an error in the policy."""


def check_group(group: Group, next_sequence: int) -> None:
    """Check a group as far as possible without knowing which workers wait.

    Raises:
        BrokenRule: the group is not as :class:`Group` requires, or its sequence is below ``next_sequence``.
    """
    members, weights = group.members, group.weights
    if len(members) == 1:  # cheap, since many policies answer workers one by one
        sound = weights == (1.0,) and not group.neighbours
    else:
        sound = (
            len(members) == len(weights)
            and all(a.stage == b.stage and a.pipeline < b.pipeline for a, b in pairwise(members))
            and abs(math.fsum(weights) - 1.0) <= TOLERANCE
            and (not group.neighbours or len(group.neighbours) == len(members))
        )
    if group.passive or group.standing:
        sound = sound and set(group.standing) <= set(group.passive) < set(members)
    if not (sound and members and group.sequence >= next_sequence):
        raise BrokenRule(
            f"{group} cannot go out: members must be workers of one stage in increasing order, weights as many, with a "
            "sum of 1, neighbours none or as many, passive members some but not all of them, standing ones "
            f"passive, and the sequence at least {next_sequence}"
        )
