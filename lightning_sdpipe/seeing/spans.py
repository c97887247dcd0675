"""Spans of the workers' newest updates, the messages between workers that belong together, and the differences of the
workers' clocks, as far as these messages determine them.

The functions are pure. No message arrives before it was sent. A message from a to b that was sent when a's clock showed
s, and had come when b's showed r, says x_a + s ≤ x_b + r, where x is what must be added to a clock to get the
scheduler's. So activations, which go down, bound the difference of two stages' clocks from one side, and gradients from
the other; between a worker and the scheduler, a heartbeat and its previous answer do. The shortest paths through all
such bounds are the narrowest that follow from them (systems of difference constraints: Cormen et al., Introduction to
Algorithms, §24.4). Their middle is taken: it keeps every single bound, so that no arrow of a trace points back in time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import networkx

from lightning_sdpipe import meter
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler.rows import SpanChunk

Node: TypeAlias = Worker | None
"""A worker, or None for the scheduler."""
_SCHEDULER = "scheduler"
"""The same in a graph, of which None can be no node."""


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


class Delivery(NamedTuple):
    """A message that ``sender`` sent when its clock showed ``sent``, and that had come to ``receiver`` when its clock
    showed ``came``, in microseconds."""

    sender: Node
    sent: int
    receiver: Node
    came: int


@dataclass(frozen=True)
class Clock:
    """A worker's clock: ``ahead``, give or take ``error``, must be added to it to get the scheduler's; in
    microseconds."""

    ahead: float
    error: float


@dataclass(frozen=True)
class Clocks:
    """Clocks of the workers that the bounds connect with the scheduler, in both directions.

    ``slack``, in microseconds, is the tolerance of every message that keeps the bounds from contradicting each other:
    clocks do not run equally fast.
    """

    of: dict[Worker, Clock]
    slack: int


def deliveries(stories: Sequence[Story]) -> Iterator[Delivery]:
    """Yield the messages between workers, and with the scheduler, whose send and arrival are known."""
    for story in stories:
        worker, spans = story.worker, story.chunk.spans
        yield Delivery(None, math.floor(spans.asked * 1e6), worker, spans.heard)
        yield Delivery(worker, spans.said, None, math.ceil(story.chunk.at * 1e6))
    for source, sent, target, received in paired(stories):
        yield Delivery(source.worker, sent.at, target.worker, received.at)


def settle(messages: Iterable[Delivery]) -> Clocks:
    """Determine the clocks from ``messages``."""
    tightest: dict[tuple[Node, Node], int] = {}
    for sender, sent, receiver, came in messages:
        way = receiver, sender
        tightest[way] = min(came - sent, tightest.get(way, came - sent))
    slack, bounds = 0, networkx.DiGraph()
    bounds.add_node(_SCHEDULER)
    while True:
        ways = ((start or _SCHEDULER, stop or _SCHEDULER, width + slack) for (start, stop), width in tightest.items())
        bounds.add_weighted_edges_from(ways)
        try:
            at_most, at_least = (
                networkx.single_source_bellman_ford_path_length(graph, _SCHEDULER)
                for graph in (bounds, bounds.reverse())
            )
            break
        except networkx.NetworkXUnbounded:  # a cycle is shorter than 0: the bounds contradict each other
            slack = max(1, 2 * slack)
    found = {
        worker: Clock((at_most[worker] - at_least[worker]) / 2, (at_most[worker] + at_least[worker]) / 2)
        for worker in at_most.keys() & at_least.keys()
        if worker != _SCHEDULER
    }
    return Clocks(found, slack)
