"""Effects: what a process of a run is to do after it has heard, or not heard, from the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from lightning_sdpipe.membership.members import Epoch
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m

Kind: TypeAlias = type[m.Request] | type[e.Request]
Key: TypeAlias = tuple[str, str | int] | Kind
"""Name of a request: its kind, where the thread that trains asks."""


@dataclass(frozen=True)
class Replied:
    """The reply to the request ``key`` came, which may be its refusal."""

    key: Key
    reply: m.Reply | e.Reply


@dataclass(frozen=True)
class EpochBegan:
    """The members have changed."""

    epoch: Epoch


@dataclass(frozen=True)
class GroupBroke:
    """Another member did not get the result of the group ``sequence``, and this one does not have it either."""

    sequence: int


@dataclass(frozen=True)
class HandOver:
    """This worker has the result of the group ``sequence``, and gives it to the other members of ``group``."""

    sequence: int
    group: Group


@dataclass(frozen=True)
class Connect:
    """A lifeline is to be opened, in place of the one before."""

    port: int
    nonce: bytes


@dataclass(frozen=True)
class Warned:
    """People are to be told ``text``."""

    text: str


Effect: TypeAlias = Replied | EpochBegan | GroupBroke | HandOver | Connect | Warned | m.Invitation | e.End
"""Effects of a message; an invitation is to be followed."""
