"""Rounds of gradients in virtual time, on the service and on the clients' own cores: members die, newcomers take over
the state of others, the scheduler is started again, and exchanges break off when some have the mean and others have
not. Whatever happens, all that are left have the same means."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.membership.members import Exchanging, Receive
from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.policies.all_reduce import AllPresent
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client import conversation as c
from lightning_sdpipe.scheduler.server.service import SchedulerService

STEP, ROUNDS, PIPELINES = 0.05, 12, 4
LIMIT = 2.0
"""Seconds that a source may be silent."""


@dataclass
class Process:
    """One pipeline of one stage. Its model is the list of means that it has stepped with: each the members of it."""

    talk: c.Conversation
    dead: bool = False
    model: list[tuple[int, ...]] = field(default_factory=list)
    group: Group | None = None
    """Whose mean it is to have next, or in which one is handed over to it; None until it is known."""
    begun: set[int] = field(default_factory=set)
    """Groups in whose exchange it was."""
    since: float = 0.0
    """When that was known."""
    handed: set[int] = field(default_factory=set)
    """Groups in which it hands a mean over."""
    kept: int = -1
    """Rounds in its model after the last one whose mean it has got, not copied with a state."""
    refused: int = 0
    """Times in a row that another one could not hand over what it lacks."""
    begins: bool = False
    """It trains, from its first round or with the state of another one."""
    offer: Receive | None = None
    """A state that it is to get."""
    copies: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    """States that it gives, by transfer."""
    tells: set[c.Key] = field(default_factory=set)
    """Copies of which the scheduler has not heard yet."""
    number: int = 0
    """Of its next ready."""

    @property
    def pipeline(self) -> int:
        return self.talk.worker.pipeline


class Rounds:
    """A run; ``breaks`` is how likely an exchange breaks off for one of its members, and ``restarts`` and ``newcomers``
    how likely the scheduler, or a pipeline that died, is started again in a step; ``unheard`` how likely the scheduler
    dies when all but a newcomer have heard that it is a member."""

    early = 0.0
    """How likely a member gives a round up before it has begun it."""
    uninvited = 0.0
    """How likely a source does not hear that it is to hand something over."""

    def __init__(self, seed: int, breaks: float, restarts: float, newcomers: float = 0.0, unheard: float = 0.0) -> None:
        self.rng, self.breaks, self.restarts, self.now = random.Random(seed), breaks, restarts, 0.0
        self.unheard, self.lost, self.dies = unheard, 0, False
        self.newcomers, self.rounds, self.starts = newcomers, 5 * ROUNDS if newcomers else ROUNDS, 0
        self.service = self.start_scheduler()
        self.processes = [Process(c.Conversation(Worker(0, i), 100 + i)) for i in range(PIPELINES)]
        self.lines: dict[bytes, deque[Any]] = {}
        self.silent = self.taken = self.given_up = self.fell_behind = 0
        for process in self.processes:
            process.talk.ask(e.Enrol, {"model": "linear"})

    def run(self) -> None:
        while any(not p.dead and len(p.model) < self.rounds for p in self.processes):
            self.now += STEP
            assert self.now < 120.0, [(p.pipeline, p.dead, p.model, p.group) for p in self.processes]
            alive = [p for p in self.processes if not p.dead]
            trains = [p for p in alive if p.begins]
            ends = any(len(p.model) == self.rounds for p in trains)
            if self.newcomers and not ends and self.rng.random() < self.newcomers:
                self.start_again()
            if len(trains) > 1 and not ends and self.rng.random() < 0.01:
                self.die(self.rng.choice(trains))
            if self.restarts and self.now > 1.0 and self.rng.random() < self.restarts:
                self.service = self.start_scheduler()
            if self.dies:
                self.service, self.dies = self.start_scheduler(), False
            self.deliver(self.service.tick(self.now))
            for process in self.rng.sample(alive, len(alive)):
                if not process.dead:
                    self.pump(process)
                    self.go_on(process)

    def start_scheduler(self) -> SchedulerService:
        terms = ElasticConfig(start_pipelines=PIPELINES, settle=0.0, recovery_grace=2.0)
        return SchedulerService(AllPresent(), 1, PIPELINES, elastic=terms, worker_timeout=30.0, now=self.now)

    def die(self, process: Process) -> None:
        process.dead = True
        self.say(process, process.talk._make(e.Depart, False), e.peer_of)

    def start_again(self) -> None:
        there = {p.pipeline for p in self.processes if not p.dead}
        for pipeline in sorted({*range(PIPELINES)} - there)[:1]:
            self.starts += 1
            process = Process(c.Conversation(Worker(0, pipeline), 1000 * self.starts + pipeline))
            self.processes.append(process)
            process.talk.ask(e.Enrol, {"model": "linear"})

    def say(self, process: Process, request: Any, line: Any) -> None:
        peer = line(process.talk.worker, process.talk.incarnation)
        self.deliver(self.service.handle(peer, request, self.now))

    def ask(self, process: Process, kind: c.Kind, *fields: object) -> None:
        process.talk.ask(kind, *fields)
        self.ask_in_training(process, 0.0)

    def ask_in_training(self, process: Process, until: float) -> None:
        for request in process.talk.due_in_training(until):
            self.say(process, request, m.routing_id)

    def deliver(self, replies: Any) -> None:
        for peer, reply in replies:
            if self.uninvited and isinstance(reply, m.Invitation) and self.rng.random() < self.uninvited:
                self.silent += 1
                continue
            newcomer = self.unheard and isinstance(reply, e.Start) and not reply.fresh
            if newcomer and self.rng.random() < self.unheard:
                self.lines[peer], self.dies = deque(), True
                self.lost += 1
            else:
                self.lines.setdefault(peer, deque()).append(reply)

    def pump(self, process: Process) -> None:
        """Says what is due, and hears some of what has come, in order on each line."""
        talk = process.talk
        for request in talk.due(self.now):
            self.say(process, request, e.peer_of)
        if self.restarts and self.rng.random() < 0.1:
            self.ask_in_training(process, math.inf)
        for line in (e.peer_of, m.routing_id):
            queue = self.lines.setdefault(line(talk.worker, talk.incarnation), deque())
            while queue and self.rng.random() < 0.7:
                for effect in talk.hear(queue.popleft()):
                    self.obey(process, effect)

    def obey(self, process: Process, effect: c.Effect) -> None:
        match effect:
            case c.EpochBegan(epoch):
                process.talk.holds([*process.talk.held, epoch.number])
            case c.GroupBroke(sequence) if process.group is not None and process.group.sequence == sequence:
                self.given_up += 1
                self.break_off(process)
            case m.Invitation(group=group):
                process.handed.add(group.sequence)
            case c.Replied(m.Ready, m.Answer(group=group)):
                process.group, process.since = group, self.now
                if len(group.members) > 1 and self.rng.random() < self.early:
                    self.break_off(process)  # before it has begun
                else:
                    process.begun.add(group.sequence)
                    members = tuple(worker.pipeline for worker in group.members)
                    process.talk.exchanges(Exchanging(group.sequence, members, 0))
            case c.Replied(key, e.Noted()):
                process.tells.discard(key)
            case c.Replied(_, e.Start()):
                process.begins = True
            case c.Replied(_, e.Get(receive=receive)):
                process.offer = receive

    def break_off(self, process: Process) -> None:
        assert process.group is not None
        process.talk.holds([epoch for epoch in process.talk.held if epoch != process.group.epoch])
        process.talk.exchanges(None)
        process.group = None

    def go_on(self, process: Process) -> None:
        talk = process.talk
        if process.offer is not None:
            self.receive(process, process.offer)
        if process.begins and process.group is None and m.Ready not in talk._open:
            for transfer in talk.donations:
                process.copies[transfer] = list(process.model)
                process.tells.add(talk.ask(e.TellSnapshot, transfer, len(process.model)))
        if process.tells or not process.begins or len(process.model) == self.rounds:
            return
        if not talk.joined:
            if m.Join not in talk._open:
                self.ask(process, m.Join)
        elif process.group is None:
            if m.Ready not in talk._open:
                self.ask(process, m.Ready, process.number, len(process.model))
                process.number += 1
        elif process.group.source is not None:
            self.take(process, process.group, process.group.source)
        else:
            self.exchange(process, process.group)

    def receive(self, process: Process, offer: Receive) -> None:
        """Takes over a state; the transfer breaks off if its donor dies."""
        donor = self.newest(offer.donor)
        if process.talk.offered != offer.transfer or donor.dead or self.rng.random() < self.breaks:
            process.talk.ask(e.TellReceived, offer.transfer, -1, "its donor is gone")
            process.offer = None
        elif offer.transfer in donor.copies and self.rng.random() < 0.2:
            process.model = list(donor.copies[offer.transfer])
            process.talk.contains = len(process.model)
            process.talk.ask(e.TellReceived, offer.transfer, len(process.model))
            process.offer = None

    def newest(self, pipeline: int) -> Process:
        return next(p for p in reversed(self.processes) if p.pipeline == pipeline)

    def exchange(self, process: Process, group: Group) -> None:
        """It ends when all members have begun it, or are dead; for each of them it may break off then."""
        members = [self.newest(worker.pipeline) for worker in group.members]
        if any(p.dead for p in members) or (len(members) > 1 and self.rng.random() < self.breaks):
            self.break_off(process)
        elif all(group.sequence in p.begun for p in members):
            self.step(process, tuple(p.pipeline for p in members))

    def take(self, process: Process, given: Group, worker: Worker) -> None:
        source = self.newest(worker.pipeline)
        silent = given.sequence not in source.handed and self.now - process.since > LIMIT
        if source.dead or silent or self.rng.random() < self.breaks:
            process.refused = 0
            self.break_off(process)
        elif given.sequence in source.handed:
            if source.kept == len(source.model) == len(process.model) + 1:
                self.taken += 1
                self.step(process, source.model[-1])
                return
            process.refused += 1
            if process.refused > 2 * sum(p.begins and not p.dead for p in self.processes):  # none can
                self.fell_behind += 1
                self.die(process)
            else:
                process.group = None

    def step(self, process: Process, mean: tuple[int, ...]) -> None:
        process.talk.exchanges(None)
        process.model.append(mean)
        process.kept = process.talk.contains = len(process.model)
        process.group = None
        process.refused = 0


@pytest.mark.parametrize(("breaks", "restarts"), [(0.0, 0.0), (0.1, 0.0), (0.3, 0.0), (0.0, 0.05), (0.1, 0.02)])
def test_all_that_are_left_have_stepped_with_the_same_means(breaks: float, restarts: float) -> None:
    taken = 0
    for seed in range(20):
        rounds = Rounds(seed, breaks, restarts)
        rounds.run()
        models = {tuple(p.model) for p in rounds.processes if not p.dead}
        assert len(models) == 1, (seed, models)
        (model,) = models
        for dead in (p for p in rounds.processes if p.dead):
            assert tuple(dead.model[:-1]) == model[: max(0, len(dead.model) - 1)], "all but its last one are theirs"
        taken += rounds.taken
    assert taken or not breaks, "none was handed over"


def test_none_waits_for_one_that_has_given_a_round_up_before_it_began() -> None:
    given_up = 0
    for seed in range(10):
        rounds = Rounds(seed, breaks=0.0, restarts=0.0)
        rounds.early = 0.05
        rounds.run()
        assert len({tuple(p.model) for p in rounds.processes if not p.dead}) == 1
        given_up += rounds.given_up
    assert given_up > 10


def test_what_a_source_does_not_hear_that_it_hands_over_is_asked_for_again() -> None:
    silent = taken = 0
    for seed in range(10):
        rounds = Rounds(seed, breaks=0.02, restarts=0.0)
        rounds.uninvited = 0.5
        rounds.run()
        assert len({tuple(p.model) for p in rounds.processes if not p.dead}) == 1
        silent, taken = silent + rounds.silent, taken + rounds.taken
    assert min(silent, taken) > 0


@pytest.mark.parametrize(("breaks", "restarts"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.02), (0.1, 0.02)])
def test_newcomers_are_in_every_round_after_the_state_that_they_took_over(breaks: float, restarts: float) -> None:
    begun = 0
    for seed in range(12):
        rounds = Rounds(seed, breaks, restarts, newcomers=0.1)
        rounds.run()
        models = {tuple(p.model) for p in rounds.processes if not p.dead and p.begins}
        assert len(models) == 1, (seed, models)
        begun += sum(p.begins for p in rounds.processes[PIPELINES:])
        assert rounds.fell_behind <= 1 + (restarts > 0)
    assert begun > 10, "hardly any newcomer has trained"


def test_a_newcomer_that_has_not_heard_that_it_is_a_member_is_not_put_out() -> None:
    lost = 0
    for seed in range(8):
        rounds = Rounds(seed, breaks=0.1, restarts=1e-9, newcomers=0.1, unheard=0.5)
        rounds.run()
        assert [p.pipeline for p in rounds.processes if p.talk.stop is not None and not p.dead] == []
        models = {tuple(p.model) for p in rounds.processes if not p.dead and p.begins}
        assert len(models) == 1, (seed, models)
        lost += rounds.lost
    assert lost > 20, "hardly any was not heard"
