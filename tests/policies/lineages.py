"""Virtual histories of DiLoCo's rounds: workers train, die, come, rest, break off and lack results, in any order.

A model is the set of updates that are in it. The world keeps what the rules of ``policies/outer_rounds.py`` promise:
an update is put into a base once, and all bases that anybody goes on from are in one line.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_sdpipe.policies import Group, Joined, Left, Lost, Ready, Tick, Worker
from lightning_sdpipe.policies.events import Regrouped, Vanished
from lightning_sdpipe.policies.outer_rounds import OuterRoundsPolicy

Updates = frozenset[tuple[int, int]]
EVERY = 2
FIRST = -1


@dataclass(eq=False)
class Process:
    """One start of a pipeline; ``moved`` are the updates since its base."""

    pipeline: int
    number: int
    base: int = FIRST
    moved: set[tuple[int, int]] = field(default_factory=set)
    made: int = 0
    joined: bool = False
    waits: bool = False
    group: Group | None = None
    asks: bool = False
    results: set[int] = field(default_factory=set)


@dataclass
class Exchange:
    """A round under way: what its members have brought, and those that have sent all that others need."""

    group: Group
    members: list[Process]
    brought: dict[int, Updates]
    bases: dict[int, int]
    sent: set[int] = field(default_factory=set)
    said: list[Process] = field(default_factory=list)


class Violation(AssertionError):
    pass


class World:
    """A run of one stage.

    Args:
        seed: draws the history.
        make: makes the policy.
        hands_over: whether a member that has the result gives it to the others.
        always_again: whether members without a result try again, whatever their bases.
    """

    def __init__(
        self,
        seed: int,
        make: Callable[[int, int], OuterRoundsPolicy] = OuterRoundsPolicy,
        hands_over: bool = True,
        always_again: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        size = self.rng.randint(2, 5)
        self.policy, self.size = make(1, 8), size
        self.hands_over, self.always_again = hands_over, always_again
        self.now, self.started = 0.0, 0
        self.contents: dict[int, Updates] = {FIRST: frozenset()}
        self.parents: dict[int, int] = {}
        self.given_up: set[int] = set()
        self.exchanges: dict[int, Exchange] = {}
        self.alive: list[Process] = []
        self.coming: list[Process] = []
        self.counts = dict.fromkeys(("rounds", "behind", "handed", "again", "dropped", "lost", "deaths", "came"), 0)
        for pipeline in range(size):
            self.join(self.start(pipeline))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.now += 0.1
            self.tell(Tick())
            process = self.rng.choice(self.alive)
            chance = self.rng.random()
            if chance < 0.015 and len(self.alive) > 1:
                self.die(process)
            elif chance < 0.03 and len(self.alive) + len(self.coming) < self.size:
                self.donate(process)
            elif chance < 0.06 and self.coming:
                self.join(self.coming.pop(self.rng.randrange(len(self.coming))))
            else:
                self.go_on(process)
            self.settle()

    # -------------------------------------------------------------- coming and going

    def start(self, pipeline: int) -> Process:
        self.started += 1
        return Process(pipeline, self.started)

    def join(self, process: Process) -> None:
        if process not in self.alive:
            self.alive.append(process)
        process.joined = True
        self.tell(Joined(Worker(0, process.pipeline)))

    def donate(self, donor: Process) -> None:
        taken = {process.pipeline for process in (*self.alive, *self.coming)}
        newcomer = self.start(min(set(range(8)) - taken))
        newcomer.base = donor.base
        self.coming.append(newcomer)
        self.counts["came"] += 1

    def die(self, process: Process) -> None:
        self.alive.remove(process)
        self.counts["deaths"] += 1
        self.tell((Lost if process.joined else Vanished)(Worker(0, process.pipeline)))

    def tell(self, event: object) -> None:
        for group in self.policy.on(event, self.now):  # type: ignore[arg-type]
            self.goes_out(group)

    def goes_out(self, group: Group) -> None:
        members = [next(p for p in self.alive if p.pipeline == worker.pipeline) for worker in group.members]
        for process in members:
            process.waits, process.asks, process.group = False, False, group
        self.exchanges[group.sequence] = Exchange(
            group, members, {p.number: frozenset(p.moved) for p in members}, {p.number: p.base for p in members}
        )

    # ------------------------------------------------------------------- one process

    def go_on(self, process: Process) -> None:
        if process.asks or process.waits:
            return
        if process.group is not None:
            self.exchange(process, self.exchanges[process.group.sequence])
        elif not process.joined:
            self.join(process)
        elif self.rng.random() < 0.02:
            process.joined = False
            self.tell(Left(Worker(0, process.pipeline)))
        else:
            process.made += 1
            process.moved.add((process.number, process.made))
            if process.made % EVERY == 0:
                process.waits = True
                self.tell(Ready(Worker(0, process.pipeline), process.made, process.base))

    def exchange(self, process: Process, round_: Exchange) -> None:
        lineage = round_.group.lineage
        assert lineage is not None
        if not (lineage.goes_on or self.always_again):
            process.group = None  # it keeps what it brought
            self.counts["dropped"] += 1
        elif any(p not in self.alive for p in round_.members if p.number not in round_.sent) or self.rng.random() < 0.1:
            self.break_off(process, round_)
        elif process.number not in round_.sent:
            round_.sent.add(process.number)
        elif len(round_.sent) == len(round_.members):
            self.commit(process, round_)

    def break_off(self, process: Process, round_: Exchange) -> None:
        process.asks = True
        round_.said.append(process)

    def commit(self, process: Process, round_: Exchange) -> None:
        sequence = round_.group.sequence
        newest = max(round_.bases.values(), key=self.is_older)
        if sequence not in self.contents:
            self.counts["rounds"] += 1
            self.counts["behind"] += len(set(round_.bases.values())) > 1
            self.make(sequence, newest, [*round_.brought.values()])
        self.take(process, sequence, round_)

    def is_older(self, base: int) -> tuple[bool, int]:
        return base not in self.given_up, base

    def make(self, sequence: int, parent: int, brought: list[Updates]) -> None:
        contents = set(self.contents[parent])
        for updates in brought:
            if contents & updates:
                raise Violation(f"round {sequence} puts in {sorted(contents & updates)} twice")
            contents |= updates
        self.contents[sequence], self.parents[sequence] = frozenset(contents), parent
        line = self.line(sequence)
        for process in self.alive:  # a newcomer whose donor is gone may have what no other has, until its first round
            if process.base not in line and (process.results or process.number <= self.size):
                raise Violation(f"round {sequence} forks: {process.pipeline} has {process.base}, its line is {line}")

    def line(self, base: int) -> list[int]:
        line = [base]
        while line[-1] in self.parents:
            line.append(self.parents[line[-1]])
        return line

    def take(self, process: Process, base: int, round_: Exchange) -> None:
        process.base, process.group, process.asks = base, None, False
        process.moved -= round_.brought[process.number]
        process.results.add(round_.group.sequence)

    # ------------------------------------------------------------- broken rounds

    def settle(self) -> None:
        """As the scheduler does, once each member is gone, has the result, or has said that it lacks it."""
        for sequence, round_ in list(self.exchanges.items()):
            left = [p for p in round_.members if p in self.alive]
            said = [p for p in round_.said if p in left]
            done = [p for p in left if sequence in p.results]
            if not said or len(said) + len(done) < len(left) or self.rng.random() < 0.5:
                continue
            if done and self.hands_over:
                self.hand_over(self.rng.choice(done), said[0], round_)
                round_.said.remove(said[0])
            else:
                self.regroup(round_, sorted(said, key=lambda p: p.pipeline))

    def hand_over(self, source: Process, process: Process, round_: Exchange) -> None:
        """The source may have gone on: then the scheduler is told before its base is taken over."""
        self.counts["handed"] += 1
        if source.base != round_.group.sequence and process.joined:
            self.tell(Left(Worker(0, process.pipeline)))
            self.tell(Joined(Worker(0, process.pipeline)))
        self.take(process, source.base, round_)

    def regroup(self, round_: Exchange, said: list[Process]) -> None:
        sequence = round_.group.sequence
        del self.exchanges[sequence]
        self.given_up.add(sequence)
        members = tuple(Worker(0, p.pipeline) for p in said)
        bases = dict(zip(round_.group.members, round_.group.lineage.bases, strict=True))  # type: ignore[union-attr]
        retry = Regrouped(sequence, members, (1.0,) * len(said), tuple(bases[member] for member in members))
        (group,) = self.policy.on(retry, self.now)
        lineage = group.lineage
        assert lineage is not None
        for process in said:
            process.asks = False
        if lineage.goes_on or self.always_again:
            self.counts["again"] += 1
            self.goes_out(group)
            return
        for process in said:
            process.group = None
            if lineage.newest >= sequence:  # what it brought may be in there
                self.counts["lost"] += 1
                process.moved -= round_.brought[process.number]
            else:
                self.counts["dropped"] += 1
