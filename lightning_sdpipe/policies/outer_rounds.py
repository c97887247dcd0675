"""Rounds of an outer optimizer (DiLoCo) by quorum, with one lineage of bases.

Each worker trains from a *base*, the result of a round, and brings what its model has moved by. A round makes a new
base of the newest one. Three rules keep all bases of a stage in one line, though workers come, go, and lack results:

1. *The newest base.* A round goes out when as many pipelines are ready as ``quorum`` says, one of them has the newest
   base that any worker of the stage may have, and the grace is over; or when all that take part are ready. A member
   whose base is older gets the newest one in full, and what it brings is the difference from its own.
2. *Handed over.* A member that did not get the result of a round gets the new base from one that has it, since what it
   brought is in there.
3. *Made again, or dropped.* If none of the members that are left has the result, they make the round again if one of
   them has the newest base. Otherwise no base is made, and each keeps what it brought for its next round. Unless
   one that was in no round meanwhile may have it: it was handed over to it by a member that is gone. What they brought
   is in there then, and they drop it.

What a worker may have is known from above: the base that it named when it was ready, until a round of it goes out,
which it may or may not get. A worker that joins may have the newest of all. If it turns out to have the base of a round
that was given up, from a donor or by hand from a member that is gone, then that counts as older than all others.

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
from lightning_sdpipe.policies.events import Regrouped, Worker
from lightning_sdpipe.policies.group_policy import GroupPolicy
from lightning_sdpipe.policies.policy import PolicyConfig, refusal
from lightning_sdpipe.policies.window import AdaptiveWindow

QUORUM = "quorum"
"""Reason of groups that did not wait for all."""
_VOID = 1 << 62
"""A base is older than all others by this number if its round was given up, since none that took part had it."""
_REMEMBERED = 256
"""Number of rounds that were given up, and are remembered."""


class OuterRounds(PolicyConfig, frozen=True):
    """Rounds of an outer optimizer.

    ``quorum`` is the number of pipelines that a round needs, or their share of those present; None is all of them.
    ``grace`` is how long a round that could go out waits for more of them: seconds, or ``"auto"``, until those have
    come that are expected within a quarter of the time between two rounds.
    """

    quorum: int | float | None = None
    grace: float | str = "auto"

    def __post_init__(self) -> None:
        quorum, grace = self.quorum, self.grace
        if isinstance(quorum, bool) or not isinstance(quorum, int | float | None):
            raise refusal("quorum", quorum, _QUORUM)
        if (isinstance(quorum, int) and quorum < 1) or (isinstance(quorum, float) and not 0.0 < quorum <= 1.0):
            raise refusal("quorum", quorum, _QUORUM)
        if grace != "auto" and (isinstance(grace, bool | str) or not 0 <= grace < math.inf):
            raise refusal("grace", grace, 'finite seconds from 0, or "auto"')
        if grace != "auto" and quorum is None:
            raise refusal(
                "grace", grace, '"auto" where quorum is None, since all are waited for; or a quorum, such as 0.5'
            )

    @property
    def rounds_are_apart(self) -> bool:
        return True

    def make_policy(self, num_stages: int, num_pipelines: int) -> OuterRoundsPolicy:
        if isinstance(self.quorum, int) and self.quorum > num_pipelines:
            allowed = f"1 to {num_pipelines}, a share such as 0.5, or null for all of them"
            raise refusal(f"with {num_pipelines} pipelines, quorum", self.quorum, allowed)
        return OuterRoundsPolicy(self, num_stages, num_pipelines)

    def needed(self, present: int) -> int:
        """Return the number of pipelines that a round needs where so many are ``present``."""
        if self.quorum is None:
            return present
        return min(present, self.quorum if isinstance(self.quorum, int) else math.ceil(self.quorum * present - 1e-9))


_QUORUM = "a number of pipelines from 1, a share of those present above 0 and up to 1.0, or null for all of them"


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

    def __init__(self, config: OuterRounds, num_stages: int, num_pipelines: int) -> None:
        super().__init__(num_stages, num_pipelines)
        self._config = config
        self._bases = [Bases() for _ in range(num_stages)]
        self._window = AdaptiveWindow("auto" if isinstance(config.grace, str) else config.grace, num_pipelines)
        self._ready: dict[int, int] = {}
        """Pipelines that are ready, each with its iteration."""
        self._due = math.inf
        """End of the grace."""

    def worker_has_base(self, worker: Worker, base: int) -> None:
        self._bases[worker.stage].has(worker.pipeline, base)

    def worker_ready(self, worker: Worker, iteration: int, now: float) -> list[Decision]:
        self._enter(worker.pipeline, now)
        return self._advance(Reason.EVERYBODY_CAME, now)

    def worker_joined(self, worker: Worker, now: float) -> list[Decision]:
        self._bases[worker.stage].doubt([worker.pipeline])
        return self._advance(Reason.EVERYBODY_CAME, now)

    def worker_lost(self, worker: Worker, now: float) -> list[Decision]:
        self.worker_vanished(worker)
        return self.worker_left(worker, now)

    def worker_vanished(self, worker: Worker) -> None:
        self._bases[worker.stage].at_most.pop(worker.pipeline, None)

    def worker_left(self, worker: Worker, now: float) -> list[Decision]:
        self._ready.pop(worker.pipeline, None)
        self._window.paused(worker.pipeline)
        self._enter(worker.pipeline, now)  # its other stages may be ready
        return self._advance(Reason.WORKER_LOST, now)

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

    def widened(self, num_pipelines: int) -> None:
        self._window.widen(num_pipelines)

    def time_passed(self, now: float) -> list[Decision]:
        return self._release(QUORUM, now) if self._due <= now else []

    def deadline(self) -> float | None:
        return None if self._due == math.inf else self._due

    def newest(self, stage: int) -> int:
        """Return the newest base that a worker of ``stage`` may have."""
        return self._bases[stage].newest

    def _enter(self, pipeline: int, now: float) -> None:
        """Note that ``pipeline`` is ready, if all of its stages are."""
        iteration = self.participants.ready_with(pipeline)
        if iteration is None or pipeline in self._ready:
            return
        self._ready[pipeline] = iteration
        self._window.arrived(pipeline, now)

    def _advance(self, why: Reason, now: float) -> list[Decision]:
        """Let the round go out, or its grace begin, if it may."""
        present, ready = len(set[int]().union(*self.participants.active)), len(self._ready)
        if ready == present > 0:
            return self._release(why, now)
        if ready < max(1, self._config.needed(present)) or not self._has_newest():
            self._due = math.inf
        elif self._due == math.inf:
            self._due = now + self._window.length(next(iter(self._ready)), now)
        return self.time_passed(now)

    def _has_newest(self) -> bool:
        """Return whether on each stage a pipeline that is ready has the newest base."""
        return all(
            self.newest(stage) in [bases.at_most[p] for p in self._here(stage)]
            for stage, bases in enumerate(self._bases)
            if self._here(stage)
        )

    def _here(self, stage: int) -> list[int]:
        """Return the pipelines whose worker of ``stage`` waits with the iteration that its pipeline is ready with."""
        waiting = self.participants.waiting[stage]
        return [p for p, iteration in self._ready.items() if waiting.get(p, math.inf) <= iteration]

    def _release(self, reason: str, now: float) -> list[Decision]:
        groups: list[Decision] = []
        for stage in range(self.participants.num_stages):
            if here := self._here(stage):
                groups.append(self._with_lineage(self.participants.group(stage, here, reason)))
        self._window.answered(self._ready, now)
        self._ready, self._due = {}, math.inf
        return groups

    def _with_lineage(self, group: Group) -> Group:
        bases, pipelines = self._bases[group.stage], [worker.pipeline for worker in group.members]
        lineage = Lineage(tuple(bases.at_most[pipeline] for pipeline in pipelines), self.newest(group.stage))
        if lineage.goes_on:
            bases.goes_out(pipelines, group.sequence)
        return msgspec.structs.replace(group, lineage=lineage)
