"""Registry of the process groups of an elastic run's workers, and of groups that wait until their members share one.

A worker makes a process group of its stage's replicas for each epoch of membership, in a thread, and reports which it
holds. A group that is decided before its members share one is kept for the few milliseconds that this takes, or until
the epoch is announced anew. A group with passive members is not kept: the others go on without these, unless an outcome
is handed over to them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from lightning_sdpipe.membership.membership import Membership
from lightning_sdpipe.policies.decisions import Group, without_passive
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler.server.liveness import Liveness

REMAKE_AFTER = 5.0
"""Seconds that an answer waits for a process group before the epoch is announced anew."""


@dataclass
class KeptGroup:
    """A group that waits until ``until`` for a process group of its members."""

    group: Group
    until: float

    @property
    def pipelines(self) -> list[int]:
        """Pipelines of its members."""
        return [worker.pipeline for worker in self.group.members]


class ProcessGroupRegistry:
    """Epochs whose process group each worker holds."""

    def __init__(self, membership: Membership, presence: Liveness) -> None:
        self.kept: dict[int, KeptGroup] = {}
        """Kept groups by sequence."""
        self.apart: dict[tuple[Worker, ...], KeptGroup] = {}
        """Groups that went out without their passive members, by the members, which share no process group yet."""
        self._membership, self._presence = membership, presence
        self._holds: dict[Worker, frozenset[int]] = {}
        self._given_up: dict[Worker, int] = {}
        """Number of the epoch that was the newest when a worker gave up its process group."""

    @property
    def in_use(self) -> bool:
        """True if this is an elastic run, as far as is known."""
        core = self._membership
        return not core.terms.fixed and (bool(self._presence.incarnations) or core.epoch.number > 0)

    @property
    def lacking(self) -> list[KeptGroup]:
        """Groups whose members share no process group yet."""
        return [*self.kept.values(), *self.apart.values()]

    def holds(self, worker: Worker, epochs: Iterable[int]) -> None:
        """Set the epochs whose process groups ``worker`` holds."""
        before, self._holds[worker] = self._holds.get(worker, frozenset()), frozenset(epochs)
        if (newest := self._membership.epoch.number) in before - self._holds[worker]:
            self._given_up[worker] = newest

    def gave_up(self, workers: Iterable[Worker]) -> bool:
        """Return whether an exchange has broken off in the newest epoch's process group for one of ``workers``."""
        return any(self._given_up.get(worker) == self._membership.epoch.number for worker in workers)

    def forget(self, worker: Worker) -> None:
        """Forget ``worker``, whose process is gone."""
        self._holds.pop(worker, None)
        self._given_up.pop(worker, None)

    def common(self, workers: Sequence[Worker]) -> int | None:
        """Return the newest epoch of which all of them hold a process group; one alone needs none."""
        if len(workers) < 2:
            return self._membership.epoch.number
        shared = frozenset.intersection(*(self._holds.get(worker, frozenset()) for worker in workers))
        return max(shared, default=None)

    def with_epoch(self, group: Group) -> Group | None:
        """Return ``group`` with the epoch whose process group its members share; None if there is none."""
        epoch = self.common(group.members)
        return None if epoch is None else msgspec.structs.replace(group, epoch=epoch)

    def ready_to_go(self, group: Group, now: float) -> Group | None:
        """Return ``group`` as it may go out, or None and keep it until it may."""
        if not self.in_use:
            return group
        ready = self.with_epoch(group)
        if ready is None and group.passive and group.source is None:
            self.apart.setdefault(group.members, KeptGroup(group, now + REMAKE_AFTER))
            group = without_passive(group)
            ready = self.with_epoch(group)
        if ready is None:
            decided = msgspec.structs.replace(group, epoch=self._membership.epoch.number)
            self.kept[group.sequence] = KeptGroup(decided, now + REMAKE_AFTER)
        return ready

    def come_together(self, here: Collection[Worker]) -> None:
        """Forget groups of :attr:`apart` whose members share a process group by now, or are not all ``here``."""
        for workers in list(self.apart):
            if self.common(workers) is not None or not all(worker in here for worker in workers):
                del self.apart[workers]

    def was_member(self, worker: Worker, epoch: int | None = None) -> bool:
        """Return whether the process that is ``worker`` is a member, and was one in that ``epoch``."""
        return self._membership.roster.was_member(
            worker.pipeline, self._membership.epoch.number if epoch is None else epoch
        )
