"""SDPipe's semi-decentralised policy: small groups when workers drift apart, large ones when they do not.

Per stage (SDPipe §3.2, §3.4, Algorithm 2):

1. The first ready worker opens a window of its own length T (see ``window.py``). A worker that is ready when
   the window has lasted exactly T is too late; hence T = 0 gives groups of one.
2. The window ends early when every active worker has come: EVERYBODY_CAME. Such a group connects all.
3. When it ends, the candidate is validated: do the groups of the last P rounds (``sync_graph.py``) connect
   all active workers once the candidate is added? If so, it goes out: WINDOW_CLOSED.
4. If not, the stage *enforces*: it takes the token and waits, without a time limit, until the workers that have come
   connect the graph: ENFORCED. There is one token for all stages.
5. A stage that would enforce while another holds the token lets its candidate go: TOKEN_BUSY.
6. Enforcement waits only for workers that can come. When one leaves, what is left is validated again:
   WORKER_LOST. The token is free as soon as its stage's group goes out or no worker there waits any more.

Promise: after a group with any reason but TOKEN_BUSY (after all groups of one decision, where a candidate was split),
the last P rounds connect the stage's active workers. With one stage the token is always free.

Why nothing deadlocks: a ready worker waits without a limit of time only in the stage that holds the token
(T finite). The workers missing there compute, or wait in other stages, where windows end by themselves; so
they arrive, and when all active ones have, the graph is connected. With T = ∞ every group is EVERYBODY_CAME,
nothing is ever enforced, and all stages wait for the same iteration: all-reduce.

T = 0 is local SGD: every group has one member, except that connectivity is still enforced over P rounds. With
``connectivity=None`` nothing is enforced and T = 0 is local SGD exactly.

In a group of k each member exchanges 2 (k − 1) messages, so with many pipelines a candidate that was not
enforced is split into groups of at most ``max_group``. The members are seated by a tournament table that turns
every round, since equal speeds would otherwise bring the same workers together for ever (``pairing.py``). If only
the whole candidate connects the stage, it goes out whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from lightning_sdpipe.errors import ConfigurationError, check_choices, check_integer, refusal
from lightning_sdpipe.policies.capabilities import ASKED, GROUPS, Capabilities
from lightning_sdpipe.policies.decisions import Decision, Reason
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.group_policy import GroupPolicy
from lightning_sdpipe.policies.local_sgd import LocalSGDPolicy
from lightning_sdpipe.policies.pairing import by_turns
from lightning_sdpipe.policies.policy import PolicyConfig, Unit
from lightning_sdpipe.policies.sync_graph import Sets, SyncGraph
from lightning_sdpipe.policies.window import AdaptiveWindow, Length

PIPELINES_IN_ONE_GROUP = 8
"""Largest number of pipelines whose candidates are not split unless ``max_group`` says otherwise."""

SPLIT_SIZE = 4
"""Largest size of a part of a split group. Pairs connect the stage so slowly that enforcing costs more than they
save."""

MIN_GROUP = 2
"""Smallest group that does not widen the window of the worker that opened it, unless ``min_group`` says otherwise."""


class SemiDecentralized(PolicyConfig, frozen=True):
    """SDPipe: models are averaged after every step, in groups of workers that are ready within a window.

    ``window`` is in seconds, inf for one group of all; ``"auto"`` waits until the workers that are expected soon have
    come; ``"paper"`` is the rule of §4: up to 1/N of the measured iteration time. Each worker's window is doubled when
    the group that it opened came out below ``min_group``, else it becomes 0.9 times as long; ``"auto"`` does not adapt
    like that, and refuses a ``min_group``.

    ``connectivity`` is P, None to enforce nothing. It counts rounds, each of as many ready signals as the stage has
    active workers, as the artefact does; with ``connectivity_unit="groups"``, groups, as the paper's text says. Groups
    larger than ``max_group`` are split; None is 4 beyond eight pipelines, else no limit.
    """

    registered = "semi_decentralized"
    forms = ({}, {"window": math.inf})

    window: float | str = "auto"
    connectivity: int | None = 10
    min_group: int = MIN_GROUP
    max_group: int | None = None
    connectivity_unit: Unit = "rounds"

    def __post_init__(self) -> None:
        if self.window == "inf":  # JSON and YAML users can write it this way
            msgspec.structs.force_setattr(self, "window", math.inf)
        seconds = 0.0 if self.window in ("auto", "paper") else self.window
        if isinstance(seconds, bool | str) or not seconds >= 0:  # NaN is refused too
            raise refusal("window", self.window, 'seconds from 0 to inf, "auto" or "paper"')
        check_integer("connectivity", self.connectivity, 1, "rounds, or null to enforce nothing", optional=True)
        check_integer("min_group", self.min_group, 1, "workers")
        check_integer("max_group", self.max_group, 2, "workers, or null to choose", optional=True)
        check_choices(self)
        if self.min_group != MIN_GROUP and self.window in ("auto", 0, math.inf):
            raise ConfigurationError(
                f"min_group={self.min_group} has no effect with window={self.window}, which is not adapted to the size "
                'of groups; leave min_group out, or choose window="paper" or a number of seconds'
            )
        if self.max_group is not None and self.max_group < self.min_group:
            raise refusal("max_group", self.max_group, f"at least min_group, which is {self.min_group}")
        if self.max_group is not None and self.window == math.inf:
            raise ConfigurationError(
                f"max_group={self.max_group} contradicts window=inf, which makes one group of all workers; "
                "leave max_group out or choose a finite window"
            )

    @property
    def capabilities(self) -> Capabilities:
        return replace(GROUPS, data=ASKED) if self.window == math.inf else GROUPS

    def make_policy(self, num_stages: int, num_pipelines: int) -> GroupPolicy:
        if self.window == math.inf:  # waiting for all without a token is safe only if all stages do it
            return LocalSGDPolicy(num_stages, num_pipelines, every=1)
        return SemiDecentralizedPolicy(self, num_stages, num_pipelines)

    def largest(self, num_pipelines: int) -> int | None:
        """Return the largest size of a group that is not split; None if no group is split."""
        chosen = num_pipelines > PIPELINES_IN_ONE_GROUP and self.window != math.inf
        return SPLIT_SIZE if self.max_group is None and chosen else self.max_group

    @property
    def looks_back(self) -> tuple[int, Unit]:
        return (super().looks_back[0] if self.connectivity is None else self.connectivity), self.connectivity_unit


class _Stage:
    """The state of one stage besides the waiting workers."""

    def __init__(self, config: SemiDecentralized, num_pipelines: int) -> None:
        window: Length = config.window  # type: ignore[assignment]  # checked when the config was made
        self.window = AdaptiveWindow(window, num_pipelines)
        self.graph = None if config.connectivity is None else SyncGraph(config.connectivity, config.connectivity_unit)
        self.opener: int | None = None
        self.deadline = math.inf
        self.enforcing = False
        self.bridged: set[int] = set()
        """While enforcing: the components that the waiting workers would join."""
        self.releases = 0


class SemiDecentralizedPolicy(GroupPolicy):
    """See the module's docstring for the rules."""

    def __init__(self, config: SemiDecentralized, num_stages: int, num_pipelines: int) -> None:
        super().__init__(num_stages, num_pipelines)
        self.token_holder: int | None = None
        self._min_group = config.min_group
        self._max_group = config.largest(num_pipelines)
        self._stages = [_Stage(config, num_pipelines) for _ in range(num_stages)]

    def worker_ready(self, worker: Worker, iteration: int, now: float) -> list[Decision]:
        number, pipeline = worker.stage, worker.pipeline
        stage = self._stages[number]
        stage.window.arrived(pipeline, now)
        if stage.enforcing:
            if stage.graph is not None:
                stage.bridged.add(stage.graph.component(pipeline))
            return self._release(number, Reason.ENFORCED, now) if self._bridges(stage) else []
        if stage.opener is None:
            stage.opener = pipeline
            stage.deadline = now + stage.window.length(pipeline, now)
        if self.participants.all_wait(number):
            return self._release(number, Reason.EVERYBODY_CAME, now)
        return self._close(number, now) if stage.deadline <= now else []

    def worker_left(self, worker: Worker, now: float) -> list[Decision]:
        stage = self._stages[worker.stage]
        stage.window.paused(worker.pipeline)
        if stage.graph is not None:
            stage.graph.leave(worker.pipeline)
        if not self.participants.waiting[worker.stage]:
            self._reset(worker.stage)
        elif self._needs_nobody(worker.stage):
            return self._release(worker.stage, Reason.WORKER_LOST, now)
        return []

    def last_group_doubted(self, worker: Worker) -> None:
        """Remove that group from the sync-graph."""
        stage = self._stages[worker.stage]
        if stage.graph is not None and stage.graph.forget_last(worker.pipeline) and stage.enforcing:
            self._connects(stage, self.participants.waiting[worker.stage])

    def worker_joined(self, worker: Worker, now: float) -> list[Decision]:
        stage = self._stages[worker.stage]
        if stage.graph is not None:
            stage.graph.join(worker.pipeline)
        if stage.enforcing and self._connects(stage, self.participants.waiting[worker.stage]):
            return self._release(worker.stage, Reason.ENFORCED, now)
        return []

    def widened(self, num_pipelines: int) -> None:
        for stage in self._stages:
            stage.window.widen(num_pipelines)

    def time_passed(self, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        for number, stage in enumerate(self._stages):
            if stage.deadline <= now:
                decisions += self._close(number, now)
        return decisions

    def deadline(self) -> float | None:
        earliest = math.inf
        for stage in self._stages:
            if stage.deadline < earliest:
                earliest = stage.deadline
        return None if earliest == math.inf else earliest

    def sync_graph(self, stage: int) -> SyncGraph | None:
        """Return the graph of recent groups of ``stage``; None when connectivity is not tracked."""
        return self._stages[stage].graph

    def _close(self, number: int, now: float) -> list[Decision]:
        """End the window of stage ``number``: let the candidate go or enforce."""
        stage, waiting = self._stages[number], self.participants.waiting[number]
        if self._connects(stage, waiting):
            return self._release(number, Reason.WINDOW_CLOSED, now)
        if self.token_holder is not None:
            return self._release(number, Reason.TOKEN_BUSY, now)
        self.token_holder = number
        stage.enforcing = True
        stage.deadline = math.inf
        self._adapt(stage, len(waiting))
        return []

    def _release(self, number: int, reason: Reason, now: float) -> list[Decision]:
        """Let all waiting workers of stage ``number`` go out."""
        stage, waiting = self._stages[number], list(self.participants.waiting[number])
        if not stage.enforcing:
            self._adapt(stage, len(waiting))
        parts = [waiting]
        if not stage.enforcing and self._max_group is not None and len(waiting) > self._max_group:
            split = by_turns(waiting, self._max_group, stage.releases)
            if reason is Reason.TOKEN_BUSY or self._split_connects(stage, split):
                parts = split
        groups: list[Decision] = [self.participants.group(number, part, reason) for part in parts]
        if stage.graph is not None:
            stage.graph.record(groups)
        stage.window.answered(waiting, now)
        stage.releases += 1
        self._reset(number)
        return groups

    def _needs_nobody(self, number: int) -> bool:
        """Return whether, after a worker left, the waiting workers of stage ``number`` may go without waiting
        longer."""
        if self.participants.all_wait(number):
            return True
        stage = self._stages[number]
        return stage.enforcing and self._connects(stage, self.participants.waiting[number])

    def _adapt(self, stage: _Stage, size: int) -> None:
        if stage.opener is not None:
            stage.window.adapt(stage.opener, size < self._min_group)
            stage.opener = None

    def _reset(self, number: int) -> None:
        """Reset stage ``number``, where no worker waits: no window, no enforcement, no token."""
        stage = self._stages[number]
        stage.opener = None
        stage.deadline = math.inf
        stage.enforcing = False
        stage.bridged = set()
        if self.token_holder == number:
            self.token_holder = None

    @classmethod
    def _connects(cls, stage: _Stage, waiting: dict[int, int]) -> bool:
        """Return whether one group of all waiting workers would connect the stage. Remember which components they
        join."""
        if stage.graph is not None:
            stage.bridged = {stage.graph.component(pipeline) for pipeline in waiting}
        return cls._bridges(stage)

    @staticmethod
    def _bridges(stage: _Stage) -> bool:
        return stage.graph is None or len(stage.bridged) == stage.graph.components

    @staticmethod
    def _split_connects(stage: _Stage, parts: Sequence[Sequence[int]]) -> bool:
        """Return whether these groups, all together, would connect the stage."""
        if stage.graph is None:
            return True
        joined = Sets()
        for part in parts:
            joined.merge([stage.graph.component(pipeline) for pipeline in part])
        return stage.graph.components - joined.merged == 1
