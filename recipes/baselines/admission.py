"""Rules of parameter servers: how a push counts, and which workers may go on, without tensors or time.

A pipeline pulls the parameters, computes on them for a *clock*, pushes the changes, and pulls again when it may go on.

**Without a quorum**, a push counts at once. A pipeline may begin a clock when no active pipeline is more than s clocks
behind it. s = 0 is bulk synchronous (BSP), s > 0 stale synchronous (SSP, Ho et al. 2013; the bound of HetPipe, Park et
al. 2020), s = None asynchronous (ASP). With weights 1/staleness (HETE, Jiang et al. 2017), a push's staleness is the
number of clocks that the furthest pipeline has finished since the pusher's pull, at least 1.

**With a quorum** q, pushes are collected in rounds. A round closes when q of the pipelines that have pulled since the
last one closed have pushed; these go on together. A worker that pushes later has computed on old parameters. It counts
for no quorum and goes on at once; its push is *dropped* (synchronous training with N − q backup workers, Chen et al.
2016) or *carried* into the open round (Eager-Reduce, Li et al. 2020). The mean of a round is over the pipelines that
pushed in time or, if late pushes are carried, over all N.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.policies import Decision, GroupPolicy, PolicyConfig, Worker, check_integer, refusal


class AdmissionRule(PolicyConfig, frozen=True):
    """The checked values of one rule, by which a run's parameter servers act. It can also be simulated, as the policy
    with the import path ``recipes.baselines.admission:AdmissionRule``.

    Args:
        quorum: q, the number of pushes that close a round; None for no quorum.
        late: treatment of pushes after the quorum: ``"drop"`` or ``"carry"``.
        staleness: s, in clocks; None for no limit.
        weights: weights of pushes: ``"equal"`` or ``"inverse_staleness"``.
        combine: whether pushes are summed (``"sum"``) or averaged (``"mean"``).

    Raises:
        ConfigurationError: a value is not allowed, or has no effect beside the others.
    """

    quorum: int | None = None
    late: Literal["drop", "carry"] = "drop"
    staleness: int | None = 0
    weights: Literal["equal", "inverse_staleness"] = "equal"
    combine: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        check_integer("quorum", self.quorum, 1, "pipelines, or null for none", optional=True)
        check_integer("staleness", self.staleness, 0, "clocks, or null for no limit", optional=True)
        for name, allowed in (
            ("late", ("drop", "carry")),
            ("weights", ("equal", "inverse_staleness")),
            ("combine", ("mean", "sum")),
        ):
            if getattr(self, name) not in allowed:
                raise refusal(name, getattr(self, name), " or ".join(f'"{value}"' for value in allowed))
        if self.quorum is not None and self.staleness != 0:
            raise ConfigurationError(
                f"staleness={self.staleness} contradicts quorum={self.quorum}: a worker that is late by a round never "
                "leads; leave one of them out"
            )
        if self.late == "carry" and self.quorum is None:
            raise ConfigurationError(
                'late="carry" has no effect without a quorum, when no worker is late; give a quorum'
            )
        if self.weights == "inverse_staleness" and self.staleness == 0:
            raise ConfigurationError(
                'weights="inverse_staleness" has no effect with staleness=0, where all pushes are as fresh; give a '
                "staleness above 0, or null for no limit"
            )

    @property
    def announces(self) -> Literal["early", "late"]:
        return "late"

    def make_policy(self, num_stages: int, num_pipelines: int) -> AdmissionPolicy:
        return AdmissionPolicy(self, num_stages, num_pipelines)

    def check_fits(self, num_pipelines: int) -> None:
        """Refuse a quorum that can never be reached.

        Raises:
            ConfigurationError: the quorum is above N.
        """
        if self.quorum is not None and self.quorum > num_pipelines:
            raise ConfigurationError(
                f"quorum={self.quorum} is not allowed with {num_pipelines} pipelines; give 1 to {num_pipelines}"
            )


@dataclass(frozen=True)
class Verdict:
    """The consequences of a push.

    Args:
        weight: factor by which the push is multiplied and added to the round's sum; 0 drops it.
        closes: factor by which that sum is multiplied and added to the parameters now, so that the next round begins
            empty; None keeps the sum.
        released: pipelines that may pull and go on now; all of them have pushed.
    """

    weight: float
    closes: float | None
    released: tuple[int, ...]


class Admission(ABC):
    """Follows the pipelines of one stage. An action that is not allowed now raises ValueError and changes nothing."""

    def __init__(self, rule: AdmissionRule, num_pipelines: int) -> None:
        rule.check_fits(num_pipelines)
        self._rule = rule
        self._num_pipelines = num_pipelines
        self._pulled: dict[int, int] = {}
        """Version of the parameters that each active pipeline computes on."""
        self._waiting: list[int] = []

    @property
    def active(self) -> frozenset[int]:
        return frozenset(self._pulled)

    def join(self, pipeline: int) -> None:
        """Add ``pipeline``, which has the current parameters."""
        if pipeline in self._pulled:
            raise ValueError(f"pipeline {pipeline} joined twice")
        self._pulled[pipeline] = self._version()

    def push(self, pipeline: int) -> Verdict:
        """Note that ``pipeline`` has finished a clock and waits to go on."""
        self._check_computes(pipeline)
        self._waiting.append(pipeline)
        return Verdict(self._count(pipeline), *self._settle())

    def leave(self, pipeline: int, pushes: bool) -> Verdict:
        """Remove ``pipeline``. If it ``pushes``, it pushes its unfinished clock."""
        self._check_computes(pipeline)
        weight = self._count(pipeline) if pushes else 0.0
        del self._pulled[pipeline]
        return Verdict(weight, *self._settle())

    def pull(self, pipeline: int) -> None:
        """Note that ``pipeline``, which was released, pulls the current parameters."""
        self._check_computes(pipeline)
        self._pulled[pipeline] = self._version()

    def waits(self, pipeline: int) -> bool:
        """Return whether ``pipeline`` has pushed and may not go on yet."""
        return pipeline in self._waiting

    @abstractmethod
    def awaited_by(self, pipeline: int) -> list[int]:
        """Return the pipelines whose pushes ``pipeline`` awaits: all of them or, with a quorum, some."""

    def _check_computes(self, pipeline: int) -> None:
        if pipeline not in self._pulled:
            raise ValueError(f"pipeline {pipeline} takes no part")
        if pipeline in self._waiting:
            raise ValueError(f"pipeline {pipeline} may not go on yet, since it awaits {self.awaited_by(pipeline)}")

    @abstractmethod
    def _version(self) -> int:
        """Return the version of the current parameters."""

    @abstractmethod
    def _count(self, pipeline: int) -> float:
        """Return the weight of the push of ``pipeline``."""

    @abstractmethod
    def _settle(self) -> tuple[float | None, tuple[int, ...]]:
        """Return ``closes`` and ``released`` as in :class:`Verdict`."""

    def _release(self, pipelines: list[int]) -> tuple[int, ...]:
        self._waiting = [pipeline for pipeline in self._waiting if pipeline not in pipelines]
        return tuple(pipelines)


class BoundedStaleness(Admission):
    """Admission without a quorum: every push is its own round. Versions count the clocks of the furthest pipeline.

    There is no deadlock, since the worker that is furthest behind may always go on.
    """

    def __init__(self, rule: AdmissionRule, num_pipelines: int) -> None:
        super().__init__(rule, num_pipelines)
        self._finished: dict[int, int] = {}

    def join(self, pipeline: int) -> None:
        """See the base class; the pipeline starts at the clock of the one that is furthest behind."""
        super().join(pipeline)
        self._finished[pipeline] = min((self._finished[other] for other in self.active - {pipeline}), default=0)

    def leave(self, pipeline: int, pushes: bool) -> Verdict:
        """See the base class."""
        verdict = super().leave(pipeline, pushes)
        del self._finished[pipeline]
        return verdict

    def finished(self, pipeline: int) -> int:
        """Return how many clocks ``pipeline`` has finished."""
        return self._finished[pipeline]

    def awaited_by(self, pipeline: int) -> list[int]:
        """See the base class."""
        if self._rule.staleness is None:
            return []
        least = self._finished[pipeline] - self._rule.staleness
        return sorted(other for other in self.active if self._finished[other] < least)

    def _version(self) -> int:
        return max(self._finished.values(), default=0)

    def _count(self, pipeline: int) -> float:
        self._finished[pipeline] += 1
        weight = 1.0 if self._rule.combine == "sum" else 1 / self._num_pipelines
        if self._rule.weights == "inverse_staleness":
            weight /= max(1, self._version() - self._pulled[pipeline])
        return weight

    def _settle(self) -> tuple[float | None, tuple[int, ...]]:
        return 1.0, self._release([pipeline for pipeline in self._waiting if not self.awaited_by(pipeline)])


class Rounds(Admission):
    """Admission with a quorum. Versions are rounds.

    There is no deadlock: waiting pipelines have pushed in time, and all others compute. When one of those pushes, it is
    in time, or it goes on at once and pulls. If fewer pipelines than the quorum are active, all of them are the quorum.
    """

    def __init__(self, rule: AdmissionRule, num_pipelines: int) -> None:
        super().__init__(rule, num_pipelines)
        self._round = 0
        self._in_time = 0
        self._carried = False

    def awaited_by(self, pipeline: int) -> list[int]:
        """See the base class."""
        return sorted(self.active.difference(self._waiting))

    def _version(self) -> int:
        return self._round

    def _count(self, pipeline: int) -> float:
        if self._pulled[pipeline] == self._round:
            self._in_time += 1
            return 1.0
        if self._rule.late == "drop":
            return 0.0
        self._carried = True
        return 1.0

    def _settle(self) -> tuple[float | None, tuple[int, ...]]:
        assert self._rule.quorum is not None
        if self._in_time < min(self._rule.quorum, len(self.active)) or not (self._in_time or self._carried):
            return None, self._release([late for late in self._waiting if self._pulled[late] != self._round])
        closes = 1.0
        if self._rule.combine == "mean":
            closes /= self._num_pipelines if self._rule.late == "carry" else self._in_time
        self._round, self._in_time, self._carried = self._round + 1, 0, False
        return closes, self._release(list(self._waiting))


def admission(rule: AdmissionRule, num_pipelines: int) -> Admission:
    """Return the admission by ``rule`` for ``num_pipelines`` pipelines, none of which has joined yet."""
    return BoundedStaleness(rule, num_pipelines) if rule.quorum is None else Rounds(rule, num_pipelines)


class AdmissionPolicy(GroupPolicy):
    """The admission of parameter servers as a policy: each worker that may go on is a group by itself."""

    def __init__(self, rule: AdmissionRule, num_stages: int, num_pipelines: int) -> None:
        super().__init__(num_stages, num_pipelines)
        self._servers = [admission(rule, num_pipelines) for _ in range(num_stages)]
        self.verdicts: list[Verdict] = []

    def worker_joined(self, worker: Worker, now: float) -> list[Decision]:
        self._servers[worker.stage].join(worker.pipeline)
        return []

    def worker_ready(self, worker: Worker, iteration: int, now: float) -> list[Decision]:
        return self._carry_out(worker.stage, self._servers[worker.stage].push(worker.pipeline))

    def worker_left(self, worker: Worker, now: float) -> list[Decision]:
        return self._carry_out(worker.stage, self._servers[worker.stage].leave(worker.pipeline, pushes=False))

    def _carry_out(self, stage: int, verdict: Verdict) -> list[Decision]:
        self.verdicts.append(verdict)
        for pipeline in verdict.released:
            self._servers[stage].pull(pipeline)
        return [self.participants.group(stage, [pipeline], "may go on") for pipeline in verdict.released]
