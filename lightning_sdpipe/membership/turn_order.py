"""What the stages of a pipeline agree on before each turn. The scheduler tells stage 0 alone what there is to do. That
stage says it before a turn, and the others do it before theirs, so all do it after the same update."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple


class CommandKind(IntEnum):
    """What to do."""

    GO = 0
    """Begin the turn."""
    DONATE = 1
    """Give the state to the newcomer of the transfer that is named, then listen again."""
    LEAVE = 2
    """End: the pipeline was told to."""
    AGREE = 3
    """Say which batches of pipelines that are gone are in the model of each stage, then listen again."""


class Command(NamedTuple):
    """One that stage 0 says; ``text`` is ASCII and short."""

    kind: CommandKind
    text: str = ""


def turn_order(leaving: bool, donations: Sequence[str], held: str) -> Command | None:
    """What stage 0 says before a turn; None while none may begin. Newcomers come before a reason to wait, since a run
    that is held needs them.

    Args:
        leaving: this pipeline was told to end.
        donations: the transfers for which this pipeline has still to copy its state, the oldest first.
        held: why no turn may begin now, if there is a reason.
    """
    if leaving:
        return Command(CommandKind.LEAVE)
    if donations:
        return Command(CommandKind.DONATE, donations[0])
    return None if held else Command(CommandKind.GO)
