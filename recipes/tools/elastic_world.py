"""An elastic run in virtual time: the scheduler's service, and processes that are killed, fall silent and come back.

The service is the real one, without its sockets, and so is each process's
:class:`~lightning_sdpipe.scheduler.client.conversation.Conversation`, and the choice of what stage 0 orders before a
turn. This module emulates the network, the faults and the training. The network delays every message separately, so
messages overtake each other, and loses some. A history follows from its seed alone::

    python -m recipes.tools.elastic_world SEED [SECONDS]     # prints what happens
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lightning_sdpipe.dealing.leases import Lease, Segment
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.membership.members import Epoch, Exchanging, MemberDecision, Met, Published, Receive, Started
from lightning_sdpipe.membership.turn_order import Command, CommandKind, turn_order
from lightning_sdpipe.policies import Group, PolicyConfig, Worker
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.all_reduce import AllPresent
from lightning_sdpipe.policies.local_sgd import LocalSGD
from lightning_sdpipe.policies.outer_rounds import OuterRounds
from lightning_sdpipe.policies.partial_reduce import PartialReduce
from lightning_sdpipe.policies.phd_psgd import PHDPSGD
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client import conversation as c
from lightning_sdpipe.scheduler.server.service import SchedulerService

SILENCE, BATCHES = 2.0, 6
"""Seconds of silence after which a process is lost, and batches of each pipeline between two pauses."""
SAME = {"model": "linear"}
NOTHING = Segment(0, 0, 0, 0)


@dataclass
class Copy:
    """A state that a stage has copied to give to newcomers."""

    update: int
    segment: Segment
    rounds: int
    outcomes: int


@dataclass
class Process:
    """One stage of one start of a pipeline's job."""

    worker: Worker
    incarnation: int
    talk: c.Conversation = field(repr=False)
    state: str = "enrolling"
    waits: dict[c.Key, Callable[[Any], None]] = field(default_factory=dict)
    """What to do when each answer comes."""
    copies: dict[str, Copy] = field(default_factory=dict)
    receive: Receive | None = None
    update: int = 0
    rounds: int = 0
    """Number of rounds of all members whose outcomes are in its model, if the policy makes such rounds."""
    outcomes: int = 0
    """A hash of these outcomes."""
    kept: int = -1
    """Number of rounds including the last one whose outcome it got itself, not as part of a copied state."""
    refused: int = 0
    """How often in a row another process could not hand over the missing outcome."""
    turns: int = 0
    """Number of turns since it joined."""
    obeyed: int = 0
    """How many of stage 0's commands before this turn it has carried out."""
    late: list[tuple[int, Command]] = field(default_factory=list)
    """Commands that it carries out one update late, with the number of updates at which they came."""
    copying: int = 0
    """Number of copies of which the scheduler has not heard yet."""
    leaving: bool = False
    segment: Segment = NOTHING
    ordinal: int = 0
    lease: Lease | None = None
    done: int = 0
    """Number of the lease's batches trained."""
    trained: int = 0
    """Number of the segment's batches trained."""
    iteration: int = 0
    group: Group | None = None
    """The group with which it exchanges."""
    begun: set[int] = field(default_factory=set)
    """Groups whose exchange it has begun."""
    broke: set[int] = field(default_factory=set)
    has_result: bool | None = None
    """Whether its exchange has a result, once it has ended."""
    goes_on: Callable[[], None] | None = None
    """What to do when its exchange ends."""
    nonce: bytes | None = None
    asleep_until: float = 0.0
    cut_off_until: float = 0.0
    dead: bool = False
    since: float = 0.0
    """When its state last changed."""


class NobodyLeft(Exception):
    """All pipelines were lost before there was a checkpoint, which ends the run."""


class World:
    """The run: its scheduler, processes, network and faults; see the module's docstring."""

    def __init__(
        self,
        seed: int,
        tell: Callable[[str], None] = lambda text: None,
        late: float = 0.0,
        pairs: bool = False,
        unread: float = 0.0,
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.tell = tell
        self.late = late
        """Probability that a stage copies its state a turn later than it was told."""
        self.unread = unread
        """Probability that a worker computes for long before it reads its group."""
        self.runs: dict[int, tuple[int, str]] = {}
        """For each start that began together with others: its run, numbered over all schedulers, and the checkpoint
        with which the run began, if any."""
        self.commands: dict[tuple[int, int], list[Command]] = defaultdict(list)
        """Commands of each job's stage 0 before each of its turns."""
        self.trained: dict[Segment, set[tuple[int, int]]] = defaultdict(set)
        """Batches of each shard that any process has trained."""
        self.copied_at: dict[tuple[int, str], set[int]] = defaultdict(set)
        """Updates after which a donor's stages have copied their state, by the donor's start and the transfer."""
        self.knows_leases = True
        """Whether no scheduler has been killed."""
        self.checkpoint: Published | None = None
        """The newest checkpoint of which a scheduler has heard, which the next one is told."""
        self.finishes_after: int | None = None
        """The last segment."""
        self.seen: dict[str, int] = defaultdict(int)
        """How often each kind of message was delivered."""
        self.silence, self.pace, self.glance, self.starts_after = SILENCE, (0.02, 0.1), (0.15, 0.25), (0.5, 2.5)
        """Seconds: after which a silent process is lost, of a batch, between a process's looks at what it must send,
        and until an ended job restarts."""
        self.batches, self.breaks = BATCHES, 0.01
        """Batches of each pipeline between two pauses, and probability that an exchange fails for no reason."""
        self.by_peer: dict[bytes, Process] = {}
        self.draw(pairs)
        self.one = isinstance(self.config, AllPresent)
        """Whether only the last round's outcome can be handed over, not a whole model."""
        self.together = self.one or isinstance(self.config, OuterRounds)
        """Whether the policy makes rounds of all members."""
        self.now: float = 0.0
        self.tick = itertools.count()
        self.calendar: list[tuple[float, int, Callable[[], None]]] = []
        self.processes: list[Process] = []
        self.starts = itertools.count(1)
        self.kills: int = 0
        self.apart: set[frozenset[int]] = set()
        """Pairs of pipelines that cannot reach each other."""
        self.service: SchedulerService | None = None
        self.start_scheduler()
        for pipeline in range(self.pipelines):
            self.after(rng.uniform(0.7, 2.0), lambda i=pipeline: self.start_job(i))  # type: ignore[misc]
        self.wakes()

    def draw(self, pairs: bool) -> None:
        """Draw the run and the network's loss rate."""
        rng = self.rng
        self.stages, self.pipelines = rng.randint(1, 2), rng.randint(1, 4)
        least = rng.randint(1, min(2, self.pipelines))
        start = rng.choice([None, self.pipelines])
        self.terms = ElasticConfig(
            least,
            start,
            6.0,
            hold_limit=1e6,
            recovery_grace=4.0,
            settle=0.6,
            resume=True,
            apart=2.0,
        )
        self.overlaps = rng.random() < 0.5
        """Whether an exchange goes on while its worker computes."""
        windows: list[float | str] = [0.0, 0.05, "auto", math.inf]
        configs: list[PolicyConfig] = [
            SemiDecentralized(window=rng.choice(windows)),
            LocalSGD(every=rng.randint(1, 3)),
            LocalSGD(every=1),
            ADPSGD(),
        ]
        if self.pipelines > 1:
            configs.append(PartialReduce(group_size=2))
        for size in {1, 2} if self.pipelines % 2 == 0 else {1}:
            every, staleness = rng.randint(1, 2), rng.choice([None, 3])
            configs.append(PHDPSGD(group_size=size, every=every, staleness=staleness, within="models"))
        self.config = ADPSGD(asynchronous=True) if pairs else rng.choice(configs)
        self.loss = rng.choice([0.0, 0.02])

    # ------------------------------------------------------------------ the world

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.calendar, (self.now + seconds, next(self.tick), what))

    def run(self, until: float) -> None:
        while self.calendar and self.calendar[0][0] <= until:
            at, _, what = heapq.heappop(self.calendar)
            self.now = max(self.now, at)
            what()
        self.now = until

    def start_scheduler(self) -> None:
        self.service = SchedulerService(
            self.config, self.stages, self.pipelines, worker_timeout=self.silence, elastic=self.terms, now=self.now
        )
        if self.checkpoint is not None:
            self.service.members.membership.on(self.checkpoint, self.now)
        self.service.members.on_decided = self.decided
        self.tell("the scheduler starts")

    def decided(self, now: float, event: object, decisions: list[MemberDecision]) -> None:
        if isinstance(event, Published):
            self.checkpoint = event
        starts = [d for d in decisions if isinstance(d, Started) and d.fresh]
        begun = {i.incarnation for d in starts for i in d.epoch.members if i.pipeline == d.pipeline}
        if not begun <= self.runs.keys():  # else it repeats what one was told
            run = 1 + max((number for number, _ in self.runs.values()), default=0)
            self.runs |= dict.fromkeys(begun, (run, "" if self.checkpoint is None else self.checkpoint.path))

    def kill_scheduler(self, away: float) -> None:
        self.tell(f"the scheduler is killed, and away for {away:.2f} s")
        self.service, self.knows_leases = None, False
        for process in self.processes:
            process.nonce = None
            process.talk.lifeline(there=False)
        self.after(away, self.start_scheduler)

    def wakes(self) -> None:
        """Check the service's deadline regularly."""
        service = self.service
        if service is not None and service.deadline() <= self.now:
            self.deliver(service.tick(self.now))
        self.after(0.02, self.wakes)

    def workers(self, pipeline: int) -> list[Worker]:
        return [Worker(j, pipeline) for j in range(self.stages)]

    def start_job(self, pipeline: int) -> None:
        incarnation = next(self.starts)
        self.tell(f"pipeline {pipeline} starts ({incarnation})")
        for worker in self.workers(pipeline):
            talk = c.Conversation(worker, incarnation, clock=lambda: self.now)
            process = Process(worker, incarnation, talk, since=self.now)
            self.processes.append(process)
            self.by_peer |= {name(worker, incarnation): process for name in (e.peer_of, m.routing_id)}
            self.after(self.rng.uniform(0.0, 0.3), lambda p=process: self.begin(p))  # type: ignore[misc]

    def begin(self, process: Process) -> None:
        self.ask(process, lambda reply: self.comes(process, reply), e.Enrol, SAME)
        if process.worker.stage == 0:
            keys = (f"leaving-{process.incarnation}/now",)
            self.ask(process, lambda _: setattr(process, "leaving", True), e.Store, "wait", keys)
        self.live(process)

    def die(self, process: Process, why: str, alone: bool = False) -> None:
        """Kill the process and, unless each ends ``alone``, its siblings soon after; the job then restarts."""
        if process.dead:
            return
        process.dead = True
        self.kills += 1
        self.tell(f"{process.worker} ({process.incarnation}) dies: {why}")
        nonce, service = process.nonce, self.service
        if nonce is not None:
            self.after(0.01, lambda: self.line_ends(nonce, service))
        job = [p for p in self.processes if p.incarnation == process.incarnation]
        if all(p.dead for p in job):
            self.processes = [p for p in self.processes if p.incarnation != process.incarnation]
            if self.finishes_after is not None:
                return
            self.after(self.rng.uniform(*self.starts_after), lambda: self.start_job(process.worker.pipeline))
        elif not alone:
            for sibling in job:
                self.after(self.rng.uniform(0.05, 0.5), lambda p=sibling: self.die(p, "its job ends"))  # type: ignore[misc]

    def line_ends(self, nonce: bytes, service: SchedulerService | None) -> None:
        if service is not None and service is self.service:
            self.deliver(service.line_ended(nonce, self.now))

    # ----------------------------------------------------------------- the network

    def send(self, process: Process, peer: bytes, request: m.Request | e.Request) -> None:
        if process.cut_off_until > self.now or self.rng.random() < self.loss:
            return
        service = self.service
        self.after(self.rng.uniform(0.0005, 0.02), lambda: self.arrive(service, peer, request))

    def arrive(self, service: SchedulerService | None, peer: bytes, request: m.Request | e.Request) -> None:
        if service is not None and service is self.service:
            self.deliver(service.handle(peer, request, self.now))

    def deliver(self, replies: list[tuple[bytes, m.Reply | e.Reply]]) -> None:
        assert self.service is not None
        if self.service.failure is not None:
            assert "all pipelines are lost" in str(self.service.failure), self.service.failure
            assert "no checkpoint was written" in str(self.service.failure)
            raise NobodyLeft
        self.validate()
        for peer, reply in replies:
            delay = self.rng.uniform(0.0005, 0.02)
            if self.unread and isinstance(reply, m.Answer) and self.rng.random() < self.unread:
                delay = self.rng.uniform(0.5, 2.0)
            self.after(delay, lambda p=peer, r=reply: self.reach(p, r))  # type: ignore[misc]

    def validate(self) -> None:
        assert self.service is not None
        self.service.validate()
        self.service.members.membership.validate()

    def reach(self, peer: bytes, reply: m.Reply | e.Reply) -> None:
        process = self.by_peer.get(peer)
        if process is None or process.dead or process.cut_off_until > self.now or self.rng.random() < self.loss:
            return
        if process.asleep_until > self.now:
            self.after(process.asleep_until - self.now, lambda: self.reach(peer, reply))
        else:
            self.hear(process, reply)

    # ------------------------------------------------------------------- processes

    def job(self, process: Process) -> list[Process]:
        return [p for p in self.processes if p.incarnation == process.incarnation]

    def ask(self, process: Process, then: Callable[[e.Reply], None], kind: type[e.Request], *fields: object) -> None:
        process.waits[process.talk.ask(kind, *fields)] = then
        self.pump(process)

    def pump(self, process: Process) -> None:
        """Send what the conversation has to say."""
        for request in process.talk.due(self.now):
            self.send(process, e.peer_of(process.worker, process.incarnation), request)

    def ask_session(self, process: Process, then: Callable[[Any], None], kind: c.Kind, *fields: object) -> None:
        process.waits[kind] = then
        process.talk.ask(kind, *fields)
        self.pump_training(process, self.now)

    def pump_training(self, process: Process, until: float) -> None:
        for request in process.talk.due_in_training(until):
            self.send(process, m.routing_id(process.worker, process.incarnation), request)

    def live(self, process: Process) -> None:
        """Send heartbeats and repeat requests, a few times a second."""
        if process.dead:
            return
        if process.asleep_until <= self.now:
            process.talk.updates = process.update
            self.pump(process)
            self.pump_training(process, math.inf)
        self.after(self.rng.uniform(*self.glance), lambda: self.live(process))

    def set_state(self, process: Process, state: str) -> None:
        process.state, process.since = state, self.now

    def hear(self, process: Process, reply: m.Reply | e.Reply) -> None:
        self.seen[type(reply).__name__] += 1
        for effect in process.talk.hear(reply):
            if not process.dead:
                self.carry_out(process, effect)
        self.pump(process)

    def carry_out(self, process: Process, effect: c.Effect) -> None:
        match effect:
            case c.Replied(_, e.Refused(reason=reason)):
                raise AssertionError(f"{process}: {reason}")
            case c.Replied(key, reply):
                process.waits.pop(key)(reply)
            case c.EpochBegan(epoch):
                assert process.incarnation in {member.incarnation for member in epoch.members}
                self.make_group(process, epoch)
            case c.GroupBroke(sequence):
                process.broke.add(sequence)
            case c.Connect(nonce=nonce):
                process.nonce = nonce
                process.talk.lifeline(there=True)
            case m.Invitation(group=group) if group.source is None:
                self.begin_pair(process, group, lambda: None)
            case m.Invitation(group=group):
                process.begun.add(group.sequence)  # it only hands over an outcome
            case e.End(reason=reason, run=run):
                assert not run or self.finishes_after is not None, reason
                self.die(process, f"it must end: {reason}")

    def make_group(self, process: Process, epoch: Epoch) -> None:
        """Let the members of an epoch find each other in the store."""
        room, stage = f"epoch-{epoch.number}", process.worker.stage
        self.ask(process, lambda _: None, e.Store, "put", (f"{room}/{stage}.{process.worker.pipeline}",), b"here")
        keys = tuple(f"{room}/{stage}.{pipeline}" for pipeline in epoch.pipelines)
        self.ask(process, lambda _: self.after(0.01, lambda: self.found(process, epoch)), e.Store, "wait", keys)
        if epoch.tries:
            self.after(self.rng.uniform(0.01, 3.0), lambda: self.tried(process, epoch))

    def found(self, process: Process, epoch: Epoch) -> None:
        if process.dead or process.talk.epoch.number != epoch.number:
            return
        if not any(process.worker.pipeline in pair and pair <= set(epoch.pipelines) for pair in self.apart):
            process.talk.holds(sorted({*process.talk.held, epoch.number})[-3:])
            self.pump(process)

    def tried(self, process: Process, epoch: Epoch) -> None:
        pairs = [pair for pair in self.apart if process.worker.pipeline in pair and pair <= set(epoch.pipelines)]
        process.talk.misses(epoch.number, {i for pair in pairs for i in pair} - {process.worker.pipeline})

    # ----------------------------------------------------------------- coming, going

    def comes(self, process: Process, reply: e.Reply) -> None:
        """Follow the reply to an enrolment, or to word of a state that came or did not."""
        if isinstance(reply, e.Get):
            process.receive = reply.receive
            self.set_state(process, "receiving")
            self.after(self.rng.uniform(0.1, 0.8), lambda: self.copied(process, reply.receive))
            return
        assert isinstance(reply, e.Start)
        if not (reply.fresh or process.segment.stop):
            self.die(process, "it has no state, and the scheduler takes it for a member")
            return
        if reply.fresh:
            self.check_that_nothing_is_lost(process, reply.checkpoint)
            process.update, process.segment = 0, Segment(self.runs[process.incarnation][0], 0, 0, self.batches)
            process.rounds = process.outcomes = 0
        else:
            states = {(p.update, p.segment) for p in self.job(process) if p.state == "receiving"}
            assert len(states) == 1, f"a state of several updates was given: {states}"
        self.begin_segment(process, process.segment)
        self.set_state(process, "joining")
        self.join(process)

    def check_that_nothing_is_lost(self, newcomer: Process, checkpoint: str) -> None:
        """Check that a newcomer begins as its run did, however late it hears so. Without a checkpoint it begins with
        its script's model, so nothing of an earlier run may be left that a new scheduler can hear of."""
        run, began_with = self.runs[newcomer.incarnation]
        assert checkpoint == began_with, f"{newcomer.worker} begins with {checkpoint!r}, its run with {began_with!r}"
        if not checkpoint:
            there = [p for p in self.processes if not p.dead and p.cut_off_until <= self.now]
            left = [p for p in there if p.update and p.segment.run < run]
            assert not left, f"{newcomer.worker} begins anew, and {left[0].worker} has made {left[0].update} updates"

    def copied(self, process: Process, receive: Receive) -> None:
        if process.dead:
            return
        giver = Worker(process.worker.stage, receive.donor)
        donors = [p for p in self.processes if p.worker == giver and not p.dead and receive.transfer in p.copies]
        apart = frozenset((process.worker.pipeline, receive.donor)) in self.apart
        copy = None if not donors or apart else donors[0].copies[receive.transfer]
        said: tuple[object, ...] = receive.transfer, -1, "connection reset"
        if copy is not None and self.rng.random() >= 0.05:
            process.update, process.segment = copy.update, copy.segment
            self.contain(process, copy.rounds, copy.outcomes)
            said = receive.transfer, copy.update
        else:
            process.update, process.segment = 0, Segment(0, 0, 0, 0)
        self.ask(process, lambda reply: self.comes(process, reply), e.TellReceived, *said)

    def join(self, process: Process) -> None:
        self.ask_session(process, lambda _: self.joined(process), m.Join)

    def joined(self, process: Process) -> None:
        if process.update:
            process.talk.tell(e.Publish, f"{process.segment.run}-{process.update}.ckpt", process.update, True)
        self.set_state(process, "training")
        self.after(self.rng.uniform(0.02, 0.1), lambda: self.ready(process))

    def left(self, process: Process) -> None:
        assert process.lease is not None
        if process.lease.over:
            self.set_state(process, "barrier")
            self.meet(process)
        else:
            self.set_state(process, "resting")
            self.ready(process)

    def meet(self, process: Process) -> None:
        if not process.dead and process.state == "barrier":
            key = f"pause/{process.segment.run}/{process.segment.epoch}"
            self.ask(process, lambda reply: self.met(process, reply), e.Meet, key, b"%d" % process.worker.pipeline)

    def met(self, process: Process, reply: e.Reply) -> None:
        assert isinstance(reply, e.HasMet)
        met: Met = reply.met
        assert process.worker.pipeline in met.pipelines
        if met.past:
            self.die(process, "it came late to a barrier")
            return
        segment = process.segment
        if self.knows_leases:
            everything = {(home, number) for home in range(self.pipelines) for number in range(self.batches)}
            assert self.trained[segment] == everything, (segment, everything - self.trained[segment])
        if self.finishes_after is not None and segment.epoch >= self.finishes_after:
            self.depart(process, finished=True)
            return
        self.begin_segment(process, Segment(segment.run, segment.epoch + 1, 0, self.batches))
        self.set_state(process, "joining")
        self.join(process)

    def begin_segment(self, process: Process, segment: Segment) -> None:
        process.segment, process.lease, process.ordinal, process.trained = segment, None, 0, 0

    def depart(self, process: Process, finished: bool) -> None:
        self.set_state(process, "departing")
        self.ask(process, lambda _: self.die(process, "it departs", alone=finished), e.Depart, finished)

    # --------------------------------------------------------------------- training

    def ready(self, process: Process) -> None:
        """Begin a turn as soon as the process's batches, its neighbours and stage 0 allow it."""
        if process.dead or process.state not in ("training", "resting"):
            return
        if process.asleep_until > self.now:
            self.after(process.asleep_until - self.now, lambda: self.ready(process))
            return
        lease = process.lease
        resting = process.state == "resting"
        over = lease is not None and (lease.over or not (lease.size or resting))
        if m.AskLease not in process.talk._open and not over and (lease is None or process.done == lease.size):
            self.ask_session(
                process, lambda reply: self.dealt(process, reply), m.AskLease, process.segment, process.ordinal
            )
        if not self.may_begin(process):
            self.after(0.02, lambda: self.ready(process))
            return
        lease = process.lease
        if process.dead or process.state == "departing" or lease is None:
            return
        process.turns, process.obeyed = process.turns + 1, 0
        if lease.over:
            self.leave(process)
        elif resting and lease.size:
            self.set_state(process, "joining")
            self.join(process)
        elif resting:
            self.ready(process)
        elif lease.size:
            process.iteration += 1
            self.turn(process)
        else:
            self.leave(process)  # it has no batches now, so others must not wait for it

    def turn(self, process: Process) -> None:
        """Ask for the group of the iteration, and train the batch when the exchange ends."""
        self.is_ready(process, lambda answer: self.exchange(process, answer.group))

    def is_ready(self, process: Process, then: Callable[[Any], None]) -> None:
        """Send a ready, with the number of rounds in the model if the policy counts them."""
        contains = process.rounds if self.together else None
        self.ask_session(process, then, m.Ready, process.iteration, contains)

    def dealt(self, process: Process, reply: m.Dealt) -> None:
        process.lease, process.done, process.ordinal = reply.lease, 0, process.ordinal + 1

    def may_begin(self, process: Process) -> bool:
        """Give orders before a turn, on stage 0, and carry them out; return whether the turn may begin."""
        job, said = self.job(process), self.commands[process.incarnation, process.turns]
        if any(p.turns < process.turns or p.state in ("joining", "receiving") for p in job if p is not process):
            return False  # its neighbours are behind
        if self.one and any(p.update < process.update for p in job):
            return False  # gradients are clipped together
        go, there = Command(CommandKind.GO), m.AskLease not in process.talk._open
        if process.worker.stage == 0 and all(p.obeyed == len(said) and not p.copying for p in job) and go not in said:
            order = turn_order(process.leaving, process.talk.donations, process.talk.held_up)
            if order is not None and (order != go or there):
                said.append(order)
        for update, command in process.late:
            if update < process.update:
                self.obey(process, command)
        process.late = [(update, command) for update, command in process.late if update == process.update]
        while process.obeyed < len(said) and not process.dead:
            command = said[process.obeyed]
            process.obeyed += 1
            if command.kind is CommandKind.DONATE and process.worker.stage and self.rng.random() < self.late:
                process.late.append((process.update, command))
            else:
                self.obey(process, command)
        return go in said and there and not process.copying

    def obey(self, process: Process, command: Command) -> None:
        if command.kind is CommandKind.LEAVE:
            self.depart(process, finished=False)
        elif command.kind is CommandKind.DONATE:
            assert command.text not in process.copies, "it copies twice"
            process.copies[command.text] = Copy(process.update, process.segment, process.rounds, process.outcomes)
            self.copied_at[process.incarnation, command.text].add(process.update)
            process.copying += 1
            self.ask(process, lambda _: self.told(process), e.TellSnapshot, command.text, process.update)

    def told(self, process: Process) -> None:
        process.copying -= 1

    def exchange(self, process: Process, group: Group) -> None:
        """Begin an exchange at once, or when the previous one ends."""
        assert process.worker in group.members
        if process.group is not None:
            process.goes_on = lambda: self.exchange(process, group)
            return
        if group.passive:
            process.group = group
            self.begin_pair(process, group, lambda: self.exchange_ends(process))
        else:
            self.again(process, group, group)
        if self.overlaps:
            self.stepped(process)
        else:
            self.set_state(process, "exchanging")
            process.goes_on = lambda: self.stepped(process)

    def begin_exchange(self, process: Process, group: Group) -> None:
        """Begin an exchange, which takes a moment, and fails if a member is gone, or at random."""
        if len(group.members) > 1:
            assert group.epoch > 0
            process.talk.exchanges(Exchanging(group.sequence, tuple(w.pipeline for w in group.members), 0))
        process.group, process.has_result = group, None
        process.begun.add(group.sequence)
        self.after(self.rng.uniform(0.01, 0.05), lambda: self.exchanged(process, group))

    def exchanged(self, process: Process, group: Group) -> None:
        if process.dead or process.group is not group or process.has_result is not None:
            return
        there = {p.worker for p in self.processes if not p.dead and group.epoch in p.talk.held}
        pipelines, workers = {worker.pipeline for worker in group.members}, {*group.members}
        members = [p for p in self.processes if p.worker in workers]
        waits = any(pair <= pipelines for pair in self.apart) or any(group.sequence not in p.begun for p in members)
        if waits and workers <= there and group.sequence not in process.broke:  # nothing comes
            self.after(0.1, lambda: self.exchanged(process, group))
            return
        failed = len(group.members) > 1 and (not workers <= there or self.rng.random() < self.breaks)
        if failed or group.sequence in process.broke:  # it keeps its model
            self.break_off(process, group)
        elif self.together:
            self.has_outcome(process, process.rounds + 1, hash((process.outcomes, group.members, group.sequence)))
        self.ends(process, not (failed or group.sequence in process.broke))

    def break_off(self, process: Process, group: Group) -> None:
        process.talk.holds([epoch for epoch in process.talk.held if epoch != group.epoch])

    def ends(self, process: Process, has_result: bool) -> None:
        process.has_result = has_result
        process.talk.exchanges(None)
        self.pump(process)
        self.exchange_ends(process)

    def again(self, process: Process, lacking: Group, group: Group) -> None:
        """Begin the exchange of ``group``, or get the outcome of the ``lacking`` round from its source."""
        if group.source is None:
            self.begin_exchange(process, group)
            return
        process.group, process.has_result = lacking, None
        process.talk.exchanges(Exchanging(group.sequence, tuple(w.pipeline for w in group.members), 0))
        self.after(0.05, lambda: self.handed(process, lacking, group, self.now))

    def handed(self, process: Process, lacking: Group, group: Group, since: float) -> None:
        """Get the outcome from the source, if it has one and has heard of the request."""
        if process.dead or process.group is not lacking or process.has_result is not None:
            return
        source = next((p for p in self.processes if p.worker == group.source and not p.dead), None)
        hears = source is not None and group.sequence not in source.begun and group.sequence not in process.broke
        if hears and self.now - since < self.silence:
            self.after(0.1, lambda: self.handed(process, lacking, group, since))
            return
        has_result = False
        if source is None or group.sequence not in source.begun:
            self.break_off(process, group)
            process.refused = 0
        elif source.kept == source.rounds == process.rounds + 1 or (not self.one and source.rounds > process.rounds):
            self.seen["handed over"] += 1
            self.has_outcome(process, source.rounds, source.outcomes)
            has_result = True
        elif process.refused > 2 * len(self.processes):  # none can
            self.seen["fell behind"] += 1
            self.die(process, "it falls behind")
            return
        else:
            process.refused += 1
        self.ends(process, has_result)

    def has_outcome(self, process: Process, rounds: int, outcomes: int) -> None:
        self.contain(process, rounds, outcomes)
        process.kept, process.refused = rounds, 0

    def contain(self, process: Process, rounds: int, outcomes: int) -> None:
        """Note the rounds in the process's model, and check that live processes with as many have the same outcomes."""
        process.rounds, process.outcomes, process.talk.contains = rounds, outcomes, rounds
        stage = [p for p in self.processes if p.worker.stage == process.worker.stage and not p.dead]
        same = {p.outcomes for p in stage if (p.segment.run, p.rounds) == (process.segment.run, rounds)}
        assert same == {outcomes} or not self.one, f"{process.worker} has another outcome of round {rounds} than others"

    def begin_pair(self, process: Process, group: Group, then: Callable[[], None]) -> None:
        """Begin an exchange beside the training, which is dropped if it breaks off or stands still for too long."""
        process.begun.add(group.sequence)
        self.after(self.rng.uniform(0.01, 0.05), lambda: self.paired(process, group, self.now, then))

    def paired(self, process: Process, group: Group, began: float, then: Callable[[], None]) -> None:
        if process.dead:
            return
        others = [p for p in self.processes if p.worker in group.members and p is not process and not p.dead]
        there = [p for p in (process, *others) if group.epoch in p.talk.held]
        reached = frozenset(worker.pipeline for worker in group.members) not in self.apart
        if len(there) == 2 and reached and all(group.sequence in p.begun for p in others):
            then()
        elif len(there) == 2 and self.now - began < self.silence:
            self.after(0.05, lambda: self.paired(process, group, began, then))
        else:
            process.talk.holds([epoch for epoch in process.talk.held if epoch != group.epoch])
            self.pump(process)
            then()

    def exchange_ends(self, process: Process) -> None:
        if (group := process.group) is not None and self.together and process.has_result is False:
            process.iteration += 1
            self.is_ready(process, lambda answer: self.again(process, group, answer.group))
            return
        process.group = None
        if process.goes_on is not None:
            goes_on, process.goes_on = process.goes_on, None
            goes_on()

    def stepped(self, process: Process) -> None:
        """Note that a batch is trained, which ends the iteration."""
        lease = process.lease
        assert lease is not None
        self.trained[process.segment].add((lease.home, lease.start + process.done))
        process.update += 1
        process.done += 1
        process.trained += 1
        process.talk.leases.trained(process.trained)
        self.set_state(process, "training")
        self.after(self.rng.uniform(*self.pace), lambda: self.ready(process))

    def leave(self, process: Process) -> None:
        if process.group is not None:
            process.goes_on = lambda: self.leave(process)
            return
        if process.state == "resting":  # it has left
            self.left(process)
            return
        self.set_state(process, "leaving")
        self.ask_session(process, lambda _: self.left(process), m.Leave)

    # -------------------------------------------------------------------- faults

    def fault(self) -> None:
        """Cause a random fault."""
        rng, alive = self.rng, [p for p in self.processes if not p.dead]
        if not alive:
            return
        victim = rng.choice(alive)
        match rng.choice("kkkkkkssppSccdd"):
            case "k":
                self.die(victim, "killed")
            case "d":
                self.tell(f"{victim.worker} ({victim.incarnation}) is told to end")
                if victim.state in ("enrolling", "receiving"):
                    self.die(victim, "told to end")
                else:
                    key = f"leaving-{victim.incarnation}/now"
                    self.ask(victim, lambda _: None, e.Store, "put", (key,), b"1")
                    self.after(10.0, lambda: self.die(victim, "told to end for long"))
            case "s":
                victim.asleep_until = self.now + rng.choice([0.5, 4.0])
                self.tell(f"{victim.worker} ({victim.incarnation}) sleeps until {victim.asleep_until:.2f}")
            case "p":
                for process in alive:
                    if process.incarnation == victim.incarnation:
                        process.cut_off_until = self.now + rng.choice([0.7, 3.5])
                self.tell(f"pipeline {victim.worker.pipeline} is cut off until {victim.cut_off_until:.2f}")
            case "c":
                self.cut_off(rng.choice([0.7, 3.5, 8.0]))
            case "S" if self.service is not None:
                self.kill_scheduler(rng.choice([0.05, 1.0]))

    def cut_off(self, seconds: float) -> None:
        """Cut the scheduler off from all processes."""
        for process in self.processes:
            process.cut_off_until = max(process.cut_off_until, self.now + seconds)
        self.tell(f"the scheduler is cut off for {seconds} s")

    def part(self, one: int, other: int) -> None:
        """Cut two pipelines off from each other for good."""
        self.apart.add(frozenset((one, other)))
        self.tell(f"pipelines {one} and {other} cannot reach each other")

    def check_that_all_train(self, seconds: float) -> None:
        """Stop the faults, and check that every pipeline soon is a member and goes on."""
        self.loss = self.late = self.unread = 0.0
        self.run(self.now + seconds)
        # A pipeline that was measured slow may be dealt none of the few batches of a segment; it still goes on.
        before = {(p.worker, p.incarnation): (p.update, p.segment.epoch) for p in self.processes}
        self.run(self.now + 15.0)
        workers = {p.worker for p in self.processes}
        assert workers == {worker for i in range(self.pipelines) for worker in self.workers(i)}
        for p in self.processes:
            now = p.update, p.segment.epoch
            assert now != before.get((p.worker, p.incarnation), now), f"{p} has not gone on for 15 s"

    def check_that_all_finish(self, seconds: float) -> None:
        """Check that all pipelines finish soon, after the same segment."""
        self.finishes_after = 1 + max(p.segment.epoch for p in self.processes)
        self.run(self.now + seconds)
        assert self.service is not None
        over = self.service.members.membership.ending.over
        assert over is not None, [(p.worker, p.state, p.since) for p in self.processes]
        assert not over.failed, over
        assert not self.processes


def live_through(
    seed: int,
    faults: int,
    tell: Callable[[str], None] = lambda text: None,
    late: float = 0.0,
    pairs: bool = False,
    unread: float = 0.0,
) -> World:
    """Play a history with ``faults`` faults, and check what must hold in it; with ``pairs``, of asynchronous
    AD-PSGD."""
    world = World(seed, tell, late, pairs, unread)
    with suppress(NobodyLeft):
        world.run(3.0)
        for _ in range(faults):
            world.run(world.now + world.rng.choice([0.05, 0.6, 3.0]))
            world.fault()
        world.check_that_all_train(25.0)
        world.check_that_all_finish(15.0)
    return world


if __name__ == "__main__":
    current: list[World] = []

    def show(text: str) -> None:
        print(f"{current[0].now if current else 0.0:8.3f} {text}")

    world = World(int(sys.argv[1]), show)
    current.append(world)
    world.run(3.0)
    for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 6):
        world.run(world.now + world.rng.choice([0.05, 0.6, 3.0]))
        world.fault()
    world.check_that_all_train(25.0)
    world.check_that_all_finish(15.0)
    print({p.worker: p.update for p in world.processes}, world.kills, "deaths")
