"""How a newcomer gets its state: which member gives it, and at which update all stages of that one take their snapshot.

All stages of a donor must take it after the same update U. The scheduler does not know how far they are, so it proposes
one, and each stage says whether that is still to come. If it is past for any, a later one is proposed: by 1, 2, 4, …
more than the furthest, since stages run while messages travel. The newcomer hears of its donor when all have taken it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_sdpipe.membership.members import Abandoned, Donate, MemberDecision, Receive
from lightning_sdpipe.policies.events import Worker

MOST_AHEAD = 64
"""Updates beyond the furthest stage that are proposed at most."""


@dataclass
class StateTransfer:
    """Of ``donor`` to ``pipeline``."""

    donor: int
    pipeline: int
    number: int
    at_update: int
    ahead: int = 1
    said: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Of each stage of the donor: what it said to the newest proposal, and its update."""
    received: set[int] = field(default_factory=set)
    """Stages of the newcomer that have it."""

    @property
    def transfer(self) -> str:
        """Its name, new for each proposal."""
        return f"state-{self.pipeline}-{self.number}"

    def taken(self, num_stages: int) -> bool:
        """Have all stages of the donor their snapshot?"""
        return len(self.said) == num_stages and all(state == "taken" for state, _ in self.said.values())


class StateTransfers:
    """Those under way, by newcomer."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._under_way: dict[int, StateTransfer] = {}
        self._failed: dict[int, set[int]] = {}
        """Donors that have failed a newcomer."""
        self._count = 0

    def number_from(self, count: int) -> None:
        """Numbers up to that are those of an earlier scheduler."""
        self._count = max(self._count, count)

    def of(self, pipeline: int) -> StateTransfer | None:
        """What ``pipeline`` receives."""
        return self._under_way.get(pipeline)

    def taken_in(self, pipeline: int, stage: int) -> bool:
        """Has the donor's worker of ``stage`` its snapshot for the newcomer ``pipeline``?"""
        donation = self._under_way.get(pipeline)
        return donation is not None and donation.said.get(stage, ("", 0))[0] == "taken"

    def snapshot_taken(self, pipeline: int) -> bool:
        """Is the state of the newcomer ``pipeline`` that of a certain update by now?"""
        donation = self._under_way.get(pipeline)
        return donation is not None and donation.taken(self._num_stages)

    def choose(self, pipeline: int, members: Sequence[int]) -> list[MemberDecision]:
        """Finds a donor for ``pipeline`` among ``members``, oldest first: one that has not failed it, who gives to few,
        and no leader, if there is a choice."""
        gives = [donation.donor for donation in self._under_way.values()]
        failed, age = self._failed.get(pipeline, set()), {i: age for age, i in enumerate(members)}
        donor = min(members, key=lambda i: (i in failed, age[i] == 0, gives.count(i), -age[i]))
        self._under_way[pipeline] = donation = StateTransfer(donor, pipeline, self._next(), 0)
        return [self._proposal(donation)]

    def hear(self, stage: int, donor: int, transfer: str, update: int, state: str) -> list[MemberDecision]:
        """What a stage of ``donor`` said."""
        donation = self._named(transfer)
        if donation is None or donation.donor != donor:
            return [Abandoned(donor, transfer)]
        if donation.said.get(stage, ("", 0))[0] != "taken":  # what is late says less
            donation.said[stage] = state, update
        if len(donation.said) < self._num_stages:
            return []
        if any(state == "past" for state, _ in donation.said.values()):
            furthest = max(update for _, update in donation.said.values())
            donation.at_update = max(furthest, donation.at_update) + donation.ahead
            donation.ahead = min(2 * donation.ahead, MOST_AHEAD)
            donation.number, donation.said = self._next(), {}
            return [self._proposal(donation)]
        return [self.told(donation)] if donation.taken(self._num_stages) else []

    def told(self, donation: StateTransfer) -> Receive:
        """What the newcomer is told."""
        return Receive(donation.pipeline, donation.donor, donation.transfer, donation.at_update)

    def has_received(self, pipeline: int, stage: int, transfer: str) -> bool:
        """A stage of the newcomer has it; have all?"""
        donation = self._under_way.get(pipeline)
        if donation is None or donation.transfer != transfer or not donation.taken(self._num_stages):
            return False
        donation.received.add(stage)
        return len(donation.received) == self._num_stages

    def failed(self, pipeline: int, transfer: str) -> bool:
        """A stage of the newcomer did not get it; False if that is known, or another is under way."""
        donation = self._under_way.get(pipeline)
        if donation is None or donation.transfer != transfer:
            return False
        self._failed.setdefault(pipeline, set()).add(donation.donor)
        return True

    def end(self, pipeline: int) -> list[MemberDecision]:
        """``pipeline`` needs its donor no longer."""
        donation = self._under_way.pop(pipeline, None)
        return [] if donation is None else [Abandoned(donation.donor, donation.transfer)]

    def forget(self, pipeline: int) -> None:
        """That start of ``pipeline`` is over: its next one has no bad experience of anybody."""
        self._failed.pop(pipeline, None)

    def without_donor(self, gone: int) -> list[int]:
        """Newcomers whose donor was ``gone``, and which need another."""
        lost = [pipeline for pipeline, donation in self._under_way.items() if donation.donor == gone]
        for pipeline in lost:
            del self._under_way[pipeline]
        return lost

    def unheard(self, worker: Worker) -> list[Donate]:
        """Proposals to the donor's ``worker`` to which it has said nothing: they may have been lost."""
        mine = [donation for donation in self._under_way.values() if donation.donor == worker.pipeline]
        return [self._proposal(donation) for donation in mine if worker.stage not in donation.said]

    def under_way(self) -> Mapping[int, StateTransfer]:
        """By newcomer."""
        return self._under_way

    def _named(self, transfer: str) -> StateTransfer | None:
        return next((d for d in self._under_way.values() if d.transfer == transfer), None)

    def _next(self) -> int:
        self._count += 1
        return self._count

    @staticmethod
    def _proposal(donation: StateTransfer) -> Donate:
        return Donate(donation.donor, donation.pipeline, donation.transfer, donation.at_update, donation.number)
