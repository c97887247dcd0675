"""Rounds of an outer optimizer (DiLoCo) of all pipelines that are there, with one lineage of bases.

Each worker trains from a *base*, the result of a round, and brings what its model has moved by. A round makes a new
base of the newest one. Three rules keep all bases of a stage in one line, though workers come, go, and lack results:

1. *The newest base.* A round goes out when all that take part are ready. A member whose base is older gets the newest
   one in full, and what it brings is the difference from its own.
2. *Handed over.* A member that did not get the result of a round gets the new base from one that has it, since what it
   brought is in there.
3. *Made again, or dropped.* If none of the members that are left has the result, they make the round again if one of
   them has the newest base. Otherwise no base is made, and each keeps what it brought for its next round. Unless
   one that was in no round meanwhile may have it: it was handed over to it by a member that is gone. What they brought
   is in there then, and they drop it.

What a worker may have is known from above: the base that it named when it was ready, until a round of it goes out,
which it may or may not get. A worker that joins may have the newest of all. If it turns out to have the base of a round
that was given up, from a donor or by hand from a member that is gone, then that counts as older than all others.

A round is due when all together have made ``every`` updates for each pipeline that was planned. They say that they are
ready as soon as they could be in it, and train on: fast ones make more updates than slow ones, and none waits.

With several stages a pipeline is ready when all of its stages are, and one group goes out for each stage, of the same
pipelines; so no stage waits for another one's round. Each stage has a lineage of its own.

A worker that has left keeps its base. If all that have the newest one have left, rounds of the others are dropped until
one of them returns, or is gone, or all meet. No worker waits for ever: when all are ready, a group goes out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from lightning_sdpipe.policies.decisions import Decision, Group, Lineage, Reason
from lightning_sdpipe.policies.events import Progress, Regrouped, Worker
from lightning_sdpipe.policies.group_policy import GroupPolicy
from lightning_sdpipe.policies.policy import PolicyConfig, check_integer

_VOID = 1 << 62
"""A base is older than all others by this number if its round was given up, since none that took part had it."""
_REMEMBERED = 256
"""Number of rounds that were given up, and are remembered."""


class OuterRounds(PolicyConfig, frozen=True):
    """Rounds of an outer optimizer: when all pipelines together have made ``every`` updates for each that was planned;
    or, if it is None, whenever all that take part are ready."""

    registered = "outer_rounds"
    in_step = True

    every: int | None = 500

    def __post_init__(self) -> None:
        check_integer("every", self.every, 1, "updates", optional=True)

    @property
    def rounds_are_apart(self) -> bool:
        return True

    def make_policy(self, num_stages: int, num_pipelines: int) -> OuterRoundsPolicy:
        return OuterRoundsPolicy(num_stages, num_pipelines, self.every)


class Bases:
    """The newest base that each worker of a stage may have, by pipeline."""

    def __init__(self) -> None:
        self.at_most: dict[int, int] = {}
        self.latest = -1
        """Newest round that has gone out."""
        self._given_up: dict[int, None] = {}

    @property
    def newest(self) -> int:
        """Newest base that a worker may have."""
        return max(self.at_most.values(), default=self.latest)

    def has(self, pipeline: int, base: int) -> None:
        """Note that a worker has exactly that base."""
        self.latest = max(self.latest, base)
        self.at_most[pipeline] = base - _VOID if base in self._given_up else base

    def goes_out(self, pipelines: Iterable[int], sequence: int) -> None:
        """Note that these may get the base of that round."""
        self.latest = sequence
        self.at_most |= dict.fromkeys(pipelines, sequence)

    def is_given_up(self, sequence: int) -> None:
        """Note that no member of that round has its base."""
        self._given_up[sequence] = None
        if len(self._given_up) > _REMEMBERED:
            del self._given_up[next(iter(self._given_up))]

    def doubt(self, pipelines: Iterable[int]) -> None:
        """Note that these may have any base."""
        self.at_most |= dict.fromkeys(pipelines, self.latest)


class OuterRoundsPolicy(GroupPolicy):
    """See the module's docstring for the rules."""

    def __init__(self, num_stages: int, num_pipelines: int, every: int | None = None) -> None:
        super().__init__(num_stages, num_pipelines)
        self._due = num_pipelines * (every or 0)
        """Updates of all pipelines in a round."""
        self._made = 0
        """Updates since the last round."""
        self._bases = [Bases() for _ in range(num_stages)]
        self._ready: dict[int, int] = {}
        """Pipelines that are ready, each with its iteration."""

    def worker_has_base(self, worker: Worker, base: int) -> None:
        self._bases[worker.stage].has(worker.pipeline, base)

    def worker_ready(self, worker: Worker, iteration: int, now: float) -> list[Decision]:
        self._enter(worker.pipeline)
        return self._advance(Reason.EVERYBODY_CAME)

    def worker_joined(self, worker: Worker, now: float) -> list[Decision]:
        self._bases[worker.stage].doubt([worker.pipeline])
        return self._advance(Reason.EVERYBODY_CAME)

    def worker_lost(self, worker: Worker, now: float) -> list[Decision]:
        self.worker_vanished(worker)
        return self.worker_left(worker, now)

    def worker_vanished(self, worker: Worker) -> None:
        self._bases[worker.stage].at_most.pop(worker.pipeline, None)

    def worker_left(self, worker: Worker, now: float) -> list[Decision]:
        self._ready.pop(worker.pipeline, None)
        self._enter(worker.pipeline)  # its other stages may be ready
        return self._advance(Reason.WORKER_LOST)

    def worker_progressed(self, progress: Progress, now: float) -> list[Decision]:
        if progress.worker.stage == 0:  # all stages make the same
            self._made += progress.steps
        return self._advance(Reason.EVERYBODY_CAME)

    def group_retries(self, event: Regrouped) -> Group:
        group = super().group_retries(event)
        pipelines = [worker.pipeline for worker in group.members]
        bases = self._bases[group.stage]
        if event.bases:
            bases.at_most |= dict(zip(pipelines, event.bases, strict=True))
        if not event.bases or bases.newest < event.sequence:  # else one that was not in that round may have its base
            bases.is_given_up(event.sequence)
        return self._with_lineage(group)

    def scheduler_restarted(self, now: float) -> list[Decision]:
        for bases in self._bases:
            bases.latest = max(bases.latest, self.participants.next_sequence - 1)
            bases.doubt([*bases.at_most])
        return []

    def worker_answered(self, worker: Worker, now: float) -> list[Decision]:
        self._bases[worker.stage].doubt([worker.pipeline])
        return []

    def _enter(self, pipeline: int) -> None:
        """Note that ``pipeline`` is ready, if all of its stages are."""
        iteration = self.participants.ready_with(pipeline)
        if iteration is not None:
            self._ready.setdefault(pipeline, iteration)

    def _advance(self, why: Reason) -> list[Decision]:
        """Let the round go out, if it is due and all that take part are ready."""
        present = set[int]().union(*self.participants.active)
        if not self._ready or len(self._ready) < len(present) or self._made < self._due:
            return []
        groups: list[Decision] = []
        for stage in range(self.participants.num_stages):
            if here := self._here(stage):
                groups.append(self._with_lineage(self.participants.group(stage, here, why)))
        self._ready, self._made = {}, 0
        return groups

    def _here(self, stage: int) -> list[int]:
        """Return the pipelines whose worker of ``stage`` waits with the iteration that its pipeline is ready with."""
        waiting = self.participants.waiting[stage]
        return [p for p, iteration in self._ready.items() if waiting.get(p, math.inf) <= iteration]

    def _with_lineage(self, group: Group) -> Group:
        bases, pipelines = self._bases[group.stage], [worker.pipeline for worker in group.members]
        lineage = Lineage(tuple(bases.at_most[pipeline] for pipeline in pipelines), bases.newest)
        if lineage.goes_on:
            bases.goes_out(pipelines, group.sequence)
        return msgspec.structs.replace(group, lineage=lineage)
