"""DiLoCo's rounds in virtual time, on the service and on the clients' own cores: members die, and exchanges break off
when some have the new base and others have not. Whatever happens, bases stay in one line, and nothing is put in twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.policies import Group
from lightning_sdpipe.policies.outer_rounds import OuterRounds
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client import effects as f
from lightning_sdpipe.scheduler.server.service import SchedulerService
from tests.scheduler.test_rounds_of_present import PIPELINES, Process, Rounds

UPDATES, EVERY = 24, 2
Updates = frozenset[tuple[int, int]]


@dataclass
class Member(Process):
    """A pipeline whose model is the updates of its base, and those that it has made since."""

    base: int = -1
    made: int = 0
    since: set[tuple[int, int]] = field(default_factory=set)
    taken: int | None = None
    """Base that was handed over, which the scheduler is to count on before it is taken over."""
    left: bool = False


class Bases(Rounds):
    def __init__(self, seed: int, breaks: float, restarts: float) -> None:
        super().__init__(seed, breaks, restarts)
        self.processes = [Member(process.talk) for process in self.processes]
        self.contents: dict[int, Updates] = {-1: frozenset()}
        self.parents: dict[int, int] = {}
        self.brought: dict[tuple[int, int], Updates] = {}
        self.dropped = 0
        self.handed_on: set[tuple[int, int]] = set()
        """Pipelines, each with a base that came from a later round than its own. If all others that had it have died
        meanwhile, that round was given up, and the base counts as older than all until the pipeline's next round."""

    def start_scheduler(self) -> SchedulerService:
        terms = ElasticConfig(start_pipelines=PIPELINES, settle=0.0, recovery_grace=2.0)
        return SchedulerService(OuterRounds(None), 1, PIPELINES, elastic=terms, worker_timeout=30.0, now=self.now)

    def run(self) -> None:
        while any(not p.dead and p.made < UPDATES for p in self.members):
            self.now += 0.05
            assert self.now < 240.0, [(p.pipeline, p.dead, p.base, p.made, p.group, p.asked) for p in self.members]
            alive = [p for p in self.members if not p.dead]
            if len(alive) > 1 and self.rng.random() < 0.01:
                self.die(self.rng.choice(alive))
            if self.restarts and self.now > 1.0 and self.rng.random() < self.restarts:
                self.service = self.start_scheduler()
            self.deliver(self.service.tick(self.now))
            for process in self.rng.sample(alive, len(alive)):
                if not process.dead:
                    self.pump(process)
                    self.go_on(process)

    @property
    def members(self) -> list[Member]:
        return [process for process in self.processes if isinstance(process, Member)]

    def obey(self, process: Process, effect: f.Effect) -> None:
        assert isinstance(process, Member)
        broken = process.group
        super().obey(process, effect)
        match effect:
            case f.Replied(_, e.Again(group=group, source=source)) if source < 0:
                assert broken is not None
                assert group.lineage is not None
                if group.lineage.newest >= broken.sequence:
                    process.since -= self.brought[broken.sequence, process.pipeline]
                    process.group = None
                else:
                    self.brought[group.sequence, process.pipeline] = self.brought[broken.sequence, process.pipeline]
            case f.Replied(m.Ready, m.Answer(group=group)):
                self.brought[group.sequence, process.pipeline] = frozenset(process.since)

    def break_off(self, process: Process) -> None:
        assert isinstance(process, Member)
        if process.taken is None:  # else it has what it lacked, and is in no exchange
            super().break_off(process)

    def go_on(self, process: Process) -> None:
        assert isinstance(process, Member)
        talk = process.talk
        if process.taken is not None:
            self.rejoin(process)
        elif not process.talk.epoch.number or process.asked:
            return
        elif not talk.joined:
            if not talk.asks(m.Join):
                self.ask(process, m.Join)
        elif process.group is None:
            if not talk.asks(m.Ready):
                self.train(process)
        elif process.given is not None:
            self.take(process, process.given)
        else:
            self.exchange(process, process.group)

    def train(self, process: Member) -> None:
        if process.made < UPDATES:
            process.made += 1
            process.since.add((process.pipeline, process.made))
            if process.made % EVERY == 0:
                self.ask(process, m.Ready, process.made, process.base)

    def exchange(self, process: Process, group: Group) -> None:
        assert isinstance(process, Member)
        assert group.lineage is not None
        members = [self.members[worker.pipeline] for worker in group.members]
        begun = [p for p in members if (group.sequence, p.pipeline) in self.brought]
        if not group.lineage.goes_on:
            process.group, self.dropped = None, self.dropped + 1
        elif any(p.dead for p in members) or (len(members) > 1 and self.rng.random() < self.breaks):
            self.break_off(process)
        elif len(begun) == len(members):
            if group.sequence not in self.contents:
                self.make(group)
            self.adopt(process, group.sequence)

    def make(self, group: Group) -> None:
        assert group.lineage is not None
        contents = set(self.contents[group.lineage.newest])
        for worker in group.members:
            updates = self.brought[group.sequence, worker.pipeline]
            assert not contents & updates, f"round {group.sequence} puts in {sorted(contents & updates)} twice"
            contents |= updates
        self.contents[group.sequence] = frozenset(contents)
        self.parents[group.sequence] = group.lineage.newest
        line = [group.sequence]
        while line[-1] in self.parents:
            line.append(self.parents[line[-1]])
        out = {(p.pipeline, p.base) for p in self.members if not p.dead and p.base not in line}
        assert out <= self.handed_on, f"round {group.sequence} forks"

    def take(self, process: Process, given: Group) -> None:
        assert isinstance(process, Member)
        source = self.members[next(w.pipeline for w, x in zip(given.members, given.weights, strict=True) if x)]
        if source.dead or self.rng.random() < self.breaks:
            self.break_off(process)
        elif given.sequence in source.handed:
            self.taken += 1
            if source.base == given.sequence:
                self.adopt(process, source.base)
            else:
                process.taken = source.base

    def rejoin(self, process: Member) -> None:
        talk = process.talk
        if not process.left:
            if talk.joined:
                self.ask(process, m.Leave)
            process.left = True
        elif not talk.joined and not talk.asks(m.Join, m.Leave):
            self.ask(process, m.Join)
        elif talk.joined:
            assert process.taken is not None
            self.handed_on.add((process.pipeline, process.taken))
            self.adopt(process, process.taken)

    def adopt(self, process: Member, base: int) -> None:
        assert process.group is not None
        process.since -= self.brought[process.group.sequence, process.pipeline]
        process.base, process.taken, process.left = base, None, False
        process.talk.completed(process.group.sequence)
        process.group = process.given = None


@pytest.mark.parametrize(("breaks", "restarts"), [(0.0, 0.0), (0.2, 0.0), (0.0, 0.03), (0.1, 0.02)])
def test_bases_stay_in_one_line_and_nothing_is_put_in_twice(breaks: float, restarts: float) -> None:
    happened = [0, 0, 0]
    for seed in range(15):
        rounds = Bases(seed, breaks, restarts)
        rounds.run()
        happened = [a + b for a, b in zip(happened, (len(rounds.contents), rounds.taken, rounds.dropped), strict=True)]
    assert happened[0] > 15
    assert happened[1] or not breaks, "none was handed over"
