"""Effects: what a process of a run is to do after it has heard, or not heard, from the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from lightning_sdpipe.membership.members import Epoch
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client.training_asks import Came

Key: TypeAlias = tuple[str, str | int]


@dataclass(frozen=True)
class Replied:
    """The reply to the request ``key`` came."""

    key: Key
    reply: e.Reply


@dataclass(frozen=True)
class NotGranted:
    """The request ``key`` cannot be carried out."""

    key: Key
    reason: str


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
class IsLost:
    """The worker ``worker`` is silent, and the others go on without it."""

    worker: Worker
    reason: str


@dataclass(frozen=True)
class Unheard:
    """A scheduler that may be started again has answered nothing for so many ``seconds``."""

    seconds: float


Effect: TypeAlias = (
    Replied | NotGranted | EpochBegan | GroupBroke | HandOver | Connect | IsLost | Unheard | Came | m.Invitation | e.End
)
"""Effects of a message; an invitation is to be followed, and a lost worker is reported to people."""
