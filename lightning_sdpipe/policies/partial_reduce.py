"""P-Reduce: the first P pipelines that are ready average their models, and go on (Miao et al., SIGMOD 2021).

1. A pipeline enters one queue, the same for all stages, when every stage of it is ready (Algorithm 2). The first P
   leave it as one group, which is the same in every stage. With a queue for each stage, two stages could each hold what
   the other waits for, for ever.
2. With fewer than P active pipelines a group is all of them.
3. *Constant* partial reduce (no ``decay``) weighs all members alike. *Dynamic* partial reduce weighs them by their
   clocks k, which each ready signal increases by 1 and each group sets to the largest among its members (§3.3):
   :func:`weights`.
4. *Group-frozen avoidance* (§4): if the first P and the last T − 1 groups do not connect the active pipelines, the
   group gets the first pipeline of each component in the queue and is filled up in order: ENFORCED. While all in the
   queue are of one component, they are held.

If only some stages of a pipeline take part, it is ready when these are. If its stages are at different iterations,
because a worker fell silent and came back, it enters with the stages that are furthest behind.

There is no deadlock: a waiting worker is in the queue, or waits for stages of its own pipeline, which compute and wait
for no group. The queue is held only while some active pipeline is not in it, and that one will come or leave. When all
active pipelines are in it, so is every component, and P or all of them go.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Literal

import msgspec

from lightning_sdpipe.errors import ConfigurationError, check_choices, check_integer, check_number
from lightning_sdpipe.policies.capabilities import GROUPS
from lightning_sdpipe.policies.decisions import Decision, Group, Reason
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.group_policy import GroupPolicy
from lightning_sdpipe.policies.policy import PolicyConfig, Unit, When
from lightning_sdpipe.policies.sync_graph import SyncGraph

QUEUED = "first in the queue"
"""Reason for groups that are not enforced, not of all pipelines, and not due to one that left."""

HISTORY = 4
"""Default of T, in multiples of the fewest groups that can connect all pipelines. That few random groups would seldom
do so: 7 pairs of 8 pipelines once in ten times."""


class PartialReduce(PolicyConfig, frozen=True):
    """P-Reduce: models are averaged after every step, in groups of the ``group_size`` pipelines that are ready first.

    ``decay`` α weights models by their progress: each step behind the furthest of the group counts α times as much.
    None gives equal weights, which alone keep the mean over all pipelines unchanged. ``missing`` says which member gets
    the weight of steps at which there is no member: the ``"closest"``, the ``"oldest"``, or ``"none"``.

    ``history`` is T, the number of groups that must connect the pipelines; None is four times the fewest that can.
    """

    registered = "partial_reduce"
    forms = ({}, {"decay": 0.5})
    capabilities = GROUPS

    group_size: int = 3
    decay: float | None = None
    missing: Literal["closest", "oldest", "none"] = "closest"
    history: int | None = None

    def __post_init__(self) -> None:
        check_integer("group_size", self.group_size, 2, "pipelines")
        if self.decay is not None:
            check_number("decay", self.decay, "a number between 0 and 1, or null for equal weights", above=0, below=1)
            msgspec.structs.force_setattr(self, "decay", float(self.decay))
        check_choices(self)
        if self.missing != "closest" and self.decay is None:
            raise ConfigurationError(
                f"missing={self.missing!r} has no effect without decay, since equal weights depend on no clock; leave "
                "missing out, or give a decay, such as 0.5"
            )
        check_integer("history", self.history, 1, "groups, or null to choose", optional=True)

    def make_policy(self, num_stages: int, num_pipelines: int) -> PartialReducePolicy:
        if self.group_size > num_pipelines:
            upwards = "2" if num_pipelines == 2 else f"2 to {num_pipelines}"
            allowed = upwards if num_pipelines > 1 else "it two pipelines or more, or use NoSync"
            raise ConfigurationError(
                f"group_size={self.group_size} is not allowed with {num_pipelines} pipelines; give {allowed}"
            )
        fewest = fewest_groups(num_pipelines, self.group_size)
        if self.history is not None and self.history < fewest:
            raise ConfigurationError(
                f"history={self.history} is not allowed: {num_pipelines} pipelines in groups of {self.group_size} are "
                f"connected by {fewest} groups at best; give an integer from {fewest}, or null for {HISTORY * fewest}"
            )
        return PartialReducePolicy(self, num_stages, num_pipelines)

    @property
    def looks_back(self) -> tuple[int, Unit]:
        return (super().looks_back[0] if self.history is None else self.history), "groups"

    @property
    def announces(self) -> When:
        return "late"  # announced early, the last of the first P would hold up the P - 1 others for its backward


class PartialReducePolicy(GroupPolicy):
    """See the module's docstring for the rules."""

    def __init__(self, config: PartialReduce, num_stages: int, num_pipelines: int) -> None:
        super().__init__(num_stages, num_pipelines)
        self._config = config
        self._queue: dict[int, int] = {}
        """Pipelines in order of arrival, each with the iteration that it is ready with."""
        self._clocks = [0] * num_pipelines
        self._graph = SyncGraph(self._history(num_pipelines), "groups")

    def worker_ready(self, worker: Worker, iteration: int, now: float) -> list[Decision]:
        self._enter(worker.pipeline)
        return self._release(QUEUED)

    def worker_joined(self, worker: Worker, now: float) -> list[Decision]:
        pipeline = worker.pipeline
        if pipeline not in self._graph.active:
            self._clocks[pipeline] = max(self._clocks)
            self._graph.join(pipeline)
            self._graph.rounds = self._history(len(self._graph.active))
        return self._release(QUEUED)

    def worker_left(self, worker: Worker, now: float) -> list[Decision]:
        pipeline, participants = worker.pipeline, self.participants
        if pipeline in self._queue and not self._stages_of(pipeline):
            del self._queue[pipeline]
        if any(pipeline in active for active in participants.active):
            self._enter(pipeline)
        else:
            self._graph.leave(pipeline)
            self._graph.rounds = self._history(len(self._graph.active))
        return self._release(Reason.WORKER_LOST)

    def last_group_doubted(self, worker: Worker) -> None:
        """Remove that group, which is one on all stages, from the sync-graph."""
        if all(worker.pipeline in active for active in self.participants.active):  # the first of its stages to be lost
            self._graph.forget_last(worker.pipeline)

    def widened(self, num_pipelines: int) -> None:
        self._clocks += [0] * (num_pipelines - len(self._clocks))

    def sync_graph(self, stage: int) -> SyncGraph:
        """Return the graph of recent meetings of pipelines, which is the same for every stage."""
        return self._graph

    def _history(self, num_active: int) -> int:
        if self._config.history is not None:
            return self._config.history
        return max(1, HISTORY * fewest_groups(num_active, self._config.group_size))

    def _enter(self, pipeline: int) -> None:
        """Put ``pipeline`` into the queue if it is ready now and not there yet."""
        iteration = self.participants.ready_with(pipeline)
        if iteration is None or pipeline in self._queue:
            return
        self._queue[pipeline] = iteration
        self._clocks[pipeline] += 1

    def _stages_of(self, pipeline: int) -> list[int]:
        """Return the stages on which ``pipeline`` waits with the iteration that it entered the queue with."""
        iteration = self._queue[pipeline]
        waiting = self.participants.waiting
        return [stage for stage, here in enumerate(waiting) if here.get(pipeline, math.inf) <= iteration]

    def _release(self, reason: str) -> list[Decision]:
        """Return all groups that may go out."""
        decisions: list[Decision] = []
        while self._queue:
            size = min(self._config.group_size, len(self._graph.active))
            if len(self._queue) < size:
                break
            chosen, why = list(islice(self._queue, size)), reason
            if len({self._graph.component(pipeline) for pipeline in chosen}) < self._graph.components:
                by_component = self._first_of_components()
                if len(by_component) == 1:
                    break
                chosen, why = self._across(by_component, size), Reason.ENFORCED
            elif size == len(self._graph.active) and reason == QUEUED:
                why = Reason.EVERYBODY_CAME
            decisions += self._groups(chosen, why)
        return decisions

    def _first_of_components(self) -> list[int]:
        first: dict[int, int] = {}
        for pipeline in self._queue:
            first.setdefault(self._graph.component(pipeline), pipeline)
        return list(first.values())

    def _across(self, by_component: Sequence[int], size: int) -> list[int]:
        chosen = list(by_component[:size])
        chosen += islice((pipeline for pipeline in self._queue if pipeline not in chosen), size - len(chosen))
        return chosen

    def _groups(self, chosen: Sequence[int], reason: str) -> list[Group]:
        """Make one group in each stage, of the pipelines' workers that wait there."""
        groups = []
        for stage in range(self.participants.num_stages):
            here = [pipeline for pipeline in chosen if stage in self._stages_of(pipeline)]
            if here:
                config, clocks = self._config, [self._clocks[pipeline] for pipeline in here]
                shares = None if config.decay is None else weights(clocks, config.decay, config.missing)
                groups.append(self.participants.group(stage, here, reason, weights=shares))
        newest = max(self._clocks[pipeline] for pipeline in chosen)
        for pipeline in chosen:
            self._clocks[pipeline] = newest
            del self._queue[pipeline]
        self._record(groups)
        return groups

    def _record(self, groups: Sequence[Group]) -> None:
        self._graph.record([max(groups, key=lambda group: len(group.members))])


def fewest_groups(num_pipelines: int, group_size: int) -> int:
    """Return ⌈(N − 1)/(P − 1)⌉: each group adds P − 1 links, and N − 1 connect all (§4)."""
    return math.ceil((num_pipelines - 1) / (min(group_size, max(2, num_pipelines)) - 1))


def weights(clocks: Sequence[int], decay: float, missing: str) -> list[float]:
    """Return the weight of each member's model by its progress: dynamic partial reduce (§3.3, equation 9).

    A member with clock k has the rank k̂ = max k − k + 1. Rank r counts β(r) = (1 − α) α^(r−1) / (1 − α^K), where K is
    the largest rank: the freshest most. (Putting k̂ for k into the printed equation reverses that.) Members of one rank
    share its β. The weights of ranks without a worker go to the closest rank that has one (the fresher of two) or to
    the oldest member; with ``"none"``, each member instead counts α^(k̂−1) over their sum.

    Args:
        clocks: k of every member; at least one.
        decay: α, between 0 and 1.
        missing: ``"closest"``, ``"oldest"`` or ``"none"``.

    Returns:
        The weights in the order of ``clocks``; they add up to 1.
    """
    newest = max(clocks)
    ranks = [newest - clock + 1 for clock in clocks]
    if missing == "none":
        powers = [decay ** (rank - 1) for rank in ranks]
        return [power / math.fsum(powers) for power in powers]
    present, log = sorted(set(ranks)), math.log(decay)

    def beta(first: int, last: int) -> float:
        """Return the total weight of ranks ``first`` to ``last``."""
        return math.exp((first - 1) * log) * math.expm1((last - first + 1) * log) / math.expm1(present[-1] * log)

    if missing == "closest":
        ends = [(rank + after) // 2 for rank, after in pairwise(present)] + [present[-1]]
        shares = [beta(first + 1, last) for first, last in pairwise([0, *ends])]
    else:
        shares = [beta(rank, rank) for rank in present]
        shares[-1] += math.fsum(beta(rank + 1, after - 1) for rank, after in pairwise(present))
    each = {rank: share / ranks.count(rank) for rank, share in zip(present, shares, strict=True)}
    return [each[rank] for rank in ranks]
