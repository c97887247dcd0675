"""Phases of a worker that trains, and the events that may happen in each. Rows are phases, columns events, and cells
the phase that follows; a dot is refused.

            batch     absence   fill      update     drain     leave
STEPPING    STEPPING  ABSENT    FILLING   UPDATING   DRAINING  LEAVING
FILLING     .         .         .         .          DRAINING  LEAVING
UPDATING    .         .         .         .          .         LEAVING
DRAINING    .         .         .         .          .         .
LEAVING     .         .         .         .          .         .
ABSENT      STEPPING  ABSENT    .         FINISHING  DRAINING  LEAVING
FINISHING   .         .         .         .          .         LEAVING

STEPPING and ABSENT last until the next event. The others end by themselves, in the phase in which they began. So a
worker drains before it leaves and before it is absent, and does not drain within an update.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Self

from lightning_sdpipe.errors import ConfigurationError


class Phase(StrEnum):
    """Phases of the worker."""

    STEPPING = "goes from mini-batch to mini-batch"
    FILLING = "runs a forward only, since its pipeline is not full yet (pipedream)"
    UPDATING = "trains a mini-batch within an optimizer step"
    DRAINING = "runs the backwards that are left in its pipeline, each with its update (pipedream)"
    LEAVING = "takes part no more, and waits for the other pipelines"
    ABSENT = "has no batch while others may have some, and trains nothing"
    FINISHING = "has no batch, and updates with gradients that earlier ones have left"


class Event(StrEnum):
    """Events that change the phase."""

    BATCH = "begin a turn with a batch"
    ABSENCE = "begin a turn without a batch"
    FILL = "be asked for an update while its pipeline is not full"
    UPDATE = "be asked for an update"
    DRAIN = "empty its pipeline"
    LEAVE = "wait for the other pipelines"


TRANSITIONS: Mapping[Phase, Mapping[Event, Phase]] = {
    Phase.STEPPING: {
        Event.BATCH: Phase.STEPPING,
        Event.ABSENCE: Phase.ABSENT,
        Event.FILL: Phase.FILLING,
        Event.UPDATE: Phase.UPDATING,
        Event.DRAIN: Phase.DRAINING,
        Event.LEAVE: Phase.LEAVING,
    },
    Phase.FILLING: {Event.DRAIN: Phase.DRAINING, Event.LEAVE: Phase.LEAVING},
    Phase.UPDATING: {Event.LEAVE: Phase.LEAVING},
    Phase.DRAINING: {},
    Phase.LEAVING: {},
    Phase.ABSENT: {
        Event.BATCH: Phase.STEPPING,
        Event.ABSENCE: Phase.ABSENT,
        Event.UPDATE: Phase.FINISHING,
        Event.DRAIN: Phase.DRAINING,
        Event.LEAVE: Phase.LEAVING,
    },
    Phase.FINISHING: {Event.LEAVE: Phase.LEAVING},
}


_WITHIN_AN_UPDATE = (Phase.UPDATING, Phase.DRAINING, Phase.FINISHING)


def _refusal(phase: Phase, event: Event) -> ConfigurationError:
    if event in (Event.DRAIN, Event.LEAVE):
        return ConfigurationError(
            "Something communicates with the other pipelines within an optimizer step, while older mini-batches are "
            "still in this one. Do it in on_train_batch_end."
        )
    return ConfigurationError(
        f"A worker that {phase.value} cannot {event.value}. Let the Trainer fetch the batches and step the optimizer."
    )


class Phases:
    """The phases that one worker is in: the one that lasts, and those that have begun in it. As a context, which
    :meth:`within` returns, it ends the innermost one."""

    def __init__(self) -> None:
        self.now = self.lasting = Phase.STEPPING
        """The innermost phase, and the one that lasts."""
        self.updating = False
        """True if the worker is in an update, innermost or not."""
        self._before: list[tuple[Phase, bool]] = []

    def go(self, event: Event) -> None:
        """Note that ``event`` happens, after which one of the lasting phases begins.

        Raises:
            ConfigurationError: the user's code has caused an event that may not happen in this phase.
        """
        follows = TRANSITIONS[self.now].get(event)
        if follows is None:
            raise _refusal(self.now, event)
        self.now = self.lasting = follows

    def within(self, event: Event) -> Self:
        """Begin the phase that follows ``event``; to be used as ``with phases.within(event):``, for the block.

        Raises:
            ConfigurationError: as :meth:`go`.
        """
        follows = TRANSITIONS[self.now].get(event)
        if follows is None:
            raise _refusal(self.now, event)
        self._before.append((self.now, self.updating))
        self.now, self.updating = follows, self.updating or follows in _WITHIN_AN_UPDATE
        return self

    def __enter__(self) -> None:
        """Enter the block of the phase that has begun."""

    def __exit__(self, *_: object) -> None:
        self.now, self.updating = self._before.pop()
