"""Simulation of whole epochs of pipelines with dealt batches, under a virtual clock around the real dealer and
policies.

A pipeline trains its dealt batches one by one, and asks for more when it holds no more than ``prefetch`` of them, as a
DataLoader with workers does. After each batch its workers are ready, and go on when the policy has answered all of
them; a pipeline that was dealt nothing leaves the policy's groups, and joins again with its next batch. When the
segment is over, all come together, and the next one begins. Stages are not simulated one by one: they begin and end a
batch together.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from lightning_sdpipe.dealing.dealer import Dealer
from lightning_sdpipe.dealing.leases import Asked, Done, Lease, LeaseEvent, Returned, Segment, Trained
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.policies.events import Event, Joined, Left, Ready, Tick, Worker
from lightning_sdpipe.policies.policy import Policy

RECENT = 32
"""Number of batches over whose mean a worker reports its speed."""
BEAT = 1.0
"""Seconds between heartbeats."""


@dataclass(frozen=True)
class Epochs:
    """The work of the pipelines.

    Args:
        num_stages: M.
        num_pipelines: N.
        pauses: batch numbers at which the segments end; the last is the length of an epoch.
        epochs: number of epochs.
        seconds: gives the seconds that a pipeline takes for its k-th batch in the run, which it begins at a given time.
        prefetch: number of batches that a pipeline holds beside the one that it trains.
        gone: times at which pipelines leave for good: they report what they have trained, and others train the rest.
        depths: the stages of each pipeline, where these are cut unlike.
    """

    num_stages: int
    num_pipelines: int
    pauses: Sequence[int]
    seconds: Callable[[int, int, float], float]
    epochs: int = 1
    prefetch: int = 0
    gone: dict[int, float] = field(default_factory=dict)
    depths: Sequence[int] = ()

    def stages(self, pipeline: int) -> range:
        """Return the stages of a pipeline."""
        return range(self.depths[pipeline] if self.depths else self.num_stages)

    def __post_init__(self) -> None:
        if not self.pauses or sorted({0, *self.pauses}) != [0, *self.pauses]:
            raise ConfigurationError(f"pauses={self.pauses!r} is not allowed; give increasing batch numbers from 1")


@dataclass(frozen=True)
class TrainedBatch:
    """Batch ``number`` of shard ``home``, trained by ``pipeline`` from ``begun`` to ``ended``; ``progress`` before."""

    epoch: int
    home: int
    number: int
    pipeline: int
    begun: float
    ended: float
    progress: float


class _Pipeline:
    def __init__(self, number: int) -> None:
        self.number = number
        self.held: deque[tuple[Lease, int]] = deque()
        self.lengths: deque[float] = deque(maxlen=RECENT)
        self.iteration = 0
        self.ordinal = 0
        self.trained = 0
        self.last = 0.0
        self.drains = False
        """Whether the pipeline was told to train what it holds before it asks again."""
        self.asks = False
        self.computes = False
        self.unanswered: set[int] = set()
        """Stages that are ready and wait for their group."""
        self.joined = False
        self.over = False
        self.gone = False

    def done(self, now: float) -> Done:
        seconds = sum(self.lengths) / len(self.lengths) if self.lengths else None
        return Done(self.trained, seconds, now - self.last)


class DealtEpochs:
    """Runs ``work`` with ``policy``, which must be new; :attr:`trained` and :attr:`finished` have the results."""

    def __init__(self, policy: Policy, work: Epochs) -> None:
        self.work, self.policy, self.now = work, policy, 0.0
        self.dealer = Dealer(work.num_stages, work.num_pipelines, depths=work.depths)
        self.entries: list[tuple[float, LeaseEvent, list[Lease]]] = []
        self.trained: list[TrainedBatch] = []
        self.finished: list[tuple[Segment, float, list[float]]] = []
        """End of each segment, and for each pipeline the end of its last batch in it."""
        self._pipelines = [_Pipeline(i) for i in range(work.num_pipelines)]
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._pushed = 0
        self._idle = 0
        """Number of successive heartbeats while no pipeline computed."""
        self._segments = iter(
            Segment(1, epoch, start, stop)
            for epoch in range(work.epochs)
            for start, stop in zip([0, *work.pauses], work.pauses, strict=False)
        )
        self.segment = next(self._segments)

    def run(self) -> None:
        """Run until the last epoch is over, or nothing can happen any more."""
        for number, at in self.work.gone.items():
            self._push(at, partial(self._leaves_for_good, self._pipelines[number]))
        for pipeline in self._pipelines:
            self._push(BEAT * (pipeline.number + 1) / len(self._pipelines), partial(self._beat, pipeline))
        for pipeline in self._pipelines:
            self._go_on(pipeline)
        while self._queue and not all(p.gone or p.over for p in self._pipelines):
            due = self.policy.deadline()
            if due is not None and due <= self._queue[0][0]:
                self.now = max(self.now, due)
                self._tell(Tick())
                continue
            self.now, _, happens = heapq.heappop(self._queue)
            happens()

    @property
    def stuck(self) -> bool:
        """True if the run ended before the last epoch was over."""
        return not self.finished or self.finished[-1][0].epoch + 1 < self.work.epochs

    def _push(self, at: float, happens: Callable[[], None]) -> None:
        self._pushed += 1
        heapq.heappush(self._queue, (at, self._pushed, happens))

    def _deal(self, event: LeaseEvent) -> None:
        leases = self.dealer.on(event, self.now)
        self.entries.append((self.now, event, leases))
        for lease in leases:
            self._push(self.now, partial(self._receive, lease))

    def _tell(self, event: Event) -> None:
        for group in self.policy.on(event, self.now):
            for worker in group.members:
                if worker not in group.passive:
                    pipeline = self._pipelines[worker.pipeline]
                    pipeline.unanswered -= {*self.work.stages(worker.pipeline)} if self.work.depths else {worker.stage}
                    if not pipeline.unanswered:
                        self._push(self.now, partial(self._go_on, pipeline))

    def _receive(self, lease: Lease) -> None:
        pipeline = self._pipelines[lease.pipeline]
        if pipeline.gone:
            return
        pipeline.asks = False
        pipeline.ordinal = lease.ordinal + 1
        pipeline.drains = lease.size == 0
        pipeline.held += [(lease, k) for k in range(lease.size)]
        if lease.over:
            self._pause(pipeline)
        else:
            self._go_on(pipeline)

    def _go_on(self, pipeline: _Pipeline) -> None:
        if pipeline.gone or pipeline.over:
            return
        idle = not pipeline.computes and not pipeline.unanswered
        wants = len(pipeline.held) <= self.work.prefetch and not pipeline.drains
        if not pipeline.asks and (wants or (idle and not pipeline.held)):
            self._ask(pipeline)
        if not idle:
            return
        if not pipeline.held:
            self._take_part(pipeline, False)
            return
        self._take_part(pipeline, True)
        pipeline.computes = True
        lease, k = pipeline.held.popleft()
        begun = self.now
        taken = self.work.seconds(pipeline.number, pipeline.iteration, begun)
        self._push(begun + taken, partial(self._trained, pipeline, lease, k, begun))

    def _ask(self, pipeline: _Pipeline) -> None:
        pipeline.asks = True
        for stage in self.work.stages(pipeline.number):
            worker = Worker(stage, pipeline.number)
            self._deal(Asked(worker, self.segment, pipeline.ordinal, pipeline.done(self.now)))

    def _trained(self, pipeline: _Pipeline, lease: Lease, k: int, begun: float) -> None:
        if pipeline.gone:
            return
        number, progress = lease.start + k, lease.progress + k * lease.advance
        self.trained.append(
            TrainedBatch(lease.segment.epoch, lease.home, number, pipeline.number, begun, self.now, progress)
        )
        pipeline.lengths.append(self.now - pipeline.last)
        pipeline.computes = False
        pipeline.trained += 1
        pipeline.last = self.now
        pipeline.unanswered = {*self.work.stages(pipeline.number)}
        for stage in self.work.stages(pipeline.number):
            self._tell(Ready(Worker(stage, pipeline.number), pipeline.iteration))
        pipeline.iteration += 1

    def _take_part(self, pipeline: _Pipeline, joined: bool) -> None:
        if pipeline.joined == joined:
            return
        pipeline.joined = joined
        for stage in self.work.stages(pipeline.number):
            worker = Worker(stage, pipeline.number)
            self._tell(Joined(worker) if joined else Left(worker))
        if joined:
            pipeline.last = self.now

    def _beat(self, pipeline: _Pipeline) -> None:
        if pipeline.gone:
            return
        for stage in self.work.stages(pipeline.number):
            self._deal(Trained(Worker(stage, pipeline.number), self.segment, pipeline.done(self.now)))
        self._idle = 0 if any(p.computes for p in self._pipelines) else self._idle + 1
        if self._idle <= 3 * len(self._pipelines):  # else it is stuck
            self._push(self.now + BEAT, partial(self._beat, pipeline))

    def _leaves_for_good(self, pipeline: _Pipeline) -> None:
        pipeline.gone = True
        if pipeline.joined:
            self._take_part(pipeline, False)
        for stage in self.work.stages(pipeline.number):
            self._deal(Trained(Worker(stage, pipeline.number), self.segment, pipeline.done(self.now)))
        self._deal(Returned(pipeline.number))

    def _pause(self, pipeline: _Pipeline) -> None:
        pipeline.over = True
        here = [p for p in self._pipelines if not p.gone]
        if not all(p.over for p in here):
            return
        self.finished.append((self.segment, self.now, [p.last for p in self._pipelines]))
        following = next(self._segments, None)
        if following is None:
            return
        self.segment = following
        for p in here:
            p.over, p.drains, p.ordinal, p.trained, p.last = False, False, 0, 0, self.now
            self._push(self.now, partial(self._go_on, p))
