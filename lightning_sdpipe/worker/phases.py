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


def following(phase: Phase, event: Event) -> Phase:
    """Return the phase that follows.

    Raises:
        ConfigurationError: the user's code has caused an event that may not happen in this phase.
    """
    follows = TRANSITIONS[phase].get(event)
    if follows is not None:
        return follows
    if event in (Event.DRAIN, Event.LEAVE):
        raise ConfigurationError(
            "Something communicates with the other pipelines within an optimizer step, while older mini-batches are "
            "still in this one. Do it in on_train_batch_end."
        )
    raise ConfigurationError(
        f"A worker that {phase.value} cannot {event.value}. Let the Trainer fetch the batches and step the optimizer."
    )


class Phases:
    """The phases that one worker is in: the one that lasts, and those that have begun in it. As a context, which
    :meth:`within` returns, it ends the innermost one."""

    def __init__(self) -> None:
        self._begun = [Phase.STEPPING]

    @property
    def now(self) -> Phase:
        """The innermost phase."""
        return self._begun[-1]

    def among(self, *phases: Phase) -> bool:
        """Return whether the worker is in one of ``phases``, innermost or not."""
        for begun in self._begun:  # noqa: SIM110  # asked often, and quicker than any() of a generator
            if begun in phases:
                return True
        return False

    def go(self, event: Event) -> None:
        """Note that ``event`` happens, after which one of the lasting phases begins."""
        self._begun[-1] = following(self._begun[-1], event)

    def within(self, event: Event) -> Self:
        """Begin the phase that follows ``event``; to be used as ``with phases.within(event):``, for the block."""
        self._begun.append(following(self._begun[-1], event))
        return self

    def __enter__(self) -> None:
        """Enter the block of the phase that has begun."""

    def __exit__(self, *_: object) -> None:
        self._begun.pop()
