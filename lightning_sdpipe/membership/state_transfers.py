"""State transfers: which member gives a newcomer its state, and whether all of its stages give the same one.

Stage 0 of a donor is told of the transfer, and before a turn commands every stage to copy its state there
(:mod:`~lightning_sdpipe.membership.turn_order`). Each stage reports how many updates it had made. The first number is
U: a stage that reports another has copied at another point, so the transfer is void, and another donor is found. The
newcomer is told its donor when all have copied, and reports after how many updates the received state was copied. That
must be U.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_sdpipe.membership.members import Abandoned, Donate, MemberDecision, Receive
from lightning_sdpipe.policies.events import Worker


@dataclass
class StateTransfer:
    """A transfer of the state of ``donor`` to ``pipeline``, with a name of its own."""

    donor: int
    pipeline: int
    transfer: str
    updates: dict[int, int] = field(default_factory=dict)
    """Updates that each stage of the donor had made when it copied its state; all the same."""
    received: set[int] = field(default_factory=set)
    """Stages of the newcomer that have the state."""

    @property
    def update(self) -> int:
        """The number U, once a stage has copied."""
        return next(iter(self.updates.values()))


class StateTransfers:
    """The transfers under way, by newcomer. Each pipeline has ``num_stages`` stages."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._under_way: dict[int, StateTransfer] = {}
        self._failed: dict[int, set[int]] = {}
        """Donors that have failed each newcomer."""
        self._count = 0

    def number_from(self, count: int) -> None:
        """Number new transfers above ``count``; names up to it are those of an earlier scheduler."""
        self._count = max(self._count, count)

    def of(self, pipeline: int) -> StateTransfer | None:
        """Return the transfer to ``pipeline``, if one is under way."""
        return self._under_way.get(pipeline)

    def named(self, transfer: str) -> StateTransfer | None:
        """Return the transfer of that name, if it is under way."""
        return next((donation for donation in self._under_way.values() if donation.transfer == transfer), None)

    def taken_in(self, pipeline: int, stage: int) -> bool:
        """Return whether the donor's worker of ``stage`` has its copy for the newcomer ``pipeline``; if the donor has
        no such stage, whether all of its workers have."""
        donation = self._under_way.get(pipeline)
        if donation is None or stage < self._num_stages:
            return donation is not None and stage in donation.updates
        return self._is_copied(donation)

    def taken(self, pipeline: int) -> StateTransfer | None:
        """Return the transfer to ``pipeline``, if all stages of the donor have their copy."""
        donation = self._under_way.get(pipeline)
        return donation if donation is not None and self._is_copied(donation) else None

    def _is_copied(self, donation: StateTransfer) -> bool:
        return len(donation.updates) == self._num_stages

    def choose(self, pipeline: int, members: Mapping[int, int]) -> list[MemberDecision]:
        """Find a donor for ``pipeline`` among ``members`` (oldest first, with their incarnations): if there is a
        choice, one that has not failed it, is not the leader, and gives to few. The transfer is named by the donor's
        incarnation, too: a scheduler that does not know an earlier one counts from 1 again."""
        gives = [donation.donor for donation in self._under_way.values()]
        failed, age = self._failed.get(pipeline, set()), {i: age for age, i in enumerate(members)}
        donor = min(members, key=lambda i: (i in failed, age[i] == 0, gives.count(i), -age[i]))
        self._count += 1
        name = f"state-{pipeline}-{self._count}-{members[donor]:x}"
        self._under_way[pipeline] = donation = StateTransfer(donor, pipeline, name)
        return [Donate(donor, pipeline, donation.transfer)]

    def copied(self, stage: int, donor: int, transfer: str, update: int) -> list[MemberDecision]:
        """Note that a stage of ``donor`` has copied its state after ``update`` updates."""
        donation = self.named(transfer)
        if donation is None or donation.donor != donor:
            return [Abandoned(donor, transfer)]
        before = donation.updates
        if any(known != update for known in before.values()):
            at = ", ".join(f"stage {j} after {known}" for j, known in sorted(before.items()))
            void = f"{at}, stage {stage} after {update} updates, so the copies are not of one state"
            return self.give_up(donation.pipeline, transfer, void)
        if stage in before:
            return []
        before[stage] = update
        return [self.told(donation)] if self._is_copied(donation) else []

    def told(self, donation: StateTransfer) -> Receive:
        """Return what the newcomer is told."""
        return Receive(donation.pipeline, donation.donor, donation.transfer, donation.update)

    def wrong(self, pipeline: int, transfer: str, update: int) -> str:
        """Return what is wrong with a state after ``update`` updates that a stage of ``pipeline`` got by ``transfer``;
        empty if nothing."""
        donation = self.taken(pipeline)
        if donation is None or donation.transfer != transfer or donation.update == update:
            return ""
        return (
            f"the state that it has loaded of {transfer} is that after {update} updates, and pipeline {donation.donor} "
            f"gave that after {donation.update}"
        )

    def has_received(self, pipeline: int, stage: int, transfer: str) -> bool:
        """Note that a stage of the newcomer has the state; return whether all have it."""
        donation = self.taken(pipeline)
        if donation is None or donation.transfer != transfer:
            return False
        donation.received.add(stage)
        return len(donation.received) == self._num_stages

    def give_up(self, pipeline: int, transfer: str, void: str = "") -> list[MemberDecision]:
        """Give up the transfer to ``pipeline``, which needs another donor; do nothing if another transfer is under
        way."""
        donation = self._under_way.get(pipeline)
        if donation is None or donation.transfer != transfer:
            return []
        self._failed.setdefault(pipeline, set()).add(donation.donor)
        return self.end(pipeline, void)

    def end(self, pipeline: int, void: str = "") -> list[MemberDecision]:
        """End the transfer to ``pipeline``, which no longer needs its donor."""
        donation = self._under_way.pop(pipeline, None)
        return [] if donation is None else [Abandoned(donation.donor, donation.transfer, void)]

    def forget(self, pipeline: int) -> None:
        """Forget the donors that failed ``pipeline``, whose start is over; its next one may have them."""
        self._failed.pop(pipeline, None)

    def without_donor(self, gone: int) -> list[int]:
        """End the transfers of the donor ``gone``; return their newcomers."""
        newcomers = [pipeline for pipeline, donation in self._under_way.items() if donation.donor == gone]
        for pipeline in newcomers:
            del self._under_way[pipeline]
        return newcomers

    def unheard(self, worker: Worker) -> tuple[str, ...]:
        """Return the transfers for which ``worker``, stage 0 of a donor, has not copied its state: it may not have
        heard of them."""
        if worker.stage:
            return ()
        mine = [donation for donation in self._under_way.values() if donation.donor == worker.pipeline]
        return tuple(donation.transfer for donation in mine if 0 not in donation.updates)

    def under_way(self) -> Mapping[int, StateTransfer]:
        """Return the transfers under way, by newcomer."""
        return self._under_way
