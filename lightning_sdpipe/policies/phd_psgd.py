"""PHD-PSGD: all-reduce within groups of pipelines, meetings of groups drawn by their speeds, and a bound on staleness.

Gradients are averaged within a group before every step, so its pipelines stay equal; between steps groups average
their models with other groups (§3.4). On the last stage:

1. A group is *ready* when all its members that take part are. Its model counts as one step newer from then on.
2. If others wait for it, it meets them at once. Otherwise it draws a partner by the weights of ``pairing.py``, in the
   steps that ``every`` divides, and goes on alone in the others. If the partner waits, they meet now; else the group
   waits for the partner's next boundary. No group waits by draw for one that waits itself, so waits form no cycle.
3. If some groups are *behind* it (``versions.py``), it waits for exactly these instead, and meets them: STALENESS.
4. If a group in a meeting still has to wait for others, the rest do not wait with it: it takes part as a passive member
   and goes on waiting.
5. A member that was lost, and reports a step with which the rest of its group has already met others, goes on alone:
   they wait for it in the next step, where they notice if it missed something.
6. ``asynchronous``: the drawn partner takes part while it computes. Groups then wait only by rule 3.
7. ``within="models"``: a group, too, averages models after each step instead of gradients. Then members may come and
   go, and rule 5 sends none on alone, since the next mean makes them equal. The members that an average answers must be
   able to repeat it, so it has no others: instead of rule 4, a group that meets one that has to wait waits with it.

A meeting gives every group the mean of the groups' models, so each member weighs 1 / (groups × members of its group).

**Several stages.** If every stage drew for itself, group A's stage 0 could wait for B's while B's stage 1 waits for
A's, and neither pipeline would move. So the last stage decides, and the others replay what it decided
(``following_stages.py``).

Times come from a profile (``times``) or else from the workers' reports; until all are known, groups count as equally
fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import msgspec

from lightning_sdpipe.errors import ConfigurationError, check_choices, check_integer, check_number
from lightning_sdpipe.policies.capabilities import GROUPS, SHARDED, Capabilities
from lightning_sdpipe.policies.decisions import Decision, Reason
from lightning_sdpipe.policies.events import Progress, Worker
from lightning_sdpipe.policies.following_stages import FollowingStages, GroupPart, PlannedGroup, mean_of_groups
from lightning_sdpipe.policies.group_policy import GroupPolicy
from lightning_sdpipe.policies.pairing import draw, similarities, uniform
from lightning_sdpipe.policies.policy import PolicyConfig, RefusedEvent, checked_groups
from lightning_sdpipe.policies.versions import Versions

MEMORY = 16
"""Number of reports over which the time of a step is averaged."""


class PHDPSGD(PolicyConfig, frozen=True):
    """PHD-PSGD: gradients are averaged within groups of pipelines, and groups average their models with one another.

    ``groups`` lists the pipelines of each group. ``"auto"`` takes consecutive ones, ``group_size`` at a time, or if
    that is None, those of a host; where hosts are not known, each pipeline is a group. ``groups`` may be the path of a
    file that ``sdpipe measure --model`` wrote, such as ``"network.json"``: a run takes the cheapest groups from it, and
    ``times`` if they are None. ``gamma`` is the strength of a group's preference for others of its own speed (0 for
    none). Groups meet in the steps that ``every`` divides. ``staleness`` is the number of steps of any group that a
    model may lack; None for no bound. ``asynchronous`` meetings do not wait for the partner's mini-batch. ``times`` are
    the seconds of each pipeline's mini-batch from a profile; None goes by those that workers report.
    ``within="models"`` averages models instead of gradients within a group, together with those of the groups that it
    meets; elastic runs need that.
    """

    registered = "phd_psgd"
    forms = ({}, {"group_size": 2, "within": "models"})
    in_step = True

    groups: str | tuple[tuple[int, ...], ...] = "auto"
    group_size: int | None = None
    gamma: float = 1.0
    every: int = 1
    staleness: int | None = 8
    asynchronous: bool = False
    seed: int = 0
    times: tuple[float, ...] | None = None
    within: Literal["gradients", "models"] = "gradients"

    def __post_init__(self) -> None:
        if self.groups != "auto" and not self.names_a_network:
            allowed = '"auto", a file of `sdpipe measure` such as "network.json", or a list'
            msgspec.structs.force_setattr(self, "groups", checked_groups("groups", self.groups, allowed))
            if self.group_size is not None:
                raise ConfigurationError(
                    f"group_size={self.group_size} has no effect with groups that are listed; leave one of the two out"
                )
        check_integer("group_size", self.group_size, 1, "pipelines, or null for those of a host", optional=True)
        check_number("gamma", self.gamma, "a number from 0 (no preference)", least=0, below=math.inf)
        check_integer("every", self.every, 1, "steps")
        check_integer("staleness", self.staleness, 1, "steps, or null for no bound", optional=True)
        check_integer("seed", self.seed, 0, "any")
        check_choices(self)
        if self.asynchronous and self.within == "models":
            raise ConfigurationError(
                'within="models" does not go with asynchronous=True: members average after their step, and one that '
                "takes part while it computes has not ended its own. Leave one of the two out."
            )
        if self.times is not None:
            for seconds in self.times:
                check_number("times", seconds, "seconds of each mini-batch, above 0", above=0, below=math.inf)
            msgspec.structs.force_setattr(self, "times", tuple(map(float, self.times)))

    @property
    def names_a_network(self) -> bool:
        """True if the groups are still to be read from a file."""
        return isinstance(self.groups, str) and self.groups.endswith(".json")

    @property
    def capabilities(self) -> Capabilities:
        if self.within == "gradients":
            return Capabilities()
        by_machine = self.groups == "auto" and self.group_size is None  # a newcomer's is not known
        return replace(GROUPS, data=SHARDED, unlike=None, elastic=None if by_machine else {})

    @property
    def half(self) -> str:
        return super().half if self.within == "models" else "lightning_sdpipe.sync.hybrid_groups:HybridGroups"

    def make_policy(self, num_stages: int, num_pipelines: int) -> PHDPSGDPolicy:
        groups = self.groups_of(num_pipelines)
        if self.times is not None and len(self.times) != num_pipelines:
            raise ConfigurationError(
                f"times has {len(self.times)} values for {num_pipelines} pipelines; give one for each, or leave it out"
            )
        return PHDPSGDPolicy(self, groups, num_stages, num_pipelines)

    def groups_of(self, num_pipelines: int) -> tuple[tuple[int, ...], ...]:
        """Return the pipelines of each group.

        Raises:
            ConfigurationError: the groups do not hold exactly the run's pipelines.
        """
        if self.names_a_network:
            raise ConfigurationError(
                f"groups={self.groups!r} is a file that SDPipeStrategy reads; a scheduler of its own and simulations "
                "need the groups listed"
            )
        if isinstance(self.groups, str):
            size = self.group_size or 1
            if num_pipelines % size:
                raise ConfigurationError(
                    f"group_size={size} does not divide the {num_pipelines} pipelines of the run; choose another "
                    "size or number of pipelines, or list the groups"
                )
            return tuple(tuple(range(first, first + size)) for first in range(0, num_pipelines, size))
        listed = {pipeline for group in self.groups for pipeline in group}
        missing, unknown = set(range(num_pipelines)) - listed, listed - set(range(num_pipelines))
        if missing or unknown:
            what = f"leave out {sorted(missing)}" if missing else f"name {sorted(unknown)}"
            raise ConfigurationError(
                f"groups={[list(group) for group in self.groups]} {what}; list each of the pipelines 0 to "
                f"{num_pipelines - 1} in one group"
            )
        return self.groups


class PHDPSGDPolicy(GroupPolicy):
    """See the module's docstring for the rules. Groups are numbered as in ``groups``."""

    def __init__(self, config: PHDPSGD, groups: Sequence[Sequence[int]], num_stages: int, num_pipelines: int) -> None:
        super().__init__(num_stages, num_pipelines)
        self._config = config
        self._groups = groups
        self._group_of = {pipeline: number for number, group in enumerate(groups) for pipeline in group}
        self._last = num_stages - 1
        self._models = config.within == "models"
        self.versions = [Versions(len(groups), config.staleness) for _ in range(num_stages)]
        self._replays = [FollowingStages(j, self.participants, self.versions[j], self._last) for j in range(self._last)]
        self._wanted: dict[int, set[int]] = {}
        """For each ready group that waits, the groups that it still has to meet."""
        self._held: set[int] = set()
        """Groups that wait because of the bound."""
        self._counted: set[int] = set()
        """Waiting groups whose newest step is in the plan already."""
        self._seconds: dict[int, float] = {}
        self._reports: dict[int, int] = {}

    def widened(self, num_pipelines: int) -> None:
        raise RefusedEvent(
            f"PHD-PSGD divides the {self.participants.num_pipelines} pipelines of the plan into fixed groups, so no "
            f"pipeline numbered {self.participants.num_pipelines} or more can come; give a lower number, or use "
            "SemiDecentralized"
        )

    def worker_ready(self, worker: Worker, iteration: int, now: float) -> list[Decision]:
        if worker.stage != self._last:
            return self._replays[worker.stage].turn()
        for replay in self._replays:
            replay.heard_of(worker.pipeline)
        group = self._group_of[worker.pipeline]
        if self._missed(group, iteration):
            decisions = [self._alone(worker.pipeline, group)]
        else:
            decisions = [] if group in self._wanted else self._becomes_ready(group)
        return decisions + self._replay()

    def worker_left(self, worker: Worker, now: float) -> list[Decision]:
        return self._leaves(worker, lost=False)

    def worker_lost(self, worker: Worker, now: float) -> list[Decision]:
        return self._leaves(worker, lost=True)

    def worker_joined(self, worker: Worker, now: float) -> list[Decision]:
        group, stage = self._group_of[worker.pipeline], worker.stage
        if len(self._active(stage, group)) == 1:
            self.versions[stage].joins(group)
        return []

    def worker_progressed(self, progress: Progress, now: float) -> list[Decision]:
        if progress.worker.stage == self._last:
            pipeline, seconds = progress.worker.pipeline, progress.seconds - progress.waiting
            reports = self._reports[pipeline] = min(self._reports.get(pipeline, 0) + 1, MEMORY)
            before = self._seconds.get(pipeline, 0.0)
            self._seconds[pipeline] = before + (seconds - before) / reports
        return []

    def last_group_doubted(self, worker: Worker) -> None:
        for versions in self.versions:
            versions.doubted()

    def scheduler_restarted(self, now: float) -> list[Decision]:
        for versions in self.versions:
            versions.doubted()
        for replay in self._replays:
            replay.forget()
        return self._look_again() + self._replay()

    def times(self) -> list[float]:
        """Return the seconds per step of each group, those of its slowest member; all 1 while some are unknown."""
        profiled = self._config.times
        of = self._seconds if profiled is None else dict(enumerate(profiled))
        times = [max((of.get(pipeline, 0.0) for pipeline in group), default=0.0) for group in self._groups]
        return times if all(seconds > 0 for seconds in times) else [1.0] * len(times)

    def _active(self, stage: int, group: int) -> list[int]:
        return [pipeline for pipeline in self._groups[group] if pipeline in self.participants.active[stage]]

    def _waiting(self, group: int) -> list[int]:
        return [p for p in self._groups[group] if p in self.participants.waiting[self._last]]

    def _missed(self, group: int, iteration: int) -> bool:
        """Return whether others of the group have been answered for that iteration without the worker that reports it
        now."""
        if self._models:
            return False
        answered = [self.participants.last_answered(self._last, p) for p in self._active(self._last, group)]
        return any(last is not None and last >= iteration for last in answered)

    def _alone(self, pipeline: int, group: int) -> Decision:
        iteration = self.participants.waiting[self._last][pipeline]
        for replay in self._replays:
            replay.plan(PlannedGroup((GroupPart(group, {pipeline: iteration}, False, False),), {}, Reason.WORKER_LOST))
        return self.participants.group(self._last, [pipeline], Reason.WORKER_LOST)

    def _becomes_ready(self, group: int) -> list[Decision]:
        """Begin a new step of ``group`` if all its members are ready."""
        members = self._active(self._last, group)
        if not members or len(self._waiting(group)) < len(members):
            return []
        versions = self.versions[self._last]
        versions.stepped(group)
        behind = versions.behind(group)
        if behind:
            self._held.add(group)
            self._wanted[group] = behind
        elif any(group in wanted for wanted in self._wanted.values()):
            self._wanted[group] = set()
        else:
            step = 1 + max(self.participants.waiting[self._last][pipeline] for pipeline in members)
            partner = None if step % self._config.every else self._partner(group)
            if partner is None:
                return [self._meeting([group], [], [], Reason.LOCAL_STEP)]
            if self._config.asynchronous and partner not in self._wanted:
                return [self._meeting([group], [], [partner], Reason.MATCHED)]
            self._wanted[group] = {partner}
        return self._settle(group)

    def _partner(self, group: int) -> int | None:
        alike = similarities(self.times(), group, self._config.gamma)
        others = [(k, alike[k]) for k in range(len(alike)) if k != group and self._active(self._last, k)]
        if not others:
            return None
        return draw(others, uniform(self._config.seed, group, self.versions[self._last].steps(group)))

    def _settle(self, group: int) -> list[Decision]:
        """Let ``group`` meet the ready groups that wait for it or that it waits for, if any of them can then go on."""
        if group not in self._wanted or (self._wanted[group] and not self._neighbours(group)):
            return []
        together = self._cluster(group)
        versions = self.versions[self._last]
        stay = {k for k in together if versions.behind(k, together)}
        if stay and self._models:
            for k in stay:
                self._held.add(k)
                self._wanted[k] |= versions.behind(k, together)
            return []
        go = [k for k in together if k not in stay]
        if not go:
            return []
        reason = Reason.WORKER_LOST if len(together) == 1 else Reason.MATCHED
        meeting = self._meeting(go, sorted(stay), [], Reason.STALENESS if self._held.intersection(go) else reason)
        for k in go:
            del self._wanted[k]
        self._held.difference_update(go)
        self._held.update(stay)
        for k in stay:
            self._wanted[k] = versions.behind(k)
        return [meeting]

    def _neighbours(self, group: int) -> set[int]:
        """Return the groups that wait for ``group``, and the waiting ones that it waits for."""
        wanted = {k for k in self._wanted[group] if k in self._wanted}
        return wanted | {k for k, theirs in self._wanted.items() if group in theirs}

    def _cluster(self, group: int) -> list[int]:
        found, todo = {group}, [group]
        while todo:
            new = self._neighbours(todo.pop()) - found
            found |= new
            todo += sorted(new)
        return sorted(found)

    def _meeting(self, go: Sequence[int], stay: Sequence[int], computing: Sequence[int], reason: Reason) -> Decision:
        """Make a meeting: groups ``go`` are answered; ``stay`` are ready and wait on; ``computing`` are not ready."""
        participants, last = self.participants, self._last
        waiting = participants.waiting[last]
        parts = [
            GroupPart(k, {p: waiting[p] for p in self._waiting(k)}, k in stay, k not in self._counted)
            for k in (*go, *stay)
        ]
        self._counted.difference_update(go)
        self._counted.update(stay)
        answered = [p for k in go for p in self._waiting(k)]
        members = [self._waiting(k) for k in (*go, *stay)] + [self._active(last, k) for k in computing]
        passive = [p for group in members[len(go) :] for p in group]
        standing = [p for k in stay for p in self._waiting(k)]
        weights = mean_of_groups(members)
        group = participants.group(last, answered, reason, weights=weights, passive=passive, standing=standing)
        self.versions[last].met([*go, *stay], computing)
        asleep = {k: tuple(self._groups[k]) for k in computing}
        for replay in self._replays:
            replay.plan(PlannedGroup(tuple(parts), asleep, reason))
        return group

    def _replay(self) -> list[Decision]:
        return [group for replay in self._replays for group in replay.turn()]

    def _leaves(self, worker: Worker, lost: bool) -> list[Decision]:
        group, stage = self._group_of[worker.pipeline], worker.stage
        gone = not self._active(stage, group)
        if gone:
            self.versions[stage].leaves(group, lost)
        if stage != self._last:
            if gone and self._replays[stage].expects(group):
                self.versions[self._last].doubted()
                return self._look_again() + self._replay()
            return (self._look_again() + self._replay()) if lost else self._replays[stage].turn()
        decisions: list[Decision] = []
        if gone or (group in self._wanted and not self._waiting(group)):
            self._wanted.pop(group, None)
            self._held.discard(group)
            self._counted.discard(group)
        if not gone and group not in self._wanted:
            decisions += self._becomes_ready(group)
        if gone or lost:
            decisions += self._look_again()
        return decisions + self._replay()

    def _look_again(self) -> list[Decision]:
        """Update what the waiting groups wait for, after a change other than a step or a meeting."""
        versions = self.versions[self._last]
        for group, wanted in self._wanted.items():
            behind = versions.behind(group)
            drawn = set() if group in self._held else wanted
            if behind:
                self._held.add(group)
            self._wanted[group] = behind or {k for k in drawn if self._active(self._last, k)}
        return [decision for group in sorted(self._wanted) for decision in self._settle(group)]
