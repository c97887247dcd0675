"""Simulation of M × N workers under a virtual clock, around a real policy.

Workers compute the passes of their schedule. A forward needs that of the stage before, a backward that of the stage
after it; both take their share of the worker's time, with its delays and the speed of its device at that moment. A
worker is ready before its last backward or within it, once it needs no other worker, or after it (``announce``). It
begins the next mini-batch once its group is known, all members have finished that backward, and the exchange is over. A
passive member is waited for only if it is ready. Transfers between stages take no time.

Only what the policy hears goes through the queue of events: between two groups the times of a worker's passes follow
from each other. So thousands of iterations of a hundred workers take seconds. The same arguments give the same run, to
the bit.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lightning_sdpipe.errors import ConfigurationError, check_choices, check_integer
from lightning_sdpipe.heterogeneity.injector import Heterogeneity
from lightning_sdpipe.heterogeneity.tracks import Track
from lightning_sdpipe.policies.announcing import share_before
from lightning_sdpipe.policies.decisions import BrokenRule, Decision, Group, check_group
from lightning_sdpipe.policies.events import Event, Joined, Left, Progress, Ready, Tick, Worker
from lightning_sdpipe.policies.policy import Policy, When
from lightning_sdpipe.topology.mesh import Mesh

FORWARD_SHARE = 1 / 3
"""Share of a forward in the time of a mini-batch: a backward takes about twice as long as its forward."""


@dataclass(frozen=True)
class Work:
    """The work of the workers, apart from the policy.

    Args:
        num_stages: M, the stages of the deepest pipeline.
        num_pipelines: N.
        iterations: mini-batches of each pipeline; a worker leaves after its last one.
        seconds: time that a worker computes for a mini-batch on a device at full speed, as a number or for each worker
            and iteration.
        schedule: ``"1f1b"``, ``"gpipe"`` or ``"pipedream"``.
        num_micro_batches: micro-batches of a mini-batch; M by default, and 1 under ``"pipedream"``.
        heterogeneity: delays and slow devices, from :mod:`lightning_sdpipe.heterogeneity`.
        exchange: gives the seconds that a group takes to average, once all its members are there.
        announce: ``"early"``, before the last backward or within it (``policies/announcing.py``), or ``"late"``, after
            the optimizer has stepped; None follows the policy's values, or else is early.
        depths: the stages of each pipeline, where these are cut differently: the policy then decides about whole
            pipelines.
    """

    num_stages: int
    num_pipelines: int
    iterations: int
    seconds: float | Callable[[Worker, int], float] = 1.0
    schedule: Schedule = "1f1b"
    num_micro_batches: int | None = None
    heterogeneity: Heterogeneity | None = None
    exchange: Callable[[Group], float] = lambda group: 0.0
    announce: When | None = None
    depths: Sequence[int] = ()

    def depth(self, pipeline: int) -> int:
        """Return the number of stages of a pipeline."""
        return self.depths[pipeline] if self.depths else self.num_stages

    def workers(self) -> list[Worker]:
        """Return the workers by stage, and by pipeline."""
        stages, pipelines = range(self.num_stages), range(self.num_pipelines)
        return [Worker(j, i) for j in stages for i in pipelines if j < self.depth(i)]

    def __post_init__(self) -> None:
        for name in ("num_stages", "num_pipelines", "iterations", "num_micro_batches"):
            check_integer(name, getattr(self, name), 1, "or more", optional=True)
        if self.depths and self.schedule == "pipedream":
            raise ConfigurationError(
                "schedule='pipedream' needs pipelines of one depth and cut: others would drain for each update"
            )
        check_choices(self)


@dataclass(slots=True, eq=False)
class _Replica:
    """Progress of a worker."""

    worker: Worker
    track: Track | None
    next: int = 0
    """Index of the next pass."""
    free: float = 0.0
    """Time when the last pass, or the exchange after it, ended."""
    began: float = 0.0
    """Time when the current mini-batch began."""
    computed_at: float | None = None
    """Time of its first computation, when tracks begin."""
    ends: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    """Ends of its forwards and its backwards."""
    waits: bool = False
    """Whether nothing is left to compute before its group is known."""
    ready: bool = False
    """Whether it has reported that it is ready and was not answered."""
    reported: int = -1
    waited: float = 0.0
    finished: float | None = None


class Pipelines:
    """Runs ``work`` under ``policy``; :attr:`entries` has the events, as in a scheduler's log.

    Every decision is checked as a scheduler checks it.
    """

    def __init__(self, policy: Policy, work: Work) -> None:
        self.policy, self.work, self.now = policy, work, 0.0
        self.entries: list[tuple[float, Event, list[Decision]]] = []
        self.groups: list[tuple[float, Group]] = []
        depths = [work.depth(pipeline) for pipeline in range(work.num_pipelines)]
        mesh = Mesh.of_depths(sum(depths), depths, alike=not work.depths)
        slow = work.heterogeneity
        self.replicas = {
            worker: _Replica(worker, None if slow is None else slow.track(mesh.rank(worker.stage, worker.pipeline)))
            for worker in work.workers()
        }
        self._micro_batches = work.num_micro_batches or (1 if work.schedule == "pipedream" else work.num_stages)
        if work.schedule == "pipedream" and self._micro_batches > 1:
            raise ConfigurationError(
                "num_micro_batches must be 1 with schedule='pipedream', which splits no mini-batch"
            )
        self._passes = {
            (j, depth): passes(work.schedule, j, depth, self._micro_batches, work.iterations)
            for depth in {*depths}
            for j in range(depth)
        }
        self._queue: list[tuple[float, int, Event]] = []
        self._pushed = 0
        self._next_sequence = 0

    def run(self) -> None:
        """Run until nothing can happen any more; a worker that has not finished then is stuck for ever.

        Raises:
            BrokenRule: a decision of the policy cannot be carried out.
        """
        replicas = [*self.replicas.values()]
        for replica in replicas:
            self._tell(Joined(replica.worker))
        for replica in replicas:
            self._advance(replica)
        while True:
            due = self.policy.deadline()
            if self._queue and (due is None or self._queue[0][0] < due):
                self.now, _, event = heapq.heappop(self._queue)
                self._tell(event)
            elif due is not None:
                self.now = max(self.now, due)
                self._tell(Tick())
            else:
                return

    def _tell(self, event: Event) -> None:
        if type(event) is Ready:
            self.replicas[event.worker].ready = True
        decisions = self.policy.on(event, self.now)
        self.entries.append((self.now, event, decisions))
        for group in decisions:
            self._carry_out(group)

    def _push(self, at: float, event: Event) -> None:
        self._pushed += 1
        heapq.heappush(self._queue, (at, self._pushed, event))

    def _advance(self, replica: _Replica) -> None:
        """Compute passes of ``replica``, and of those that it held up, until their groups are needed."""
        work, todo = self.work, [replica]
        while todo:
            replica = todo.pop()
            j, i = replica.worker.stage, replica.worker.pipeline
            depth = work.depth(i)
            program = self._passes[j, depth]
            while not replica.waits and replica.next < len(program):
                forward, iteration, first, last = program[replica.next]
                other = j - 1 if forward else j + 1
                ends = replica.ends[forward]
                needed = 0.0
                if 0 <= other < depth:
                    theirs = self.replicas[Worker(other, i)].ends[forward]
                    if len(theirs) <= len(ends):
                        break
                    needed = theirs[len(ends)]
                start = self._start(replica, forward, iteration, first, needed)
                replica.free = self._end(replica, forward, iteration, start)
                ends.append(replica.free)
                replica.next += 1
                behind = j + 1 if forward else j - 1
                if 0 <= behind < depth:
                    todo.append(self.replicas[Worker(behind, i)])
                if last and not forward:
                    replica.waits = True
                    replica.reported = iteration
                    share = 1.0 if work.announce == "late" else share_before(self._micro_batches)
                    at = start + share * (replica.free - start)
                    self._push(at, Ready(replica.worker, iteration))

    def _start(self, replica: _Replica, forward: bool, iteration: int, first: bool, needed: float) -> float:
        if not first or self.work.heterogeneity is None:
            return max(replica.free, needed)
        worker = replica.worker
        during: Literal["forward", "backward"] = "forward" if forward else "backward"
        delay = self.work.heterogeneity.delay(worker.stage, worker.pipeline, iteration, during)
        if forward and self.work.schedule != "pipedream":  # it sleeps before it asks for its input
            return max(replica.free + delay, needed)
        return max(replica.free, needed) + delay

    def _end(self, replica: _Replica, forward: bool, iteration: int, start: float) -> float:
        seconds = self.work.seconds
        whole = seconds if isinstance(seconds, float | int) else seconds(replica.worker, iteration)
        taken = whole * (FORWARD_SHARE if forward else 1 - FORWARD_SHARE) / self._micro_batches
        if replica.track is not None:
            if replica.computed_at is None:
                replica.computed_at = start
            taken = replica.track.duration(start - replica.computed_at, taken)
        return start + taken

    def _carry_out(self, group: Group) -> None:
        check_group(group, self._next_sequence)
        self._next_sequence = group.sequence + 1
        self.groups.append((self.now, group))
        members = active = [self.replicas[worker] for member in group.members for worker in self._stands_for(member)]
        if group.passive:
            passive = {worker for member in group.passive for worker in self._stands_for(member)}
            active = [replica for replica in members if replica.worker not in passive]
        for replica in active:
            if not replica.waits:
                raise BrokenRule(f"{group} answers worker {replica.worker}, which does not wait for a group")
        stay = [replica for replica in members if replica.ready and replica not in active] if group.passive else []
        together = max(self.now, *[replica.free for replica in (*active, *stay)])
        end = together + self.work.exchange(group)
        for replica in active:
            self._goes_on(replica, end)
        for replica in stay:  # they average, and wait on
            replica.waited += end - replica.free
            replica.free = end

    def _stands_for(self, member: Worker) -> list[Worker]:
        """Return the workers that ``member`` stands for in a group: all of its pipeline, where groups are of whole
        pipelines."""
        if not self.work.depths:
            return [member]
        return [Worker(j, member.pipeline) for j in range(self.work.depth(member.pipeline))]

    def _goes_on(self, replica: _Replica, at: float) -> None:
        waited = at - replica.free
        replica.waited += waited
        progress = Progress(replica.worker, replica.reported, 1, at - replica.began, waited)
        replica.free = replica.began = at
        replica.waits = replica.ready = False
        self._push(at, progress)
        if replica.reported + 1 == self.work.iterations:
            replica.finished = at
            self._push(at, Left(replica.worker))
        else:
            self._advance(replica)


Schedule = Literal["1f1b", "gpipe", "pipedream"]


class Pass(NamedTuple):
    """A forward or backward of one micro-batch of mini-batch ``iteration``."""

    forward: bool
    iteration: int
    first: bool
    """Whether it is the first of its kind in the mini-batch."""
    last: bool
    """Whether it is the last of its kind in the mini-batch; after the last backward the optimizer steps."""


def passes(schedule: Schedule, stage: int, num_stages: int, num_micro_batches: int, iterations: int) -> list[Pass]:
    """Return the passes of ``stage``, in order. ``"pipedream"`` has no micro-batches and no flush until the end."""
    ahead = num_stages - 1 - stage
    if schedule == "pipedream":
        kinds = [True] * min(ahead, iterations) + [True, False] * max(0, iterations - ahead)
        return _numbered([*kinds, *[False] * min(ahead, iterations)], 1)
    warm_up = num_micro_batches if schedule == "gpipe" else min(ahead, num_micro_batches)
    one = [True] * warm_up + [True, False] * (num_micro_batches - warm_up) + [False] * warm_up
    return _numbered(one * iterations, num_micro_batches)


def _numbered(kinds: list[bool], num_micro_batches: int) -> list[Pass]:
    done = {True: 0, False: 0}
    numbered = []
    for forward in kinds:
        iteration, micro_batch = divmod(done[forward], num_micro_batches)
        done[forward] += 1
        numbered.append(Pass(forward, iteration, micro_batch == 0, micro_batch == num_micro_batches - 1))
    return numbered
