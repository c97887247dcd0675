"""Averaging by section, where pipelines are cut differently, so that stages have no replicas with the same parameters.

Each section of the chain has its own replicas, and a worker may exchange several sections. All workers go through their
sections in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from torch import Tensor, nn

from lightning_sdpipe.exchange.gradient_rounds import Averaged, GradientRounds
from lightning_sdpipe.exchange.moving import Mover, Pending
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.topology.groups import Replicas


@dataclass(frozen=True)
class OwnSections:
    """The sections that this worker exchanges, by number."""

    replicas: Mapping[int, Replicas]
    """Replicas of each section."""
    parameters: Mapping[nn.Parameter, int]
    """Section of each parameter that this worker exchanges; it may hold others, as copies."""
    buffers: Mapping[int, Sequence[Tensor]]
    beside: Mapping[int, Replicas] = field(default_factory=dict)
    """Replicas of each section over separate process groups, where a thread exchanges beside training."""

    @property
    def numbers(self) -> list[int]:
        """Numbers of the sections in increasing order, in which all workers go through theirs."""
        return sorted(self.replicas)

    @property
    def in_order(self) -> list[Replicas]:
        """Replicas of each section, in that order."""
        return [self.replicas[number] for number in self.numbers]


class SectionedMover:
    """Moves the tensors of each section by a separate mover, one section after the other.

    A worker begins a section when the one before is done. So it may wait for another worker in a section, but no worker
    waits for it in an earlier one. Groups go out in one order, too, so there is no deadlock.

    Args:
        movers: movers of this worker's sections, in the order in which all workers go through theirs.
        counts: gives the number of tensors of each section.
    """

    def __init__(self, movers: Sequence[Mover], counts: Callable[[], Sequence[int]]) -> None:
        self._movers, self._counts = movers, counts

    def start(self, tensors: Sequence[Tensor], group: Group) -> Pending:
        return _Sections(zip(self._movers, parted(tensors, self._counts()), strict=True), group)


class _Sections:
    def __init__(self, sections: Iterable[tuple[Mover, Sequence[Tensor]]], group: Group) -> None:
        self.seconds_waiting = 0.0
        self._to_come = deque(sections)
        self._group = group
        self._now: Pending | None = None
        self._begin()

    def wait(self) -> bool:
        while self._now is not None:
            if self._now.wait():
                return True
            self.seconds_waiting += self._now.seconds_waiting
            self._begin()
        return False

    def commit(self) -> None:
        assert self._now is not None, "wait() comes before commit()"
        self._now.commit()

    def abort(self) -> None:
        self._to_come.clear()
        if self._now is not None:
            self._now.abort()
            self._now = None

    def _begin(self) -> None:
        """Start the next section, if there is one."""
        self._now = None
        if self._to_come:
            mover, tensors = self._to_come.popleft()
            self._now = mover.start(tensors, self._group)


def parted(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Sequence[Tensor]]:
    """Divide ``tensors`` by ``counts``, the number for each section, in order."""
    ends = [*accumulate(counts)]
    return [tensors[end - count : end] for end, count in zip(ends, counts, strict=True)]


def accompany(rounds: GradientRounds | SectionedRounds, number: int) -> None:
    """Take part in the rounds of the others, without any of the ``number`` gradients, until no replica trains."""
    while True:
        rounds.complete([None] * number, trains=False)
        if rounds.wait().members == 0:
            return


class SectionedRounds:
    """Combines the :class:`~lightning_sdpipe.exchange.gradient_rounds.GradientRounds` of this worker's sections. All
    sections begin before any is waited for, so no worker waits for one that waits elsewhere.

    Args:
        parameters: parameters in an order that is the same within a section on all its replicas; call :meth:`arrange`
            when the sequence has changed.
        sections: the sections of this worker. The gradients of other parameters are left as they are.
        cap: see the rounds of a section.
        watch: whether to check that gradients are finite.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], sections: OwnSections, cap: int, watch: bool) -> None:
        self._parameters = parameters
        self._sections = sections
        self._members: dict[int, list[nn.Parameter]] = {number: [] for number in sections.replicas}
        self._rounds = {
            number: GradientRounds(self._members[number], replicas, cap, watch)
            for number, replicas in sections.replicas.items()
        }
        self.arrange()

    def arrange(self) -> None:
        """See the rounds of a section."""
        self._numbers: dict[int, list[int]] = {section: [] for section in self._rounds}  # of its parameters
        self._places: dict[int, tuple[int, int]] = {}  # the section of each number, and its number there
        for number, parameter in enumerate(self._parameters):
            section = self._sections.parameters.get(parameter)
            if section is not None:
                self._places[number] = section, len(self._numbers[section])
                self._numbers[section].append(number)
        for section, rounds in self._rounds.items():
            self._members[section][:] = [self._parameters[number] for number in self._numbers[section]]
            rounds.arrange()
        self.early = [n for n, (section, place) in self._places.items() if place in self._rounds[section].early]
        """See the rounds of a section."""
        self.nbytes = sum(rounds.nbytes for rounds in self._rounds.values())
        self._given: Sequence[Tensor | None] = ()

    @property
    def weight(self) -> float:
        """Weight of this worker's gradients in the means; to be set before the first one of a round."""
        return next(iter(self._rounds.values())).weight

    @weight.setter
    def weight(self, weight: float) -> None:
        for rounds in self._rounds.values():
            rounds.weight = weight

    def gradient_ready(self, number: int, gradient: Tensor) -> None:
        """See the rounds of a section, as for the next two methods."""
        if number in self._places:
            section, place = self._places[number]
            self._rounds[section].gradient_ready(place, gradient)

    def complete(self, gradients: Sequence[Tensor | None], trains: bool = True) -> None:
        self._given = gradients
        for section in sorted(self._rounds, reverse=True):  # as a backward completes them
            own = [gradients[number] for number in self._numbers[section]]
            self._rounds[section].complete(own, trains)

    def wait(self) -> Averaged:
        found = {section: rounds.wait() for section, rounds in sorted(self._rounds.items(), reverse=True)}
        gradients = list(self._given)
        for section, outcome in found.items():
            for number, gradient in zip(self._numbers[section], outcome.gradients, strict=True):
                gradients[number] = gradient
        outcomes = list(found.values())
        return Averaged(
            gradients,
            outcomes[0].members,
            sorted({pipeline for outcome in outcomes for pipeline in outcome.nonfinite}),
            sum(outcome.seconds_waiting for outcome in outcomes),
            sum(outcome.seconds_averaging for outcome in outcomes),
        )
