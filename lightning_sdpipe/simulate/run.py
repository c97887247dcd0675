"""What came out of a simulation, and how to start one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.decisions import Decision, Group
from lightning_sdpipe.policies.draws import uniform
from lightning_sdpipe.policies.events import Event, Progress, Worker
from lightning_sdpipe.policies.mixing import mean_mixing_matrix, mixing_radius
from lightning_sdpipe.policies.policy import Policy, PolicyConfig
from lightning_sdpipe.simulate.lag import lags
from lightning_sdpipe.simulate.pipelines import Pipelines, Work


@dataclass(frozen=True)
class Run:
    """What happened; times in virtual seconds."""

    work: Work
    groups: list[tuple[float, Group]]
    """When each group went out."""
    entries: list[tuple[float, Event, list[Decision]]]
    """Every event with its time and the decisions that followed, as in a scheduler's log."""
    finished: dict[Worker, float]
    """When each worker was done; those that are stuck are missing."""
    waited: dict[Worker, float]
    """How long each worker stood still for its groups, after its own backwards."""

    @property
    def stuck(self) -> list[Worker]:
        """Workers that would have waited for ever: the policy has deadlocked."""
        return [worker for worker in self.waited if worker not in self.finished]

    @property
    def throughput(self) -> float:
        """Mini-batches per second of all pipelines, each over its own time; 0 if some are stuck.

        Which is what endless training would reach. A real epoch ends with its slowest pipeline: see :attr:`seconds`.
        """
        return sum(self.rates())

    def rates(self, first: int = 0) -> list[float]:
        """Mini-batches per second of each pipeline, from its mini-batch ``first`` on; 0 for all if some are stuck."""
        pipelines = range(self.work.num_pipelines)
        if self.stuck:
            return [0.0 for _ in pipelines]
        begun = dict.fromkeys(pipelines, 0.0)
        for at, event, _ in self.entries:
            if isinstance(event, Progress) and event.iteration == first - 1:
                begun[event.worker.pipeline] = max(at, begun[event.worker.pipeline])
        stages = range(self.work.num_stages)
        ended = [max(self.finished[Worker(j, i)] for j in stages) for i in pipelines]
        return [(self.work.iterations - first) / (end - begun[i]) for i, end in enumerate(ended)]

    @property
    def seconds(self) -> float:
        """Until everybody was done."""
        return max(self.finished.values(), default=0.0)

    @property
    def mean_group_size(self) -> float:
        """Over the groups."""
        return sum(len(group.members) for _, group in self.groups) / max(1, len(self.groups))

    @property
    def reasons(self) -> Counter[str]:
        """How many groups went out for each reason."""
        return Counter(group.reason for _, group in self.groups)

    @property
    def waiting_share(self) -> float:
        """Of the workers' time, what they stood still for their groups."""
        return sum(self.waited.values()) / max(1e-12, sum(self.finished.values()))

    def lags(self, stage: int = 0) -> list[tuple[float, int]]:
        """How many steps of any pipeline models of ``stage`` lacked at most, by time; see ``simulate/lag.py``."""
        return lags(self.entries, stage, self.work.num_pipelines)

    def rho(self, stage: int = 0) -> float:
        """ρ of P-Reduce's theorem 1 over all groups of ``stage``; needs numpy."""
        groups = [([w.pipeline for w in g.members], g.weights) for _, g in self.groups if g.stage == stage]
        return mixing_radius(mean_mixing_matrix(groups, range(self.work.num_pipelines)))


def jittered(seconds: float, by: float, seed: int = 0) -> Callable[[Worker, int], float]:
    """Compute times for :class:`Work`: ``seconds``, and up to the share ``by`` of it more or less."""

    def of(worker: Worker, iteration: int) -> float:
        return seconds * (1 + by * (2 * uniform(seed, worker.stage, worker.pipeline, iteration) - 1))

    return of


def simulate(policy: Policy | PolicyConfig, work: Work) -> Run:
    """Runs ``work`` under ``policy``, which must be new, or is made from its values.

    Raises:
        BrokenRule: the policy decided what cannot be carried out.
    """
    if isinstance(policy, PolicyConfig):
        work = replace(work, announce=work.announce or policy.announces)
        policy = registry.build(policy, work.num_stages, work.num_pipelines)
    pipelines = Pipelines(policy, work)
    pipelines.run()
    replicas = [replica for stage in pipelines.replicas for replica in stage]
    return Run(
        work,
        pipelines.groups,
        pipelines.entries,
        {replica.worker: replica.finished for replica in replicas if replica.finished is not None},
        {replica.worker: replica.waited for replica in replicas},
    )
