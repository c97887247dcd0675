"""An operator's view of a run: a reader of its events and decisions, and the plain data that it makes of them.

The data travels in columns, a value per pipeline, and a group once however many workers were in it, so that the state
of thousands of workers is a fraction of the largest reply that is allowed. The reader of the status, not the scheduler,
derives the rest from it (which pipelines are connected, which have met, ρ).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

import msgspec

from lightning_sdpipe.policies import sync_graph
from lightning_sdpipe.policies.decisions import Decision, Group
from lightning_sdpipe.policies.events import SEGMENT, Event, Joined, Left, Lost, Progress, Ready, Worker
from lightning_sdpipe.policies.policy import Unit
from lightning_sdpipe.policies.sync_graph import Encounter, SyncGraph

RATE_SECONDS = 10
"""Signals per second are counted over this many whole seconds."""

GROUPS_COST = 60_000
"""Largest total cost of a status's groups, each of which costs its members and 4 more. The newest are sent."""


STATES = {name[0]: name for name in ("computing", "waiting", "away", "lost", "-")}
"""State of a worker for each letter: the states of a session, and "-" for one that has never joined."""

ACTIVE = ("c", "w")


class GroupRow(msgspec.Struct, frozen=True, array_like=True):
    """A group of a stage, or (number -1) workers that entered the run together."""

    number: int
    round: int
    pipelines: list[int]
    reason: str
    weights: tuple[float, ...] = ()
    """Empty if all are equal."""


class StageStatus(msgspec.Struct, frozen=True):
    """One stage: every column has a value for each of its pipelines."""

    states: str
    """Letters of :data:`STATES`."""
    iterations: list[int | None]
    """Last iteration reported."""
    last_groups: list[int | None]
    """Number of the last group."""
    silent: list[float | None]
    """Seconds since the worker was last heard of."""
    joined: list[float | None]
    """Seconds since the worker last joined."""
    seconds: list[float | None]
    """Recent seconds per step."""
    waiting: list[float | None]
    """Seconds of a step that passed in waiting for other replicas."""
    round: int
    since: int
    """First round of which all groups are sent."""
    groups: list[GroupRow]
    reasons: dict[str, int] = {}
    """Number of groups that were sent out for each reason."""

    def active(self) -> list[int]:
        """Return the pipelines whose worker takes part."""
        return [i for i, letter in enumerate(self.states) if letter in ACTIVE]

    def components(self) -> list[set[int]]:
        """Return the active pipelines in sets that chains of common groups join."""
        return sync_graph.components(self._meetings(), self.active())

    def rounds_since_connected(self) -> int | None:
        """Return how many rounds back one must look for the stage to be connected; None: more than are sent."""
        return sync_graph.rounds_since_connected(self._meetings(), self.active(), self.round)

    def rounds_since_met(self) -> dict[tuple[int, int], int]:
        """Return, for each pair of pipelines that met in the rounds that are sent, how many rounds ago it last did."""
        return sync_graph.rounds_since_met(self._meetings(), self.round)

    def rho(self) -> float:
        """Return ρ of the groups in the rounds that are sent; needs numpy."""
        return sync_graph.spectral_radius(self._meetings(), self.active())

    def largest_learning_rate(self, rho: float) -> float | None:
        """Return the largest learning rate up to which P-Reduce's theorem 1 holds with this ρ and an L of 1; None
        without groups, or with unequal weights, which the theorem does not cover."""
        groups = [row for row in self.groups if row.number >= 0 and row.round >= self.since]
        if not groups or any(row.weights for row in groups):
            return None
        size = sum(len(row.pipelines) for row in groups) / len(groups)
        return sync_graph.largest_learning_rate(1.0, len(self.active()), size, rho)

    def _meetings(self) -> list[Encounter]:
        return [Encounter(row.round, row.pipelines, _group(row)) for row in self.groups if row.round >= self.since]


class WorkerStatus(msgspec.Struct, frozen=True):
    """One worker, as its row in JSON has it."""

    stage: int
    pipeline: int
    state: str
    iteration: int | None
    """Last iteration reported."""
    staleness: int | None
    """Iterations that the worker is behind the furthest worker of its stage; of all, where groups are of whole
    pipelines."""
    last_group: int | None
    """Number of the worker's last group."""
    silent: float | None
    """Seconds since the worker was last heard of."""
    step_seconds: float | None
    """Recent seconds per step."""
    waiting_seconds: float | None
    """Seconds of a step that passed in waiting for other replicas."""


class MembersStatus(msgspec.Struct, frozen=True):
    """Members of an elastic run."""

    epoch: int
    reason: str
    """Reason why the epoch has begun."""
    leader: int | None
    states: dict[int, str]
    """State of each pipeline that is there, in a word or two."""
    held: str
    """Reason why no pipeline trains; empty if one may."""
    lives: dict[int, int]
    """Incarnation of each member."""
    ever: list[int]
    """Pipelines that were members at any time, as far as this scheduler knows."""
    gone: list[tuple[int, int]]
    """Most recent starts that must not come back, by pipeline and incarnation."""
    over: str | None
    """Reason why the run has failed, if it has."""
    update: int | None = None
    """Updates that the furthest member has made: ``trainer.global_step``."""
    resumed: str | None = None
    """Checkpoint from which the run went on when no member was left."""
    reasons: list[str] = []
    """Reason for each of ``gone``."""


class Status(msgspec.Struct, frozen=True):
    """Status of the whole run."""

    policy: str
    """Values of the policy, as JSON."""
    uptime: float
    started: float
    """When the scheduler was started, in seconds of its clock."""
    signals: int
    signals_per_second: float
    groups_by_size: dict[int, int]
    groups_by_reason: dict[str, int]
    refused: dict[str, int]
    failure: str | None
    held: int
    """Readies that wait until all workers have come back to a restarted scheduler."""
    looks_back: tuple[int, Unit]
    stages: list[StageStatus]
    members: MembersStatus | None = None
    """None in a run whose pipelines do not come and go."""
    depths: tuple[int, ...] = ()
    """Stages of the pipelines, where groups are of whole pipelines; such groups are sent beside the first stage."""

    def workers(self) -> list[WorkerStatus]:
        """Return every worker that ever joined, by stage and pipeline."""
        rows = []
        for number, stage in enumerate(self.stages):
            beside = self.stages if self.depths else [stage]
            furthest = max((k for each in beside for k in each.iterations if k is not None), default=0)
            for pipeline, letter in enumerate(stage.states):
                iteration = stage.iterations[pipeline]
                if letter != "-":
                    row = WorkerStatus(
                        number,
                        pipeline,
                        STATES[letter],
                        iteration,
                        None if iteration is None else furthest - iteration,
                        stage.last_groups[pipeline],
                        stage.silent[pipeline],
                        stage.seconds[pipeline],
                        stage.waiting[pipeline],
                    )
                    rows.append(row)
        return rows


class _WorkerView:
    __slots__ = ("iteration", "joined", "last_group", "seconds", "waiting")

    def __init__(self) -> None:
        self.iteration: int | None = None
        self.joined: float | None = None
        self.last_group: Group | None = None
        self.seconds: float | None = None
        self.waiting: float | None = None


class Overview:
    """A reader of the events and decisions of a run as they come. Every signal passes here, so it only notes and
    counts.

    With ``depths``, each pipeline's stages, groups are of whole pipelines, and are sent once, beside the first stage.
    ``looks_back`` is the policy's.
    """

    def __init__(
        self, num_stages: int, num_pipelines: int, depths: Sequence[int], looks_back: tuple[int, Unit]
    ) -> None:
        self._depths = depths
        self.graphs = [SyncGraph(*looks_back) for _ in range(1 if depths else num_stages)]
        """The sync-graph of each stage, or one of all where groups are of whole pipelines."""
        self.signals = 0
        self.sizes: Counter[int] = Counter()
        self.reasons: list[Counter[str]] = [Counter() for _ in range(num_stages)]
        """Reasons of each stage's groups."""
        self._views = [[_WorkerView() for _ in range(num_pipelines)] for _ in range(num_stages)]
        self._second = 0
        self._per_second: deque[list[int]] = deque([[0, 0]], maxlen=RATE_SECONDS + 1)

    def on(self, now: float, event: Event, decisions: list[Decision]) -> None:
        """Note the event at ``now``, and the decisions that followed."""
        if type(event) is Ready:
            worker = event.worker
            self._views[worker.stage][worker.pipeline].iteration = event.iteration % SEGMENT
            self.signals += 1
            if now >= self._second + 1:
                self._second = int(now)
                self._per_second.append([self._second, 0])
            self._per_second[-1][1] += 1
        elif type(event) is Progress:
            worker = event.worker
            view = self._views[worker.stage][worker.pipeline]
            view.seconds, view.waiting = event.seconds, event.waiting
        elif type(event) is Joined:
            worker = event.worker
            self._views[worker.stage][worker.pipeline].joined = now
            if worker.stage < len(self.graphs):
                self.graphs[worker.stage].join(worker.pipeline)
        elif isinstance(event, Left | Lost) and event.worker.stage < len(self.graphs):
            graph, pipeline = self.graphs[event.worker.stage], event.worker.pipeline
            if isinstance(event, Lost):
                graph.forget_last(pipeline)
            graph.leave(pipeline)
        for stage in {group.stage for group in decisions}:
            self.graphs[stage].record([group for group in decisions if group.stage == stage])
        for group in decisions:
            members = group.members
            self.sizes[len(members)] += 1
            stage = group.stage
            self.reasons[stage][group.reason] += 1
            views = self._views[stage]
            for worker in members:
                views[worker.pipeline].last_group = group
                for stage in range(1, self._depths[worker.pipeline]) if self._depths else ():
                    self._views[stage][worker.pipeline].last_group = group

    def widen(self, num_pipelines: int) -> None:
        """Make room for ``num_pipelines`` pipelines."""
        for views in self._views:
            views += [_WorkerView() for _ in range(num_pipelines - len(views))]

    def rate(self, now: float, uptime: float) -> float:
        """Return the recent number of signals per second."""
        oldest = int(now) - RATE_SECONDS
        recent = sum(count for second, count in self._per_second if second >= oldest)
        return recent / max(1.0, min(uptime, RATE_SECONDS + now - int(now)))

    def stages(
        self, now: float, states: Mapping[Worker, str], silent: Mapping[Worker, float], graphs: Sequence[SyncGraph]
    ) -> list[StageStatus]:
        """Return the status of every stage. ``silent`` are seconds since each worker was last heard of. ``graphs`` has
        one graph per stage, or one for all where groups are of whole pipelines."""
        budget = GROUPS_COST // len(graphs)
        none = SyncGraph(1)
        return [
            self._stage(now, number, states, silent, graphs[number] if number < len(graphs) else none, budget)
            for number in range(len(self._views))
        ]

    def _stage(
        self,
        now: float,
        number: int,
        states: Mapping[Worker, str],
        silent: Mapping[Worker, float],
        graph: SyncGraph,
        budget: int,
    ) -> StageStatus:
        views = self._views[number]
        since = graph.round - graph.rounds + 1
        rows: list[GroupRow] = []
        for made, members, group in reversed(graph.meetings()):
            budget -= len(members) + 4
            if budget < 0:
                since = made + 1
                break
            rows.append(_row(made, members, group))
        workers = [Worker(number, pipeline) for pipeline in range(len(views))]
        return StageStatus(
            states="".join(states.get(worker, "-")[0] for worker in workers),
            iterations=[view.iteration for view in views],
            last_groups=[None if view.last_group is None else view.last_group.sequence for view in views],
            silent=[silent.get(worker) for worker in workers],
            joined=[None if view.joined is None else round(now - view.joined, 3) for view in views],
            seconds=[view.seconds for view in views],
            waiting=[view.waiting for view in views],
            round=graph.round,
            since=since,
            groups=rows[::-1],
            reasons=dict(self.reasons[number]),
        )


def _row(made: int, members: list[int], group: Group | None) -> GroupRow:
    if group is None:
        return GroupRow(-1, made, members, "")
    equal = min(group.weights) == max(group.weights)
    return GroupRow(group.sequence, made, members, group.reason, () if equal else group.weights)


def _group(row: GroupRow) -> Group | None:
    if row.number < 0:
        return None
    weights = row.weights or (1 / len(row.pipelines),) * len(row.pipelines)
    return Group(tuple(Worker(0, pipeline) for pipeline in row.pipelines), weights, row.number, row.reason)
