"""An elastic run in virtual time: the scheduler's service, and processes that are killed, fall silent and come back.

The service is the real one, without its sockets. The processes keep the rules of the client: they repeat what is
unanswered, say again what was not heard, and introduce themselves to a scheduler that does not know them. The network
delays every message by itself, so they overtake each other, and loses some. A history follows from its seed alone::

    python -m tests.scheduler.elastic_world SEED [SECONDS]     # prints what happens
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.membership.members import Donate, Epoch, Exchanging, Met, Receive
from lightning_sdpipe.policies import Group, PolicyConfig, Worker
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.local_sgd import LocalSGD
from lightning_sdpipe.policies.partial_reduce import PartialReduce
from lightning_sdpipe.policies.phd_psgd import PHDPSGD
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client.recovery_report import HeardAnswers
from lightning_sdpipe.scheduler.server.service import SchedulerService

SILENCE, PAUSE_EVERY = 2.0, 12
SAME = {"model": "linear"}


@dataclass
class Process:
    """One stage of one start of a pipeline's job."""

    worker: Worker
    incarnation: int
    state: str = "enrolling"
    number: int = 0
    epoch: Epoch | None = None
    member_since: int = 0
    holds: set[int] = field(default_factory=set)
    receive: Receive | None = None
    donate: dict[int, Donate] = field(default_factory=dict)
    donations: dict[int, int] = field(default_factory=dict)
    update: int = 0
    iteration: int = 0
    group: Group | None = None
    """With which it exchanges."""
    met: list[Met] = field(default_factory=list)
    regrouped: list[tuple[int, Group]] = field(default_factory=list)
    asks: dict[str, m.Request | e.Request] = field(default_factory=dict)
    """What is repeated until it is answered."""
    goes_on: Callable[[], None] | None = None
    """What it does when its exchange is over."""
    begun: set[int] = field(default_factory=set)
    completed: set[int] = field(default_factory=set)
    left: int = -1
    """The number of the exchange that it left last."""
    tried: int = 0
    """In which epoch it has tried whom it reaches."""
    misses: tuple[int, ...] = ()
    asked_for: set[int] = field(default_factory=set)
    nonce: bytes | None = None
    asleep_until: float = 0.0
    cut_off_until: float = 0.0
    dead: bool = False
    since: float = 0.0
    """When its state changed last."""
    heard: HeardAnswers = field(init=False)

    def __post_init__(self) -> None:
        self.heard = HeardAnswers(self.worker)


class NobodyLeft(Exception):
    """All are lost, before there was any checkpoint, and the run is over."""


class World:
    """See the module's text."""

    def __init__(self, seed: int, tell: Callable[[str], None] = lambda text: None) -> None:
        self.rng = rng = random.Random(seed)
        self.tell = tell
        self.stages, self.pipelines = rng.randint(1, 2), rng.randint(1, 4)
        least = rng.randint(1, min(2, self.pipelines))
        start = rng.choice([None, self.pipelines])
        self.terms = ElasticConfig(
            least, start, gather=6.0, hold_limit=1e6, recovery_grace=4.0, settle=0.6, resume=True, apart=2.0
        )
        self.overlaps = rng.random() < 0.5
        """Does an exchange go on while its worker computes?"""
        configs: list[PolicyConfig] = [
            SemiDecentralized(window=rng.choice([0.0, 0.05, "auto", float("inf")])),
            LocalSGD(every=rng.randint(1, 3)),
            LocalSGD(every=1),
            ADPSGD(staleness=rng.choice([None, 3])),
        ]
        if self.pipelines > 1:
            configs.append(PartialReduce(group_size=2))
        for size in {1, 2} if self.pipelines % 2 == 0 else {1}:
            every, staleness = rng.randint(1, 2), rng.choice([None, 3])
            configs.append(PHDPSGD(group_size=size, every=every, staleness=staleness, within="models"))
        self.config = rng.choice(configs)
        self.loss = rng.choice([0.0, 0.02])
        self.now = 0.0
        self.tick = itertools.count()
        self.calendar: list[tuple[float, int, Callable[[], None]]] = []
        self.processes: list[Process] = []
        self.starts = itertools.count(1)
        self.kills = 0
        self.apart: set[frozenset[int]] = set()
        """Pairs of pipelines that cannot reach each other."""
        self.service: SchedulerService | None = None
        self.start_scheduler()
        for pipeline in range(self.pipelines):
            self.after(rng.uniform(0.7, 2.0), lambda i=pipeline: self.start_job(i))  # type: ignore[misc]
        self.wakes()

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
            self.config, self.stages, self.pipelines, worker_timeout=SILENCE, elastic=self.terms, now=self.now
        )
        self.tell("the scheduler starts")

    def kill_scheduler(self, away: float) -> None:
        self.tell(f"the scheduler is killed, and away for {away:.2f} s")
        self.service = None
        for process in self.processes:
            process.nonce = None
        self.after(away, self.start_scheduler)

    def wakes(self) -> None:
        """The service's deadline, looked at often."""
        service = self.service
        if service is not None and service.deadline() <= self.now:
            self.deliver(service.tick(self.now))
        self.after(0.02, self.wakes)

    def start_job(self, pipeline: int) -> None:
        incarnation = next(self.starts)
        self.tell(f"pipeline {pipeline} starts ({incarnation})")
        for stage in range(self.stages):
            process = Process(Worker(stage, pipeline), incarnation, since=self.now)
            self.processes.append(process)
            self.after(self.rng.uniform(0.0, 0.3), lambda p=process: self.begin(p))  # type: ignore[misc]

    def begin(self, process: Process) -> None:
        self.ask(process, "enrol", e.Enrol, SAME)
        self.live(process)

    def die(self, process: Process, why: str) -> None:
        """And its siblings soon after; the job starts again."""
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
            self.after(self.rng.uniform(0.5, 2.5), lambda: self.start_job(process.worker.pipeline))
        else:
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
        self.service.validate()
        assert self.service.elastic is not None
        self.service.elastic.membership.validate()
        for peer, reply in replies:
            self.after(self.rng.uniform(0.0005, 0.02), lambda p=peer, r=reply: self.reach(p, r))  # type: ignore[misc]

    def reach(self, peer: bytes, reply: m.Reply | e.Reply) -> None:
        for process in self.processes:
            if peer.startswith(b"%d.%d." % (process.worker.stage, process.worker.pipeline)) and not process.dead:
                names = [
                    name(process.worker, process.incarnation) for name in (e.peer_of, m.routing_id, m.heartbeat_id)
                ]
                if peer not in names:
                    continue
                if process.cut_off_until > self.now or self.rng.random() < self.loss:
                    return
                if process.asleep_until > self.now:
                    self.after(process.asleep_until - self.now, lambda: self.reach(peer, reply))
                    return
                self.hear(process, reply)
                return

    # ------------------------------------------------------------------- processes

    def ask(self, process: Process, key: str, kind: Callable[..., m.Request | e.Request], *fields: object) -> None:
        process.number += 1
        process.asks[key] = kind(process.worker, process.incarnation, process.number, *fields)
        self.say(process, process.asks[key])

    def say(self, process: Process, request: m.Request | e.Request) -> None:
        name = e.peer_of if isinstance(request, e.ElasticRequest) else m.routing_id
        if isinstance(request, m.Heartbeat):
            name = m.heartbeat_id
        self.send(process, name(process.worker, process.incarnation), request)

    def live(self, process: Process) -> None:
        """Beats, repeats, and makes groups, a few times a second."""
        if process.dead:
            return
        if process.asleep_until <= self.now:
            process.number += 1
            epoch = process.epoch.number if process.epoch else 0
            within = None
            group = process.group
            if group is not None and len(group.members) > 1 and f"regroup {group.sequence}" not in process.asks:
                within = Exchanging(group.sequence, tuple(w.pipeline for w in group.members), 0)
            fields = process.worker, process.incarnation, process.number, tuple(process.holds), epoch, True, False
            misses = process.misses if epoch == process.tried else ()
            beat = e.Beat(*fields, within, (process.left, -1), misses)
            self.say(process, beat)
            if process.state in ("training", "exchanging"):
                process.number += 1
                self.say(process, m.Heartbeat(process.worker, process.incarnation, process.number, True))
            for key, request in list(process.asks.items()):
                if not isinstance(request, e.ElasticRequest):  # sessions count what has come: a new number
                    process.number += 1
                    values = [getattr(request, name) for name in request.__struct_fields__[3:]]
                    request = process.asks[key] = type(request)(
                        process.worker, process.incarnation, process.number, *values
                    )
                self.say(process, request)
            self.make_groups(process)
        self.after(self.rng.uniform(0.15, 0.25), lambda: self.live(process))

    def make_groups(self, process: Process) -> None:
        """The group of the newest epoch is made when all of its members have heard of that."""
        epoch = process.epoch
        if epoch is None or epoch.number in process.holds:
            return
        names = {(member.pipeline, member.incarnation) for member in epoch.members}
        here = [
            p
            for p in self.processes
            if (p.worker.pipeline, p.incarnation) in names and p.worker.stage == process.worker.stage
        ]
        ready = [p for p in here if not p.dead and p.epoch is not None and p.epoch.number >= epoch.number]
        if len(ready) == len(names):
            for p in ready:
                if any(p.worker.pipeline in pair and pair <= set(epoch.pipelines) for pair in self.apart):
                    continue
                if p.epoch is epoch or (p.epoch is not None and p.epoch.number == epoch.number):
                    p.holds = set(sorted(p.holds | {epoch.number})[-3:])

    def set_state(self, process: Process, state: str) -> None:
        process.state, process.since = state, self.now

    def hear(self, process: Process, reply: m.Reply | e.Reply) -> None:
        asks = process.asks
        match reply:
            case e.Noted(number=number):
                for key in [k for k, r in asks.items() if k.startswith("tell") and r.number == number]:
                    del asks[key]
            case e.Line(nonce=nonce):
                process.nonce = nonce
            case e.Stranger():
                self.introduce(process)
            case e.Start(epoch=epoch, fresh=fresh):
                self.hear_epoch(process, epoch)
                if process.state in ("enrolling", "receiving"):
                    if fresh:
                        process.receive, process.update = None, 0
                    asks.pop("enrol", None)
                    self.set_state(process, "joining")
                    self.join(process)
            case e.Get(receive=receive):
                if process.state in ("enrolling", "receiving") and receive != process.receive:
                    asks.pop("enrol", None)
                    process.receive = receive
                    self.set_state(process, "receiving")
                    self.after(self.rng.uniform(0.1, 0.8), lambda: self.copied(process, receive))
            case e.NewEpoch(epoch=epoch):
                self.hear_epoch(process, epoch)
            case e.Give(donate=donate) if donate.number >= process.donations.get(donate.pipeline, 0):
                process.donations[donate.pipeline] = donate.number
                past = process.update >= donate.at_update
                process.donate.pop(donate.pipeline, None)
                if not past:
                    process.donate[donate.pipeline] = donate
                state = "past" if past else "pending"
                self.ask(
                    process, f"tell snapshot {donate.transfer}", e.TellSnapshot, donate.transfer, process.update, state
                )
            case e.Drop(transfer=transfer):
                process.donate = {i: donate for i, donate in process.donate.items() if donate.transfer != transfer}
            case e.Broke(sequence=sequence):
                if sequence in process.completed:
                    self.ask(process, f"tell completed {sequence}", e.TellCompleted, sequence)
                else:
                    process.asked_for.add(sequence)
            case e.Regroup(sequence=sequence, group=group):
                if asks.pop(f"regroup {sequence}", None) is not None:
                    process.completed.add(sequence)
                    process.regrouped = [*process.regrouped[-7:], (sequence, group)]
                    self.begin_exchange(process, group)
            case e.HasMet(met=met):
                if asks.pop(f"meet {met.key}", None) is not None:
                    assert process.worker.pipeline in met.pipelines
                    process.met = [*process.met[-7:], met]
                    if met.past:
                        self.die(process, "it came late to a meeting")
                    else:
                        self.set_state(process, "joining")
                        self.join(process)
            case e.MustEnd(reason=reason):
                self.die(process, f"it must end: {reason}")
            case e.Denial(reason=reason) | m.Refused(reason=reason):
                raise AssertionError(f"{process}: {reason}")
            case m.Acknowledged(number=number):
                self.acknowledged(process, number)
            case m.Unknown():
                if process.state in ("training", "exchanging"):
                    process.number += 1
                    fields = process.worker, process.incarnation, process.number, None, True
                    answered = process.iteration - ("ready" in asks)
                    heard = process.heard
                    self.say(process, m.Join(*fields, heard.highest, heard.to_report(), True, answered))
            case m.Answer(group=group) if "ready" in asks and reply.iteration_of(process.worker) == process.iteration:
                del asks["ready"]
                process.heard.hear(reply)
                self.exchange(process, group)

    def introduce(self, process: Process) -> None:
        process.number += 1
        if process.state in ("enrolling", "receiving"):
            process.receive = None
            if process.state == "receiving":
                self.set_state(process, "enrolling")
            process.asks.pop("received", None)
            self.ask(process, "enrol", e.Enrol, SAME)
            return
        for key in [key for key in process.asks if key.startswith("tell")]:
            del process.asks[key]
        process.donations.clear()
        assert process.epoch is not None
        fields = process.worker, process.incarnation, process.number
        told = process.epoch, tuple(process.holds), tuple(process.met), process.member_since
        self.say(process, e.Resume(*fields, SAME, *told, tuple(process.regrouped)))

    def hear_epoch(self, process: Process, epoch: Epoch) -> None:
        if process.epoch is None or epoch.number > process.epoch.number:
            assert process.incarnation in {member.incarnation for member in epoch.members}
            process.epoch, process.member_since = epoch, process.member_since or epoch.number
            self.after(self.rng.uniform(0.005, 0.05), lambda: self.make_groups(process))
            if epoch.tries:
                self.after(self.rng.uniform(0.01, 3.0), lambda: self.tried(process, epoch))

    def tried(self, process: Process, epoch: Epoch) -> None:
        pairs = [pair for pair in self.apart if process.worker.pipeline in pair and pair <= set(epoch.pipelines)]
        process.tried = epoch.number
        process.misses = tuple(sorted({i for pair in pairs for i in pair} - {process.worker.pipeline}))

    def copied(self, process: Process, receive: Receive) -> None:
        if process.dead or process.receive != receive or process.state != "receiving":
            return
        donor = next((p for p in self.processes if p.worker == Worker(process.worker.stage, receive.donor)), None)
        apart = frozenset((process.worker.pipeline, receive.donor)) in self.apart
        if donor is None or donor.dead or apart or self.rng.random() < 0.05:
            self.ask(process, "enrol", e.TellReceived, receive.transfer, "connection reset")
            return
        process.update = receive.update
        self.ask(process, "enrol", e.TellReceived, receive.transfer)

    def join(self, process: Process) -> None:
        self.ask(process, "session", m.Join, None, False, process.heard.highest, (), True)

    def acknowledged(self, process: Process, number: int) -> None:
        asked = process.asks.get("session")
        if asked is None or number > asked.number or process.state not in ("joining", "leaving"):
            return
        del process.asks["session"]
        if process.state == "joining":
            if process.update:
                self.ask(process, "tell published", e.Publish, "checkpoint", process.update, True)
            process.heard.joined()
            self.set_state(process, "training")
            if process.receive is not None and process.update % PAUSE_EVERY == 0:  # where the donor paused
                process.receive = None
                self.pause(process)
            else:
                self.after(self.rng.uniform(0.02, 0.1), lambda: self.ready(process))
        else:
            process.heard.forget()
            self.set_state(process, "meeting")
            key = f"pause/{process.update // PAUSE_EVERY}"
            self.ask(process, f"meet {key}", e.Meet, key, b"%d" % process.worker.pipeline)

    def ready(self, process: Process) -> None:
        if process.dead or process.state != "training":
            return
        if process.asleep_until > self.now:
            self.after(process.asleep_until - self.now, lambda: self.ready(process))
            return
        job = [p for p in self.processes if p.incarnation == process.incarnation]
        if any(p.update < process.update or p.state in ("joining", "receiving") for p in job):
            self.after(0.02, lambda: self.ready(process))  # its neighbours have nothing for it yet
            return
        process.iteration += 1
        self.ask(process, "ready", m.Ready, process.iteration)

    def exchange(self, process: Process, group: Group) -> None:
        """At once, or when the last one is over."""
        assert process.worker in group.members
        if process.group is not None:
            process.goes_on = lambda: self.exchange(process, group)
            return
        self.begin_exchange(process, group)
        if self.overlaps:
            self.stepped(process)
        else:
            self.set_state(process, "exchanging")
            process.goes_on = lambda: self.stepped(process)

    def begin_exchange(self, process: Process, group: Group) -> None:
        """It takes a moment, and fails if somebody is gone, or for no reason."""
        if len(group.members) > 1:
            assert group.epoch > 0
        process.group = group
        process.begun.add(group.sequence)
        self.after(self.rng.uniform(0.01, 0.05), lambda: self.exchanged(process, group))

    def exchanged(self, process: Process, group: Group) -> None:
        if process.dead or process.group is not group:
            return
        there = {p.worker for p in self.processes if not p.dead and group.epoch in p.holds}
        pipelines = {worker.pipeline for worker in group.members}
        members = [p for p in self.processes if p.worker in group.members]
        waits = any(pair <= pipelines for pair in self.apart) or any(group.sequence not in p.begun for p in members)
        if waits and set(group.members) <= there and not process.asked_for & {group.sequence}:  # nothing comes
            self.after(0.1, lambda: self.exchanged(process, group))
            return
        failed = len(group.members) > 1 and (not set(group.members) <= there or self.rng.random() < 0.01)
        if failed or (process.asked_for & {group.sequence}):
            process.holds.discard(group.epoch)
            process.asked_for.discard(group.sequence)
            process.left = max(process.left, group.sequence)
            self.ask(process, f"regroup {group.sequence}", e.AskRegroup, group, tuple(process.holds), False)
            return
        process.completed.add(group.sequence)
        process.left, process.group = max(process.left, group.sequence), None
        if process.goes_on is not None:
            goes_on, process.goes_on = process.goes_on, None
            goes_on()

    def stepped(self, process: Process) -> None:
        """The iteration is over."""
        process.update += 1
        for donate in list(process.donate.values()):
            if process.update >= donate.at_update:
                del process.donate[donate.pipeline]
                state = "taken" if process.update == donate.at_update else "past"
                key = f"tell snapshot {donate.transfer}"
                self.ask(process, key, e.TellSnapshot, donate.transfer, process.update, state)
        if process.update % PAUSE_EVERY == 0:
            self.pause(process)
        else:
            self.set_state(process, "training")
            self.after(self.rng.uniform(0.02, 0.1), lambda: self.ready(process))

    def pause(self, process: Process) -> None:
        if process.group is not None:
            process.goes_on = lambda: self.pause(process)
            return
        self.set_state(process, "leaving")
        self.ask(process, "session", m.Leave)

    # -------------------------------------------------------------------- faults

    def fault(self) -> None:
        """One, at random."""
        rng, alive = self.rng, [p for p in self.processes if not p.dead]
        if not alive:
            return
        victim = rng.choice(alive)
        match rng.choice("kkkkkkssppScc"):
            case "k":
                self.die(victim, "killed")
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
        """The scheduler reaches nobody."""
        for process in self.processes:
            process.cut_off_until = max(process.cut_off_until, self.now + seconds)
        self.tell(f"the scheduler is cut off for {seconds} s")

    def part(self, one: int, other: int) -> None:
        """These pipelines cannot reach each other from now on."""
        self.apart.add(frozenset((one, other)))
        self.tell(f"pipelines {one} and {other} cannot reach each other")

    def check_that_all_train(self, seconds: float) -> None:
        """With no more faults everybody is a member soon, and goes on."""
        self.loss = 0.0
        self.run(self.now + seconds)
        before = {(p.worker, p.incarnation): p.update for p in self.processes}
        self.run(self.now + 15.0)
        workers = {p.worker for p in self.processes}
        assert workers == {Worker(j, i) for j in range(self.stages) for i in range(self.pipelines)}
        for p in self.processes:
            made = p.update - before.get((p.worker, p.incarnation), p.update)
            assert made > 0, f"{p} has made no update for 15 s"


def live_through(seed: int, faults: int, tell: Callable[[str], None] = lambda text: None) -> World:
    """A history with so many faults, and what must hold in it."""
    world = World(seed, tell)
    with suppress(NobodyLeft):
        world.run(3.0)
        for _ in range(faults):
            world.run(world.now + world.rng.choice([0.05, 0.6, 3.0]))
            world.fault()
        world.check_that_all_train(25.0)
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
    print({p.worker: p.update for p in world.processes}, world.kills, "deaths")
