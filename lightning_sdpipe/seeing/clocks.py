"""Differences of the workers' clocks, as far as their messages to each other determine them.

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
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.seeing.stories import Story, paired

Node: TypeAlias = Worker | None
"""A worker, or None for the scheduler."""


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
    slack = 0
    while True:
        down = [(start, stop, width + slack) for (start, stop), width in tightest.items()]
        at_most = _shortest(down)
        at_least = _shortest([(stop, start, width) for start, stop, width in down])
        if at_most is not None and at_least is not None:
            break
        slack = max(1, 2 * slack)
    found = {
        worker: Clock((at_most[worker] - at_least[worker]) / 2, (at_most[worker] + at_least[worker]) / 2)
        for worker in at_most.keys() & at_least.keys()
        if worker is not None
    }
    return Clocks(found, slack)


def _shortest(edges: Sequence[tuple[Node, Node, int]]) -> dict[Node, int] | None:
    """Return the lengths of the shortest paths from the scheduler (Bellman and Ford); None if a cycle is shorter than
    0."""
    nodes = {node for start, stop, _ in edges for node in (start, stop)}
    lengths: dict[Node, int] = {None: 0}
    for _ in range(len(nodes) + 1):
        shorter = False
        for start, stop, width in edges:
            if start in lengths and (stop not in lengths or lengths[start] + width < lengths[stop]):
                lengths[stop] = lengths[start] + width
                shorter = True
        if not shorter:
            return lengths
    return None
