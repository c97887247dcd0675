"""Division of joint batches among pipelines, which may come and go: pure, and the same on all of them.

Round r joins batch r of every home shard. Each of these has P micro-batches, so a round has N × P, whichever pipelines
are there. A *division* names pipelines and their speeds; each trains a share of a round by its speed. The share of a
pipeline that gave nothing to a round is *missed*, which all others see from what each gave. After the rounds of a
segment, the missed micro-batches are trained in further turns, until none is left.

A new division is made after a round whose members are not those of the division, and now and then by newer speeds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from lightning_sdpipe.dealing.proportional import shares_by_speed

PartKey = tuple[int, int, int]
"""A micro-batch of an epoch: home shard, number of the batch in it, and part of that."""

LONGEST = 32
"""Most rounds between two looks at the speeds."""
WORTH = 0.95
"""A new division among the same pipelines replaces the old one if it takes less than this part of its time."""

_TURNS = 2
"""Number of turns after which stages know that they had different members in one."""


class JointRounds:
    """The turns of a segment.

    Args:
        shards: N.
        parts: P.
        unit: number of micro-batches that a share is a multiple of.
        bubble: returns how long a pipeline is idle in a round, in times of its micro-batch.
    """

    def __init__(
        self, shards: int, parts: int, unit: int = 1, bubble: Callable[[int], int] = lambda pipeline: 0
    ) -> None:
        self._shards, self._parts, self._unit, self._bubble = shards, parts, unit, bubble
        self.seconds: dict[int, float] = dict.fromkeys(range(shards), 1.0)
        """The division: seconds of a micro-batch of each of its pipelines."""
        self.number = self.stop = 0
        """Round that comes next, and the one after the segment's last."""
        self.missed: list[PartKey] = []
        self.members: tuple[int, ...] = ()
        """Pipelines in the last round."""
        self.heard: dict[int, float] = {}
        """Seconds of a micro-batch that each member of the last round has reported."""
        self.doubts = False
        """Whether stages may have had different members, so that they must agree on what is missed."""
        self.counts = False
        """Whether the last turn counts."""
        self._epoch = 0  # of membership, of the last round
        self._last: tuple[list[PartKey], list[PartKey]] = ([], [])
        """Micro-batches of the last turn, and those of them that were not in its round."""
        self._before: tuple[int, list[PartKey]] = (0, [])
        """Round and missed micro-batches before the last turn."""
        self._turns, self._look_at = 0, 1
        self._recent: deque[tuple[list[PartKey], list[PartKey]]] = deque(maxlen=_TURNS + 1)  # one may be undone

    def begin(self, start: int, stop: int) -> None:
        """Begin a segment of the rounds ``start`` to ``stop`` − 1."""
        self.number, self.stop = start, stop
        self.missed, self.doubts, self.counts = [], False, False
        self._recent.clear()

    @property
    def over(self) -> bool:
        """True if there is nothing left to train in this segment."""
        return self.number >= self.stop and not self.missed

    @property
    def looks(self) -> bool:
        """True if a new division is to be made before the next turn."""
        return self._turns > 0 and ({*self.members} != {*self.seconds} or self._turns >= self._look_at)

    def turn(self) -> dict[int, list[PartKey]]:
        """Return what each pipeline of the division trains in the next turn."""
        return self._divide(self._places(self.number), self.seconds)

    def ahead(self, pipeline: int) -> Iterator[list[PartKey]]:
        """Yield what ``pipeline`` trains in each round after the next, by the division at the time when it is asked
        for."""
        numbers = range(self.number + 1, self.stop)
        shares = (self._divide(self._places(number), self.seconds).get(pipeline) for number in numbers)
        return filter(None, shares)

    def ended(self, members: Sequence[int], trained: Collection[int], seconds: Mapping[int, float], epoch: int) -> None:
        """Note that the turn is over. A turn in which no pipeline has trained does not count.

        Args:
            members: the pipelines in its round.
            trained: those of them that have trained their share.
            seconds: seconds that each member takes for a micro-batch, 0 where that is not known.
            epoch: the epoch of membership that the round was of. A pipeline that was lost in a round and is back in
                the next one is there in another epoch.
        """
        turn, stays = self.turn(), {*self.members} <= {*members} and epoch == self._epoch
        self.members, self.heard, self._epoch = tuple(members), dict(seconds), epoch
        self._last = (
            [place for mine in turn.values() for place in mine],
            [place for pipeline, mine in turn.items() if pipeline not in trained for place in mine],
        )
        self._before, self.counts = (self.number, self.missed), False
        self.settle(bool(trained))
        self.doubts |= bool(self._last[1]) or self.number >= self.stop or not stays

    def settle(self, counts: bool) -> None:
        """Note whether the last turn counts. Stages may differ in that, if a pipeline was lost in it: then stage 0 is
        right."""
        if counts == self.counts:
            return
        self.counts = counts
        if not counts:
            self.number, self.missed = self._before
            self._turns -= 1
            self._recent.pop()
            return
        places, lost = self._last
        if self.number < self.stop:
            self.number += 1
        self.missed = sorted(({*self.missed} - {*places}) | {*lost})
        self._turns += 1
        self._recent.append(self._last)

    def flags(self) -> list[int]:
        """Return for each micro-batch of the last two turns whether it was in a round of this stage."""
        return [int(place not in lost) for places, lost in [*self._recent][-_TURNS:] for place in places]

    def agree(self, flags: Sequence[int]) -> None:
        """Take over which micro-batches of the last two turns were in a round of every stage."""
        places = [place for places, _ in [*self._recent][-_TURNS:] for place in places]
        lost = {place for place, flag in zip(places, flags, strict=True) if not flag}
        self.missed = sorted({*self.missed, *lost})
        self._recent.clear()
        self.doubts = False

    def divide_by(self, seconds: Mapping[int, float]) -> None:
        """Make a division among the pipelines in ``seconds``, unless the last one has the same and the gain is small.
        An unknown time, 0, counts as the mean."""
        known = [each for each in seconds.values() if each > 0]
        usual = sum(known) / len(known) if known else 1.0
        new = {pipeline: seconds[pipeline] or usual for pipeline in sorted(seconds)}
        if new.keys() != self.seconds.keys() or self._longest(new, new) < WORTH * self._longest(self.seconds, new):
            self.seconds = new
        if self._turns >= self._look_at:
            self._look_at = self._turns + min(2 * self._turns, LONGEST)

    def state(self) -> dict[str, Any]:
        """Return the state that a newcomer needs, as plain values."""
        return {
            "division": [[pipeline, each] for pipeline, each in self.seconds.items()],
            "number": self.number,
            "stop": self.stop,
            "missed": [list(place) for place in self.missed],
            "members": list(self.members),
            "epoch": self._epoch,
            "heard": [[pipeline, each] for pipeline, each in self.heard.items()],
            "turns": [self._turns, self._look_at],
            "doubts": self.doubts,
            "recent": [[[list(place) for place in each] for each in turn] for turn in self._recent],
            "last": [[list(place) for place in each] for each in self._last],
            "before": [self._before[0], [list(place) for place in self._before[1]]],
            "counts": self.counts,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over the state of another pipeline."""
        self.seconds = {int(pipeline): float(each) for pipeline, each in state["division"]}
        self.number, self.stop = state["number"], state["stop"]
        self.missed = _as_places(state["missed"])
        self.members, self.heard, self._epoch = tuple(state["members"]), dict(state["heard"]), state["epoch"]
        self._turns, self._look_at = state["turns"]
        self.doubts = state["doubts"]
        self._recent.clear()
        self._recent.extend((_as_places(places), _as_places(lost)) for places, lost in state["recent"])
        self._last = _as_places(state["last"][0]), _as_places(state["last"][1])
        self._before, self.counts = (state["before"][0], _as_places(state["before"][1])), state["counts"]

    def _places(self, number: int) -> list[PartKey]:
        size = self._shards * self._parts
        if number >= self.stop:
            return self.missed[:size]
        return [(home, number, part) for home in range(self._shards) for part in range(self._parts)]

    def _divide(self, places: Sequence[PartKey], seconds: Mapping[int, float]) -> dict[int, list[PartKey]]:
        chunks = [places[first : first + self._unit] for first in range(0, len(places), self._unit)]
        given = self._shares(len(chunks), seconds)
        left = iter(chunks)
        return {i: [place for _ in range(given[i]) for place in next(left)] for i in given if given[i]}

    def _shares(self, chunks: int, seconds: Mapping[int, float]) -> dict[int, int]:
        return shares_by_speed(chunks, {i: (self._bubble(i) * each, self._unit * each) for i, each in seconds.items()})

    def _longest(self, division: Mapping[int, float], seconds: Mapping[int, float]) -> float:
        """Return the time of a round that is divided by ``division`` among pipelines that take ``seconds``."""
        given = self._shares(self._shards * self._parts // self._unit, division)
        return max((self._bubble(i) + self._unit * given[i]) * seconds[i] for i in given)


def _as_places(given: Sequence[Sequence[int]]) -> list[PartKey]:
    return [(home, number, part) for home, number, part in given]


def there(members: Collection[int]) -> int:
    """Return ``members`` as the bits of a number."""
    return sum(1 << pipeline for pipeline in members)


def members_of(bits: int) -> list[int]:
    """Return the members that :func:`there` has put into ``bits``."""
    return [pipeline for pipeline in range(bits.bit_length()) if bits >> pipeline & 1]
