"""Spans of the workers' newest updates, and the messages between workers that belong together. The functions are
pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_sdpipe import meter
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler.rows import SpanChunk


class Piece(NamedTuple):
    """A span in which ``phase`` was on top, in microseconds of the worker's clock."""

    phase: int
    begin: int
    end: int


class Mark(NamedTuple):
    """A message of a ``lane``, sent or received ``at`` that time; ``piece`` is the span that it followed from, or
    ended."""

    lane: int
    number: int
    at: int
    piece: Piece | None


@dataclass
class Update:
    """An update of a worker, from the end of the one before."""

    number: int
    begin: int
    end: int
    pieces: list[Piece]


@dataclass
class Story:
    """The record of a worker's newest updates."""

    chunk: SpanChunk
    updates: list[Update] = field(default_factory=list)
    sent: list[Mark] = field(default_factory=list)
    received: list[Mark] = field(default_factory=list)
    hidden: list[tuple[int, int]] = field(default_factory=list)
    """Exchanges beside the training."""

    @property
    def worker(self) -> Worker:
        """Worker of the story."""
        return self.chunk.worker


def read(chunk: SpanChunk) -> Story:
    """Read ``chunk`` by update; spans that belong to no whole update are left out."""
    story, said = Story(chunk), chunk.spans.said
    begun: int | None = None
    pieces: list[Piece] = []
    messages: list[tuple[list[Mark], Mark]] = []
    for what, before, number in chunk.spans.kept:
        at = said - before
        if what >= 0:
            pieces.append(Piece(what, at, said - number))
        elif what in (meter.SENT, meter.RECEIVED):
            number, lane = divmod(number, meter.LANES)
            down = lane % 2 == 0
            if what == meter.SENT:
                phase, of = meter.FORWARD if down else meter.BACKWARD, story.sent
            else:
                phase, of = meter.WAIT_UP if down else meter.WAIT_DOWN, story.received
            piece = next((piece for piece in reversed(pieces) if piece.phase == phase), None)
            messages.append((of, Mark(lane, number, at, piece)))
        elif what == meter.HIDDEN:
            story.hidden.append((at, said - number))
        else:
            if what == meter.UPDATE and begun is not None:
                story.updates.append(Update(number, begun, at, pieces))
                for of, message in messages:
                    of.append(message)
            begun = at if what == meter.UPDATE else None
            pieces, messages = [], []
    if story.updates:
        first = story.updates[0].begin
        story.hidden = [(begin, end) for begin, end in story.hidden if end >= first]
    return story


def paired(stories: Sequence[Story]) -> Iterator[tuple[Story, Mark, Story, Mark]]:
    """Yield messages whose both ends are known; both ends count the messages of a lane of their pipeline."""
    ends = {
        (story.worker.pipeline, story.chunk.life, message.lane, message.number): (story, message)
        for story in stories
        for message in story.sent
    }
    for story in stories:
        for message in story.received:
            end = ends.get((story.worker.pipeline, story.chunk.life, message.lane, message.number))
            if end is not None:
                yield *end, story, message
