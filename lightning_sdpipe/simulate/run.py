"""Results of a simulation, and the functions that start one.

The age of what models contain is counted from the events of a run alone, for any policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.decisions import Decision, Group
from lightning_sdpipe.policies.events import Event, Joined, Left, Lost, Progress, Ready, Worker
from lightning_sdpipe.policies.pairing import uniform
from lightning_sdpipe.policies.policy import Policy, PolicyConfig
from lightning_sdpipe.policies.sync_graph import mean_mixing_matrix, mixing_radius
from lightning_sdpipe.simulate.pipelines import Pipelines, Work


def lags(entries: Iterable[tuple[float, Event, Sequence[Decision]]], stage: int, size: int) -> list[tuple[float, int]]:
    """Return the largest number of steps of any pipeline that a model of ``stage`` lacks, with the time of each change.

    That is n_i - V_k[i] of ``policies/versions.py`` over the participants, with pipelines as nodes. The model of a
    group's member that neither waits nor is answered contains the average from the end of its step on.

    Args:
        entries: times, events and decisions, as in a scheduler's log.
        size: N, the number of pipelines.
    """
    versions = [[0] * size for _ in range(size)]
    active: set[int] = set()
    waiting: set[int] = set()
    arriving: dict[int, list[int]] = {}
    history: list[tuple[float, int]] = []
    for at, event, decisions in entries:
        match event:
            case Joined(worker) if worker.stage == stage:
                active.add(worker.pipeline)
            case Left(worker) | Lost(worker) if worker.stage == stage:
                active.discard(worker.pipeline)
                waiting.discard(worker.pipeline)
            case Ready(worker) if worker.stage == stage:
                own = versions[worker.pipeline]
                own[:] = map(max, own, arriving.pop(worker.pipeline, own))
                own[worker.pipeline] += 1
                waiting.add(worker.pipeline)
        groups = [group for group in decisions if group.stage == stage]
        largest = _largest(versions, active)  # before anything that this event lets happen
        for group in groups:
            members = [worker.pipeline for worker in group.members]
            newest = list(map(max, *(versions[p] for p in members))) if len(members) > 1 else versions[members[0]]
            for p in members:
                if p in waiting:
                    versions[p] = list(newest)
                else:
                    arriving[p] = list(map(max, newest, arriving.get(p, newest)))
            waiting.difference_update(p for p, w in zip(members, group.members, strict=True) if w not in group.passive)
        if not history or history[-1][1] != largest:
            history.append((at, largest))
        if groups and (after := _largest(versions, active)) != largest:
            history.append((at, after))
    return history


def _largest(versions: Sequence[Sequence[int]], active: set[int]) -> int:
    return max((versions[i][i] - versions[k][i] for i in active for k in active), default=0)


@dataclass(frozen=True)
class Run:
    """The events of a run; times are in virtual seconds."""

    work: Work
    groups: list[tuple[float, Group]]
    """Time when each group went out."""
    entries: list[tuple[float, Event, list[Decision]]]
    """Every event with its time and the decisions that followed, as in a scheduler's log."""
    finished: dict[Worker, float]
    """Time when each worker finished; workers that are stuck are missing."""
    waited: dict[Worker, float]
    """Time for which each worker waited for its groups, after its own backwards."""

    @property
    def stuck(self) -> list[Worker]:
        """Workers that would have waited for ever: the policy has deadlocked."""
        return [worker for worker in self.waited if worker not in self.finished]

    @property
    def throughput(self) -> float:
        """Mini-batches per second of all pipelines, each over its own time; 0 if some are stuck.

        Endless training would reach this rate. A real epoch ends with its slowest pipeline: see :attr:`seconds`.
        """
        return sum(self.rates())

    def rates(self, first: int = 0) -> list[float]:
        """Return the mini-batches per second of each pipeline, from its mini-batch ``first`` on; 0 for all if some are
        stuck."""
        pipelines = range(self.work.num_pipelines)
        if self.stuck:
            return [0.0 for _ in pipelines]
        begun = dict.fromkeys(pipelines, 0.0)
        for at, event, _ in self.entries:
            if isinstance(event, Progress) and event.iteration == first - 1:
                begun[event.worker.pipeline] = max(at, begun[event.worker.pipeline])
        ended = [max(self.finished[Worker(j, i)] for j in range(self.work.depth(i))) for i in pipelines]
        return [(self.work.iterations - first) / (end - begun[i]) for i, end in enumerate(ended)]

    @property
    def seconds(self) -> float:
        """Seconds until all workers were done."""
        return max(self.finished.values(), default=0.0)

    @property
    def mean_group_size(self) -> float:
        """Mean number of members over all groups."""
        return sum(len(group.members) for _, group in self.groups) / max(1, len(self.groups))

    @property
    def reasons(self) -> Counter[str]:
        """Number of groups by reason."""
        return Counter(group.reason for _, group in self.groups)

    @property
    def waiting_share(self) -> float:
        """Share of the workers' time for which they waited for their groups."""
        return sum(self.waited.values()) / max(1e-12, sum(self.finished.values()))

    def lags(self, stage: int = 0) -> list[tuple[float, int]]:
        """Return the largest number of steps of any pipeline that models of ``stage`` lacked, by time; see
        :func:`lags`."""
        return lags(self.entries, stage, self.work.num_pipelines)

    def rho(self, stage: int = 0) -> float:
        """Return ρ of P-Reduce's theorem 1 over all groups of ``stage``; needs numpy."""
        groups = [([w.pipeline for w in g.members], g.weights) for _, g in self.groups if g.stage == stage]
        return mixing_radius(mean_mixing_matrix(groups, range(self.work.num_pipelines)))


def jittered(seconds: float, by: float, seed: int = 0) -> Callable[[Worker, int], float]:
    """Return compute times for :class:`Work`: ``seconds``, varied by up to the share ``by``."""

    def of(worker: Worker, iteration: int) -> float:
        return seconds * (1 + by * (2 * uniform(seed, worker.stage, worker.pipeline, iteration) - 1))

    return of


def simulate(policy: Policy | PolicyConfig, work: Work) -> Run:
    """Run ``work`` under ``policy``: a new one, or values to make one from.

    Raises:
        BrokenRule: a decision of the policy cannot be carried out.
        ConfigurationError: pipelines do not wait for the policy's groups.
    """
    if isinstance(policy, PolicyConfig):
        if policy.rounds_are_apart:
            raise ConfigurationError(
                f"{registry.name_of(policy)!r} cannot be simulated: its pipelines train on while they are ready for a "
                "round, and a simulation is of pipelines that wait for their groups; take 'no_sync', which never waits"
            )
        work = replace(work, announce=work.announce or policy.announces)
        policy = registry.build(policy, work.num_stages, work.num_pipelines, work.depths)
    pipelines = Pipelines(policy, work)
    pipelines.run()
    replicas = pipelines.replicas.values()
    return Run(
        work,
        pipelines.groups,
        pipelines.entries,
        {replica.worker: replica.finished for replica in replicas if replica.finished is not None},
        {replica.worker: replica.waited for replica in replicas},
    )
