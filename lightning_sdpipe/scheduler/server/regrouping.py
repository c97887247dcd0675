"""What becomes of a group whose members did not average: decided when each is gone, has the result, or has said no.

Models: those without the result try again among themselves; who has it goes on with it. Gradients of a round
(``together``) would make replicas differ then, so those without take the state of one that has it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import elastic_protocol as e

REMEMBERED = 256
"""Broken groups whose outcome can be asked for again."""
MOST_OPEN = 64
"""Broken groups of one worker that are not decided; a worker is in a few groups at once."""


@dataclass
class Broken:
    """A group that at least one member did not get the result of."""

    group: Group
    together: bool
    said: set[Worker] = field(default_factory=set)
    """Who tries again."""
    done: set[Worker] = field(default_factory=set)
    """Who has the result."""

    def undecided(self, is_gone: Callable[[Worker, int], bool]) -> list[Worker]:
        """Who may still say one or the other."""
        known, sequence = self.said | self.done, self.group.sequence
        return [worker for worker in self.group.members if worker not in known and not is_gone(worker, sequence)]

    def weights(self) -> tuple[tuple[Worker, ...], tuple[float, ...]]:
        """Of those who try again."""
        pairs = [pair for pair in zip(self.group.members, self.group.weights, strict=True) if pair[0] in self.said]
        return tuple(worker for worker, _ in pairs), tuple(weight for _, weight in pairs)


class Regrouping:
    """Groups that broke, by number, and what was answered."""

    def __init__(self) -> None:
        self.open: dict[int, Broken] = {}
        self.decided: OrderedDict[int, None] = OrderedDict()
        """Those of which it is decided who tries again, though perhaps not yet in which process group."""
        self._outcomes: OrderedDict[int, dict[Worker, e.Regroup | e.Skip]] = OrderedDict()

    def hear(self, worker: Worker, group: Group, together: bool) -> Broken | None:
        """``worker`` did not get the result; None if it says so of more groups than it can be in."""
        others = [sequence for sequence, broken in self.open.items() if worker in broken.said]
        if group.sequence not in others and len(others) >= MOST_OPEN:
            return None
        broken = self.open.setdefault(group.sequence, Broken(group, together))
        broken.done.discard(worker)
        broken.said.add(worker)
        return broken

    def completed(self, worker: Worker, sequence: int) -> None:
        """``worker`` has the result of that group."""
        broken = self.open.get(sequence)
        if broken is not None and worker not in broken.said:
            broken.done.add(worker)

    def outcome(self, worker: Worker, sequence: int) -> e.Regroup | e.Skip | None:
        """What ``worker`` was answered."""
        return self._outcomes.get(sequence, {}).get(worker)

    def remember(self, sequence: int, answer: e.Regroup | e.Skip, workers: Sequence[Worker]) -> None:
        """That is what they were answered."""
        self._outcomes.setdefault(sequence, {}).update(dict.fromkeys(workers, answer))
        while len(self._outcomes) > REMEMBERED:
            self._outcomes.popitem(last=False)

    def goes(self, worker: Worker) -> None:
        """Its process is gone."""
        for sequence, broken in list(self.open.items()):
            broken.said.discard(worker)
            broken.done.discard(worker)
            if not broken.said:  # a member that misses the result, too, will say so itself
                del self.open[sequence]

    def settled(self, is_gone: Callable[[Worker, int], bool], takes_part: Callable[[Worker], bool]) -> Iterator[Broken]:
        """Those that can be decided; they are open no longer. A restarted scheduler may hear of one from a worker whose
        session has still to join."""
        for sequence, broken in list(self.open.items()):
            if not broken.undecided(is_gone) and all(takes_part(worker) for worker in broken.said):
                del self.open[sequence]
                self.decided[sequence] = None
                while len(self.decided) > REMEMBERED:
                    self.decided.popitem(last=False)
                yield broken
