"""Virtual histories of rounds of all, on several stages: exchanges break off for any of their members, pipelines die,
leave and come, and the scheduler is started again, in any order.

The model of a worker is the list of the rounds that are in it, each the starts that were members. A worker that has the
outcome of a round waits for its pipeline's other stages before it can be ready again: gradients are clipped together.

Where all of a model can be handed over, a worker stands: it trains on while it is ready for a round, and stage 0 calls
the others to begin it. One whose exchange breaks off waits for that one. Pipelines rest while others make rounds.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from lightning_sdpipe.policies import Group, Joined, Left, Lost, Progress, Ready, Restarted, Worker
from lightning_sdpipe.policies.decisions import Reason
from lightning_sdpipe.policies.events import Contains, Event, Vanished
from lightning_sdpipe.policies.policy import Policy, PolicyConfig

Model = list[tuple[int, ...]]
EVERY = 7
"""Rounds between two meetings of all."""


class Violation(AssertionError):
    pass


@dataclass(eq=False)
class Stage:
    """One worker: it trains, is ``ready``, is in a ``group``, or has ended its ``turn``."""

    worker: Worker
    model: Model
    kept: int = -1
    """Number of rounds in the model after the last one whose outcome it has got, not copied with a state."""
    turn: int = 0
    ready: bool = False
    stands: bool = False
    """Whether it trains on meanwhile, and begins a round of its stage when it is ``called``."""
    called: int | None = None
    """Number of the scheduler that named the round to which it has been called."""
    group: Group | None = None
    """Of a round, or one in which it is handed the outcome of one."""
    named_by: int = 0
    """Number of the scheduler that named it."""
    began: set[int] = field(default_factory=set)
    """Groups in whose exchange it was."""
    number: int = -1
    """That of its last ready."""
    refused: int = 0
    """Times in a row that another one could not hand over what it lacks."""
    told: int = -1
    """Rounds that the scheduler knows to be in its model."""


@dataclass(eq=False)
class Start:
    """One start of a pipeline."""

    number: int
    stages: list[Stage]
    met: int
    """Rounds that its model contained when it last left to meet the others."""
    joined: bool = True


class World:
    """A run.

    Args:
        seed: draws the history.
        config: the policy's values.
        stages: number of stages.
        one: whether the outcome of the last round alone can be handed over; else all of a model is.
        beats: whether a worker tells that it has an outcome before it is ready again.
        drops: whether a worker that stands drops a round that it has not begun when the scheduler is started again.
    """

    def __init__(
        self, seed: int, config: PolicyConfig, stages: int, one: bool, beats: bool = True, drops: bool = True
    ) -> None:
        self.drops = drops
        self.rng, self.config, self.stages, self.one, self.beats = random.Random(seed), config, stages, one, beats
        self.pipelines = self.rng.randint(2, 4)
        self.policy: Policy = config.make_policy(stages, self.pipelines)
        self.counts: Counter[str] = Counter()
        self.faults, self.now, self.starts, self.next_sequence, self.scheduler = 0.1, 0.0, 0, 0, 0
        self.there: dict[int, Start] = {}
        for pipeline in range(self.pipelines):
            self.come(pipeline, [[] for _ in range(stages)], met=0)

    def run(self, steps: int, calm: int) -> None:
        """Run with faults, and then without: all must make some more rounds."""
        for _ in range(steps):
            self.step()
        self.faults, before = 0.0, self.rounds()
        for _ in range(calm):
            self.step()
        if self.rounds() < before + 3:
            raise Violation(f"it stands: {[(s.worker, s.ready, s.group) for s in self.workers()]}")

    def rounds(self) -> int:
        return min(len(stage.model) for stage in self.workers())

    def workers(self) -> list[Stage]:
        return [stage for start in self.there.values() for stage in start.stages]

    def step(self) -> None:
        self.now += 1.0
        start = self.rng.choice(list(self.there.values()))
        if self.rng.random() < self.faults * 0.3:
            self.fault(start)
        elif self.beats and self.rng.random() < 0.2:
            stage = self.rng.choice(start.stages)
            self.tell(Contains(stage.worker, len(stage.model)))
        elif start.joined:
            self.go_on(start, self.rng.choice(start.stages))
        elif not self.one and self.rng.random() < 0.1:  # it has rested
            start.joined = True
            self.tell(*(Joined(stage.worker) for stage in start.stages))
        elif not any(other.joined for other in self.there.values()):  # all met
            for other in self.there.values():
                other.joined = True
                self.tell(*(Joined(stage.worker) for stage in other.stages))
        self.check()

    def go_on(self, start: Start, stage: Stage) -> None:
        if stage.stands and stage.called is not None and stage.called != self.scheduler and stage.group is None:
            self.trains_on(stage)
        elif stage.ready and not self.one and self.rng.random() < 0.3:  # it trains on
            self.tell(Progress(stage.worker, stage.turn, 1, 1.0, 0.0))
            stand = all(each.stands and each.ready and each.called is None for each in start.stages)
            if stand and self.leaves(start):
                self.leave(start)
        elif stage.group is not None:
            self.exchange(start, stage, stage.group)
        elif not stage.ready and stage.turn == min(each.turn for each in start.stages):
            if self.between_turns(start) and self.leaves(start):
                self.leave(start)
                return
            if stage.worker.stage == 0:
                self.tell(Progress(stage.worker, stage.turn, 1, 1.0, 0.0))
            self.say_ready(stage, stands=not self.one)

    def say_ready(self, stage: Stage, stands: bool = False) -> None:
        stage.ready, stage.group, stage.number, stage.stands = True, None, stage.number + 1, stands
        self.says_ready(stage)

    def says_ready(self, stage: Stage) -> None:
        again = not stage.stands and not self.one
        self.tell(Ready(stage.worker, stage.number, len(stage.model), again))

    def trains_on(self, stage: Stage) -> None:
        """Let ``stage`` go on without the round to which it was called: the scheduler was started again since."""
        stage.turn, stage.called = stage.turn + 1, None

    def exchange(self, start: Start, stage: Stage, group: Group) -> None:
        source = group.source
        others = [self.at(worker) for worker in group.members if worker != stage.worker]
        if source is None:
            if stage.stands:
                assert group.reason != Reason.MADE_AGAIN
                if stage.called is None:
                    for each in start.stages if stage.worker.stage == 0 else []:
                        each.called = stage.named_by
                    return
                if stage.called != stage.named_by:
                    self.trains_on(stage)
                    return
            breaks = any(other is None or group.sequence not in other.began for other in others)
            if group.sequence not in stage.began:
                stage.began.add(group.sequence)
                stage.called, stage.stands = None, False
                return
            if breaks and not any(other is None or self.lost(other, group) for other in others):
                return  # it waits for one that has yet to begin
            if breaks or self.rng.random() < self.faults:
                self.counts["broken"] += len(others) > 0
                self.say_ready(stage)
            else:
                self.ends(stage, tuple(self.number(worker) for worker in group.members))
                self.counts["rounds"] += 1
            return
        giver = self.at(source)
        if giver is None or self.rng.random() < self.faults:
            self.counts["not handed"] += 1
            stage.refused = 0
            self.say_ready(stage, stage.stands)
            return
        missed = giver.model[len(stage.model) :]
        if self.one and giver.kept != len(giver.model):
            self.counts["refused"] += 1
            stage.refused += 1
            if stage.refused <= 2 * len(self.there):
                self.say_ready(stage)
                return
            others = [each.stages[stage.worker.stage] for each in self.there.values()]
            if able := [each.worker for each in others if each.kept == len(each.model) > len(stage.model)]:
                raise Violation(f"{stage.worker} falls behind, though {able} can hand over what it lacks")
            self.counts["fell behind"] += 1
            self.die(start)
            return
        if self.one and len(missed) != 1:
            raise Violation(f"{stage.worker} fell behind by {len(missed)} rounds")
        self.counts["handed"] += 1
        if stage.stands:
            stage.model = [*stage.model, *missed]
            self.say_ready(stage, stands=True)
            return
        stage.model += missed[:-1]
        self.ends(stage, missed[-1])

    def lost(self, stage: Stage, group: Group) -> bool:
        """Whether that member has never begun it, and will not."""
        return group.sequence not in stage.began and (stage.group is None or stage.group.sequence != group.sequence)

    def ends(self, stage: Stage, outcome: tuple[int, ...]) -> None:
        stage.model = [*stage.model, outcome]
        stage.group, stage.kept, stage.refused = None, len(stage.model), 0
        stage.turn += 1

    def at(self, worker: Worker) -> Stage | None:
        start = self.there.get(worker.pipeline)
        return None if start is None else start.stages[worker.stage]

    def number(self, worker: Worker) -> int:
        return self.there[worker.pipeline].number

    # ------------------------------------------------------------ coming and going

    def come(self, pipeline: int, models: list[Model], met: int) -> None:
        self.starts += 1
        stages = [Stage(Worker(j, pipeline), list(model)) for j, model in enumerate(models)]
        self.there[pipeline] = Start(self.starts, stages, met)
        self.tell(*(Joined(stage.worker) for stage in stages))

    def leaves(self, start: Start) -> bool:
        """Whether it is to meet the others: after the same rounds, if it must not miss any."""
        made = len(start.stages[0].model)
        if self.one:
            return made % EVERY == 0 and made > start.met
        return self.rng.random() < 2 * self.faults

    def leave(self, start: Start) -> None:
        """For a meeting of all; what it has is said before."""
        self.counts["left"] += 1
        start.joined, start.met = False, len(start.stages[0].model)
        for stage in start.stages:
            stage.ready = False
            self.tell(Contains(stage.worker, len(stage.model)), Left(stage.worker))

    def fault(self, start: Start) -> None:
        kind = self.rng.choice(["dies", "comes", "comes", "restart"])
        gone = set(range(self.pipelines)) - self.there.keys()
        if kind == "dies" and len(self.there) > 1:
            self.counts["deaths"] += 1
            self.die(start)
        elif kind == "comes" and gone and start.joined and self.between_turns(start):
            self.counts["came"] += 1
            self.come(min(gone), [stage.model for stage in start.stages], start.met)
        elif kind == "restart" and self.beats:
            self.counts["restarts"] += 1
            self.policy, self.scheduler = self.config.make_policy(self.stages, self.pipelines), self.scheduler + 1
            self.tell(Restarted(self.next_sequence))
            for stage in self.workers():
                stage.told = -1
                if stage.group is not None and stage.group.sequence not in stage.began and stage.group.source is None:
                    self.is_restarted(stage)
                if self.there[stage.worker.pipeline].joined:
                    self.tell(Joined(stage.worker, None if stage.number < 0 else stage.number - stage.ready))
            for stage in self.workers():
                self.tell(Contains(stage.worker, len(stage.model)))
            for stage in self.workers():
                if stage.ready:
                    self.says_ready(stage)

    def is_restarted(self, stage: Stage) -> None:
        """Let ``stage`` not have heard of the round that it was to begin, or be ready again if it will not."""
        if self.rng.random() < 0.5 and (stage.called is None or stage.worker.stage > 0):
            self.counts["unheard"] += 1
        elif self.drops and stage.stands and stage.called is None:
            self.counts["dropped"] += 1
            stage.number += 1
        else:
            return
        stage.group, stage.ready = None, True

    def die(self, start: Start) -> None:
        del self.there[start.stages[0].worker.pipeline]
        self.tell(*((Lost if start.joined else Vanished)(stage.worker) for stage in start.stages))

    def between_turns(self, start: Start) -> bool:
        rounds = {len(stage.model) for stage in start.stages} if self.one else {0}
        idle = not any(stage.ready or stage.group for stage in start.stages)
        return idle and len(rounds) == len({stage.turn for stage in start.stages}) == 1

    # -------------------------------------------------------------------- inside

    def tell(self, *events: Event) -> None:
        for event in events:
            if isinstance(event, Contains | Ready):
                told = self.there[event.worker.pipeline].stages[event.worker.stage]
                contains = event.rounds if isinstance(event, Contains) else event.contains
                assert contains is not None
                if isinstance(event, Contains) and contains <= told.told:
                    continue  # the scheduler tells the policy of new ones only
                told.told = max(told.told, contains)
            for group in self.policy.on(event, self.now):
                self.next_sequence = group.sequence + 1
                for worker in group.members:
                    stage = self.at(worker)
                    if worker not in group.passive and stage is not None:
                        assert stage.ready
                        stage.ready, stage.group, stage.named_by = False, group, self.scheduler

    def check(self) -> None:
        """The models of a stage are the same rounds, of which some may lack the last ones."""
        for number in range(self.stages):
            models = sorted((start.stages[number].model for start in self.there.values()), key=len)
            for shorter, longer in pairwise(models):
                if longer[: len(shorter)] != shorter:
                    raise Violation(f"stage {number} has {shorter[-2:]} and {longer[-2:]} after {len(shorter)} rounds")
