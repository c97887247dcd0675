"""Spans of the workers' newest updates, the two ends of each message between workers, and the differences of the
workers' clocks, as far as these messages determine them.

The functions are pure. No message arrives before it is sent. If a sent a message to b when a's clock showed s, and it
had come when b's showed r, then x_a + s ≤ x_b + r, where x must be added to a clock to get the scheduler's. So
activations, which go down, bound the difference of two stages' clocks from one side, and gradients from the other;
between a worker and the scheduler, a heartbeat and the previous answer do. The shortest paths through these bounds are
the narrowest bounds that follow from them (systems of difference constraints: Cormen et al., Introduction to
Algorithms, §24.4). The middle between two bounds is taken: it satisfies every bound, so no arrow of a trace points back
in time.
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
"""The scheduler in a graph, where None cannot be a node."""


class Piece(NamedTuple):
    """A span in which ``phase`` was on top, in microseconds of the worker's clock."""

    phase: int
    begin: int
    end: int


class Mark(NamedTuple):
    """A message in a ``lane``, sent or received at the time ``at``; ``piece`` is the span that made it, or the wait
    that it ended."""

    lane: int
    number: int
    at: int
    piece: Piece | None


@dataclass
class Update:
    """An update of a worker, from the end of the previous one."""

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
    """Read ``chunk`` by update; spans outside whole updates are left out."""
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
    """Yield the messages of which both ends are known. The ends match by lane and number, which both count."""
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
    """A message that ``sender`` sent when its clock showed ``sent``, and that had come when the clock of ``receiver``
    showed ``came``; in microseconds."""

    sender: Node
    sent: int
    receiver: Node
    came: int


@dataclass(frozen=True)
class Clock:
    """A worker's clock: add ``ahead``, give or take ``error``, to get the scheduler's; in microseconds."""

    ahead: float
    error: float


@dataclass(frozen=True)
class Clocks:
    """Clocks of the workers that bounds connect with the scheduler in both directions.

    Clocks do not run equally fast, so bounds may contradict each other; ``slack`` is the tolerance, in microseconds,
    that every message gets to prevent that.
    """

    of: dict[Worker, Clock]
    slack: int


def deliveries(stories: Sequence[Story]) -> Iterator[Delivery]:
    """Yield the messages between workers, and with the scheduler, of which send and arrival are known."""
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
        except networkx.NetworkXUnbounded:  # a negative cycle: the bounds contradict each other
            slack = max(1, 2 * slack)
    found = {
        worker: Clock((at_most[worker] - at_least[worker]) / 2, (at_most[worker] + at_least[worker]) / 2)
        for worker in at_most.keys() & at_least.keys()
        if worker != _SCHEDULER
    }
    return Clocks(found, slack)
