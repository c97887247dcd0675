"""Commands on which the stages of a pipeline agree before each turn. The scheduler tells only stage 0 what there is to
do. Stage 0 passes it on before a turn, and the others do it before theirs, so all do it after the same update."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple


class CommandKind(IntEnum):
    """The kinds of commands."""

    GO = 0
    """Begin the turn."""
    DONATE = 1
    """Give the state to the newcomer of the named transfer, then listen again."""
    LEAVE = 2
    """End, since the pipeline was told to."""
    AGREE = 3
    """Report which batches of lost pipelines are in the model of each stage, then listen again."""
    HOLD = 4
    """Listen again: no turn may begin yet."""


class Command(NamedTuple):
    """A command of stage 0; ``text`` is ASCII and short."""

    kind: CommandKind
    text: str = ""


def turn_order(leaving: bool, donations: Sequence[str], held: str) -> Command | None:
    """Return the command of stage 0 before a turn; None while none may begin. Newcomers come before a reason to wait,
    since a run that is held needs them.

    Args:
        leaving: this pipeline was told to end.
        donations: the transfers for which this pipeline has still to copy its state, the oldest first.
        held: reason why no turn may begin now; empty if one may.
    """
    if leaving:
        return Command(CommandKind.LEAVE)
    if donations:
        return Command(CommandKind.DONATE, donations[0])
    return None if held else Command(CommandKind.GO)
