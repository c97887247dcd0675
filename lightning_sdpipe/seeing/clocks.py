"""By how much the clocks of workers differ, as far as what they have told each other says so. Pure.

Nothing arrives before it was sent. A message from a to b that was sent when a's clock showed s, and had come when b's
showed r, says x_a + s ≤ x_b + r, where x is what must be added to a clock to get the scheduler's. So activations, which
go down, bound the difference of two stages' clocks from one side, and gradients from the other; between a worker and
the scheduler, a beat and what was said before it do. The shortest ways through all such bounds are the narrowest that
follow from them (systems of difference constraints: Cormen et al., Introduction to Algorithms, §24.4). The middle of
them is taken: it keeps every single bound, so that no arrow of a trace points back in time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.seeing.stories import Story, paired

Node: TypeAlias = Worker | None
"""None is the scheduler."""


class Delivery(NamedTuple):
    """What ``sender`` sent when its clock showed ``sent`` had come to ``receiver`` when its showed ``came``; in
    microseconds."""

    sender: Node
    sent: int
    receiver: Node
    came: int


@dataclass(frozen=True)
class Clock:
    """``ahead`` is what must be added to a worker's clock to get the scheduler's, give or take ``error``; in
    microseconds."""

    ahead: float
    error: float


@dataclass(frozen=True)
class Clocks:
    """Those of workers that the bounds connect with the scheduler, by both directions.

    ``slack``, in microseconds, is what was allowed to every message so that the bounds do not contradict each other:
    clocks do not run equally fast.
    """

    of: dict[Worker, Clock]
    slack: int


def deliveries(stories: Sequence[Story]) -> Iterator[Delivery]:
    """What came to a worker or the scheduler after it was sent."""
    for story in stories:
        worker, spans = story.worker, story.chunk.spans
        yield Delivery(None, math.floor(spans.asked * 1e6), worker, spans.heard)
        yield Delivery(worker, spans.said, None, math.ceil(story.chunk.at * 1e6))
    for source, sent, target, received in paired(stories):
        yield Delivery(source.worker, sent.at, target.worker, received.at)


def settle(messages: Iterable[Delivery]) -> Clocks:
    """What ``messages`` say of clocks."""
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
    """The lengths of the shortest ways from the scheduler (Bellman and Ford); None if a circle is shorter than 0."""
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
