"""The course of a training in virtual time: which pipeline trains which batch when, and which pipelines average.

Policies decide and dealers deal as in a real run, but batches are not computed here. Pipelines have one stage.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from lightning_sdpipe.dealing.dealer import Dealer
from lightning_sdpipe.dealing.leases import Asked, Lease, Segment, Trained
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.policies import PolicyConfig, registry
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.announcing import share_before
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Event, Joined, Left, Progress, Ready, Tick, Worker
from lightning_sdpipe.scheduler.client.reporting import HeardLeases
from lightning_sdpipe.simulate import Work, simulate
from lightning_sdpipe.simulate.pipelines import FORWARD_SHARE


class Step(NamedTuple):
    """A mini-batch whose gradient is complete at the time ``at``."""

    at: float
    pipeline: int
    epoch: int
    position: int
    """Position of the batch in the epoch: batch b of home shard i is at b × N + i."""
    update: int
    """Number of updates in the epoch that equally fast pipelines would have made before, by which learning rates
    count."""


class Mean(NamedTuple):
    """The models of ``pipelines`` become their weighted mean; in a ``meeting``, all do, buffers included."""

    at: float
    pipelines: Sequence[int]
    weights: Sequence[float]
    meeting: bool = False


Course = list[Step | Mean]


def in_step(work: Work, epochs: int, config: PolicyConfig | None = None) -> list[float]:
    """Return when all pipelines have made each update, under a policy whose pipelines wait for the slowest: by default
    all-reduce's. ``work.iterations`` is the number in an epoch."""
    updates = work.iterations * epochs
    run = simulate(config or AllReduceModels(), replace(work, iterations=updates))
    ends = [0.0] * updates
    for at, event, _ in run.entries:
        if isinstance(event, Progress):
            ends[event.iteration] = max(ends[event.iteration], at)
    return ends


def dealt(config: PolicyConfig, work: Work, epochs: int) -> Course:
    """Return the course of ``epochs`` whose batches are dealt by speed; at the end of each, all pipelines meet.

    Args:
        config: configuration of the policy.
        work: the work, of pipelines of one stage; ``work.iterations`` is each one's number in an epoch if all were
            equally fast.
        epochs: number of epochs.

    Raises:
        ConfigurationError: there are several stages, or the policy lets pipelines average while they compute.
    """
    if work.num_stages != 1:
        raise ConfigurationError(f"Courses are of pipelines of one stage, not of {work.num_stages}.")
    return _Dealt(config, work).run(epochs)


class _Pipeline:
    """A pipeline, and its progress in the batches that it was dealt."""

    def __init__(self, number: int, leases: HeardLeases) -> None:
        self.worker = Worker(0, number)
        self.leases = leases
        self.lease: Lease | None = None
        self.used = self.ordinal = self.trained = 0
        self.iteration = -1
        self.takes_part = False
        self.begun: float | None = None
        """Time of its first computation, when tracks begin."""
        self.started = self.ends = 0.0
        """When its present mini-batch started, and when it ends."""


class _Dealt:
    """See :func:`dealt`."""

    def __init__(self, config: PolicyConfig, work: Work) -> None:
        self._policy = registry.build(config, 1, work.num_pipelines, ())
        self._announced = 1.0 if config.announces == "late" else share_before(1)
        self._work, self._dealer = work, Dealer(1, work.num_pipelines)
        self._pipelines = [_Pipeline(i, HeardLeases(lambda: self._now)) for i in range(work.num_pipelines)]
        self._now = 0.0
        self._queue: list[tuple[float, int, Literal["ready", "next"], _Pipeline]] = []
        self._pushed = 0
        self._course: Course = []

    def run(self, epochs: int) -> Course:
        everybody = range(self._work.num_pipelines)
        for epoch in range(epochs):
            self._segment = Segment(0, epoch, 0, self._work.iterations)
            for pipeline in self._pipelines:
                pipeline.lease, pipeline.used, pipeline.ordinal, pipeline.trained = None, 0, 0, 0
                pipeline.leases.begin(self._segment)
            for pipeline in self._pipelines:
                self._ask(pipeline)
            while self._queue or self._policy.deadline() is not None:
                self._go_on()
            share = 1 / self._work.num_pipelines
            self._course.append(Mean(self._now, everybody, [share] * len(everybody), meeting=True))
        return self._course

    def _go_on(self) -> None:
        due = self._policy.deadline()
        if not self._queue or (due is not None and due <= self._queue[0][0]):
            assert due is not None
            self._now = max(self._now, due)
            self._tell(Tick())
            return
        self._now, _, kind, pipeline = heapq.heappop(self._queue)
        if kind == "ready":
            self._tell(Ready(pipeline.worker, pipeline.iteration))
            return
        seconds = self._now - pipeline.started
        self._tell(Progress(pipeline.worker, pipeline.iteration, 1, seconds, self._now - pipeline.ends))
        pipeline.trained += 1
        pipeline.leases.trained(pipeline.trained)
        self._hear(self._dealer.on(Trained(pipeline.worker, self._segment, pipeline.leases.done()), self._now))
        lease = pipeline.lease
        if lease is not None and pipeline.used < lease.size:
            self._start(pipeline, lease)
        else:
            self._ask(pipeline)

    def _ask(self, pipeline: _Pipeline) -> None:
        asked = Asked(pipeline.worker, self._segment, pipeline.ordinal, pipeline.leases.done())
        self._hear(self._dealer.on(asked, self._now))

    def _hear(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            pipeline = self._pipelines[lease.pipeline]
            pipeline.leases.hear(lease)
            pipeline.lease, pipeline.used, pipeline.ordinal = lease, 0, lease.ordinal + 1
            if lease.size:
                self._start(pipeline, lease)
                continue
            if pipeline.takes_part:
                pipeline.takes_part = False
                self._tell(Left(pipeline.worker))
            if not lease.over:
                self._ask(pipeline)  # and wait until there is more

    def _start(self, pipeline: _Pipeline, lease: Lease) -> None:
        """Compute the next mini-batch of a lease."""
        if not pipeline.takes_part:
            pipeline.takes_part = True
            self._tell(Joined(pipeline.worker))
        progress = lease.progress + pipeline.used * lease.advance
        position = (lease.start + pipeline.used) * self._work.num_pipelines + lease.home
        pipeline.used += 1
        pipeline.iteration += 1
        pipeline.started = self._now
        backward = self._after(pipeline, "forward", self._now, FORWARD_SHARE)
        pipeline.ends = self._after(pipeline, "backward", backward, 1 - FORWARD_SHARE)
        announced = backward + self._announced * (pipeline.ends - backward)
        update = min(int(progress / self._work.num_pipelines + 1e-9), lease.segment.stop - 1)
        number = pipeline.worker.pipeline
        self._course.append(Step(pipeline.ends, number, lease.segment.epoch, position, update))
        self._push(announced, "ready", pipeline)

    def _after(self, pipeline: _Pipeline, during: Literal["forward", "backward"], at: float, share: float) -> float:
        work, slow, number = self._work, self._work.heterogeneity, pipeline.worker.pipeline
        given = work.seconds
        seconds = given if isinstance(given, float | int) else given(pipeline.worker, pipeline.iteration)
        if slow is None:
            return at + share * seconds
        at += slow.delay(0, number, pipeline.iteration, during)
        if pipeline.begun is None:
            pipeline.begun = at
        track = slow.track(number)
        return at + (share * seconds if track is None else track.duration(at - pipeline.begun, share * seconds))

    def _tell(self, event: Event) -> None:
        for group in self._policy.on(event, self._now):
            self._carry_out(group)

    def _carry_out(self, group: Group) -> None:
        if group.passive:
            raise ConfigurationError(f"Courses are of groups whose members all wait for them, not of {group}.")
        members = [self._pipelines[worker.pipeline] for worker in group.members]
        end = max(self._now, *(member.ends for member in members)) + self._work.exchange(group)
        if len(members) > 1:
            self._course.append(Mean(end, [member.worker.pipeline for member in members], group.weights))
        for member in members:
            self._push(end, "next", member)

    def _push(self, at: float, kind: Literal["ready", "next"], pipeline: _Pipeline) -> None:
        self._pushed += 1
        heapq.heappush(self._queue, (at, self._pushed, kind, pipeline))
