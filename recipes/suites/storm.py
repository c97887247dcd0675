"""Storms: pipelines that are killed, stopped and cut off all the time, in virtual time and in real processes.

The virtual world is that of :mod:`recipes.tools.elastic_world`: the real scheduler's service, policies and clients'
cores, with emulated training. The real one consists of forked processes that sleep instead of computing. Faults come
at the rates of a published storm of 32 replicas: per replica as often as if 32 were killed every 60 s, stopped for 5
to 40 s every 240 s, and cut off for 15 to 40 s every 300 s. A killed pipeline starts again after the 10 to 20 s that
imports take. A step is *kept* when it is in a model that an exchange has made.
"""

from __future__ import annotations

import logging
import math
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import hydra

from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.meter import PHASES, MeterRow
from lightning_sdpipe.policies import Group, PolicyConfig
from lightning_sdpipe.policies.outer_rounds import OuterRounds
from lightning_sdpipe.scheduler.client.reporting import RowBuffer
from recipes.harness.pipelines import Record
from recipes.suites.elastic import Work, World
from recipes.suites.grid import Goal, Parts, Ratios, Row, ratios, run_parts
from recipes.suites.soak import here
from recipes.suites.soak.events import Events
from recipes.suites.trainings import quiet
from recipes.tools import elastic_world
from recipes.tools.elastic_world import Process

LOWER_IS_BETTER = frozenset({"back", "stood"})

PUBLISHED = 32
FAULTS = {"kill": (60.0, (0.0, 0.0)), "stop": (240.0, (5.0, 40.0)), "cut": (300.0, (15.0, 40.0))}
"""Mean seconds between two faults of a kind in a storm of ``PUBLISHED`` pipelines, and the shortest and longest time
that each lasts."""
WEATHERS: dict[str, tuple[str, ...]] = {"calm": (), "kills": ("kill",), "storm": tuple(FAULTS)}
"""Kinds of faults in each weather."""
IMPORTS = 10.0, 20.0
GLANCE = 0.25
TOGETHER = "all_reduce", "local_sgd", "diloco"


class Storm(elastic_world.World):
    """A run of ``pipelines`` of one stage by ``config``, whose batches take ``seconds``. Faults of these ``kinds``
    strike each pipeline ``times`` as often as in the published storm."""

    def __init__(
        self,
        config: PolicyConfig,
        pipelines: int,
        seconds: float,
        silence: float,
        kinds: Sequence[str],
        seed: int,
        times: float = 1.0,
    ) -> None:
        self.config, self.pipelines, self.stages = config, pipelines, 1
        self._seconds, self._silence, self._often = seconds, silence, times * pipelines / PUBLISHED
        self.kept: defaultdict[int, int] = defaultdict(int)
        """Kept steps of each pipeline."""
        self.lived, self.rounds = 0.0, dict[int, float]()
        """Seconds of all processes without those when they were stopped, and the members of each round divided by the
        pipelines that could take part in it."""
        self.over = False
        """True once no more faults come."""
        self.newest: dict[int, Process] = {}
        self.killed: dict[int, float] = {}
        self.back, self.gaps = list[float](), list[float]()
        self._named: dict[int, Group] = {}
        """Group of the next round of each start."""
        self._kept_at: dict[int, tuple[float, int]] = {}
        """Time at which each start kept its last step, and the number of steps it had made."""
        super().__init__(seed)
        faults = random.Random(seed)
        for kind in kinds:
            self.strikes(kind, faults, 60.0)
        self.counts()

    def draw(self, pairs: bool) -> None:
        self.silence, self.pace = self._silence, (0.9 * self._seconds, 1.1 * self._seconds)
        self.glance, self.starts_after = (0.4, 0.6), IMPORTS
        self.batches, self.breaks, self.overlaps, self.loss = 1 << 20, 0.0, False, 0.0
        self.terms = ElasticConfig(start_pipelines=self.pipelines, gather=30.0, settle=0.6, resume=True)

    def validate(self) -> None:
        """Check the invariants after faults only, since a check takes longer the more pipelines there are."""

    def job(self, process: Process) -> list[Process]:
        return [process]

    def wakes(self) -> None:
        if self.service is not None and self.service.deadline() <= self.now:
            self.deliver(self.service.tick(self.now))
        self.after(GLANCE, self.wakes)

    def start_job(self, pipeline: int) -> None:
        super().start_job(pipeline)
        self.newest[pipeline] = self.processes[-1]

    def joined(self, process: Process) -> None:
        self._kept_at.setdefault(process.incarnation, (self.now, process.update))
        process.iteration = process.update  # as newcomers count on, and so are in step with rounds
        super().joined(process)
        if isinstance(self.config, OuterRounds):
            process.talk.rows = RowBuffer(self.nanoseconds)
            self.stands(process)

    def nanoseconds(self) -> int:
        return round(self.now * 1e9)

    def stands(self, process: Process) -> None:
        """Be ready for a round of DiLoCo, and train on. Each ready has a number of its own."""
        process.iteration += 1
        self.is_ready(process, lambda answer: self._named.update({process.incarnation: answer.group}))

    def turn(self, process: Process) -> None:
        if not isinstance(self.config, OuterRounds):
            super().turn(process)
            return
        us = (round(self._seconds * 1e6), *(0,) * (len(PHASES) - 1))
        process.talk.rows.add(process.iteration, MeterRow(us, 0, self.nanoseconds(), follows=process.turns > 1))
        if process.update + 1 - self._kept_at[process.incarnation][1] >= (self.config.every or 0):
            process.talk.beat_soon()  # the round may be due
        group = self._named.pop(process.incarnation, None)
        if group is not None and group.source is None:
            self.exchange(process, group)
            return
        if group is not None and group.source is not None:
            source = self.newest[group.source.pipeline]
            self.contain(process, source.rounds, source.outcomes)
            self.stands(process)
        self.stepped(process)

    def strikes(self, kind: str, faults: random.Random, first: float = 0.0) -> None:
        """Let a fault of this kind come, and schedule the next one. One training pipeline is always spared, from which
        others get the state."""
        every, (shortest, longest) = FAULTS[kind]
        self.after(first + faults.expovariate(self._often / every), lambda: self.strikes(kind, faults))
        alive = [p for p in self.processes if not (p.dead or self.away(p))]
        if first or self.over or sum(p.incarnation in self._kept_at for p in alive) < 2:
            return
        victim, until = faults.choice(alive), self.now + faults.uniform(shortest, longest)
        if kind == "kill":
            self.killed[victim.worker.pipeline] = self.now
            self.die(victim, "killed")
        elif kind == "stop":
            victim.asleep_until = until
        else:
            victim.cut_off_until = until
        super().validate()

    def away(self, process: Process) -> bool:
        return max(process.asleep_until, process.cut_off_until) > self.now

    def counts(self) -> None:
        self.lived += sum(p.asleep_until <= self.now for p in self.processes if not p.dead)
        self.after(1.0, self.counts)

    def exchanged(self, process: Process, group: Group) -> None:
        """Wait for members that are stopped or cut off until they are put out."""
        members = [self.newest[worker.pipeline] for worker in group.members]
        here = {member.incarnation for member in process.talk.epoch.members}
        gone = any(p.dead or p.incarnation not in here for p in members)
        if gone:
            process.broke.add(group.sequence)
        elif process.group is group and any(map(self.away, members)) and group.sequence not in process.broke:
            self.after(GLANCE, lambda: self.exchanged(process, group))
            return
        super().exchanged(process, group)

    def exchange_ends(self, process: Process) -> None:
        if (group := process.group) is not None and (process.has_result or not self.together):
            if process.has_result and len(group.members) > 1:
                self.keep(process, group)
            if isinstance(self.config, OuterRounds):
                self.stands(process)
        super().exchange_ends(process)

    def keep(self, process: Process, group: Group) -> None:
        """Note that the steps of ``process`` are in a model that others have, too."""
        pipeline, made = process.worker.pipeline, process.update + 1
        at, before = self._kept_at[process.incarnation]
        self.kept[pipeline] += made - before
        self.gaps.append(self.now - at)
        self._kept_at[process.incarnation] = self.now, made
        if pipeline in self.killed:
            self.back.append(self.now - self.killed.pop(pipeline))
        could = sum(not (p.dead or self.away(p)) for p in self.processes)
        self.rounds.setdefault(group.sequence, len(group.members) / max(len(group.members), could))


def run(
    *, methods: Mapping[str, Any], only: Sequence[str], virtual: Mapping[str, Any], real: Mapping[str, Any], seed: int
) -> tuple[list[Row], Ratios]:
    """Run the parts that ``only`` names: ``virtual`` with the arguments of :func:`play`, and ``real`` with those of
    :func:`live`. ``methods`` are specifications for Hydra, by name."""
    both = {"virtual": {**virtual, "methods": methods}, "real": {**real, "methods": methods}}
    return run_parts("storm", PARTS, only=only, seed=seed, **both)


def play(
    *,
    methods: Mapping[str, Any],
    sizes: Sequence[tuple[int, float, float]],
    batch_seconds: float,
    worker_timeout: float,
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Play storms of all faults, of kills alone, and calm runs, in virtual time.

    Args:
        methods: specifications for Hydra, by name.
        sizes: numbers of pipelines, each with the virtual hours of a run, and how many times as often as in the
            published storm each pipeline is struck.
        batch_seconds: length of a mini-batch.
        worker_timeout: seconds of silence after which the scheduler calls a worker lost.
        seed: seed of everything.
    """
    logging.getLogger("lightning_sdpipe").setLevel(logging.ERROR)
    rows: list[Row] = []
    for pipelines, hours, times in sizes:
        for name, specification in methods.items():
            calm = 0.0
            for weather, kinds in WEATHERS.items():
                method = hydra.utils.instantiate(specification)
                config = getattr(method, "elastic_policy", method)
                storm = Storm(config, pipelines, batch_seconds, worker_timeout, kinds, seed, times)
                storm.run(3600 * hours)
                rate = sum(storm.kept.values()) / storm.lived
                calm = calm or rate
                row = {"method": name, "pipelines": pipelines, "weather": weather, "hours": hours, "one": 1}
                row |= {"members": statistics.fmean(storm.rounds.values()), "kept": rate / calm, "deaths": storm.kills}
                row |= {"back": statistics.median(storm.back or [0.0]), "stood": max(storm.gaps)}
                storm.over = True
                storm.check_that_all_train(60.0)
                rows.append(row)
                print(row, flush=True)
    return rows, ratios_of(rows)


def live(
    *,
    methods: Mapping[str, Any],
    compared: Sequence[str],
    minutes: Mapping[str, float],
    work: Mapping[str, Any],
    worker_timeout: float,
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Train in real processes, without faults and in a storm, until all batches are kept.

    Args:
        methods: specifications for Hydra, by name.
        compared: ``all_reduce``, ``diloco``.
        minutes: by weather, the time that the batches take without faults.
        work: options of :class:`~recipes.suites.elastic.Work`.
        worker_timeout: seconds of silence after which the scheduler calls a worker lost.
        seed: seed of the faults.

    Where network namespaces cannot be made, no pipeline is cut off.
    """
    quiet()
    rows: list[Row] = []
    for name in compared:
        calm = 0.0
        for weather, lasting in minutes.items():
            batches = round(60 * lasting / work["batch_seconds"]) * work["num_pipelines"]
            training = Work(num_stages=1, sync=hydra.utils.instantiate(methods[name]), batches=batches, **work)
            often = {kind: training.num_pipelines / PUBLISHED / FAULTS[kind][0] for kind in WEATHERS[weather]}
            most, mean = (1 << 30, 1 / sum(often.values())) if often else (0, 1.0)
            lasts = {kind: FAULTS[kind][1] for kind in often}
            with (
                here(training.num_pipelines) as place,
                tempfile.TemporaryDirectory(prefix="storm-") as directory,
                World(Path(directory), training, worker_timeout=worker_timeout, hosts=place.hosts) as world,
            ):
                left_out, draws = frozenset(place.left_out), random.Random(seed)
                done = Events(world, draws, most, mean, left_out, {}, often, lasts, IMPORTS, ())
                found = _rounds(done.until_the_end(), world.records())
            calm = calm or batches / found["lived"]
            row = {"method": name, "pipelines": training.num_pipelines, "weather": f"{weather}/real", "one": 1}
            row |= {"kept": batches / found["lived"] / calm, "faults": dict(done.what), "left_out": done.left_out}
            rows.append(row | found | {"minutes": lasting})
            print(rows[-1], flush=True)
    return rows, ratios_of(rows)


def _rounds(done: Events, records: Sequence[Record]) -> Row:
    """Return the figures of :func:`play` about rounds, and the seconds that pipelines ran without being stopped, from
    the first update on."""
    assert not done.ended, done.ended
    kind = "round" if any(record.said("round") for record in records) else "update"  # all-reduce: each update is one
    made, rounds, gaps = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list), list[float]()
    for record in records:
        own = [line for line in record.said(kind) if line[kind] is not None]  # None where the base was handed over
        for line in own:
            rounds[line[kind]].append(line["at"])
            made[record.pipeline].append(line["at"])
        gaps += [after["at"] - before["at"] for before, after in pairwise(own)]
    back = [min([at for at in made[i] if at > killed], default=math.inf) - killed for i, killed in done.kills]
    first, end = (pick(at for r in records for at in r.times("update")) for pick in (min, max))
    able = [(first, *done.able[0][1:]), *done.able, (end, 0, 0)]
    lived = sum(count * max(0.0, after - at) for (at, count, _), (after, *_) in pairwise(able))
    could = [next(count for at, _, count in reversed(able) if at <= min(times)) for times in rounds.values()]
    shares = [len(times) / max(len(times), most) for times, most in zip(rounds.values(), could, strict=True)]
    row = {"members": statistics.fmean(shares), "rounds": len(shares), "deaths": len(back), "lived": lived}
    return row | {"back": statistics.median(back or [0.0]), "stood": max(gaps, default=0.0)}


PARTS: Parts = {"virtual": play, "real": live}


def ratios_of(rows: Sequence[Row]) -> Ratios:
    """Return the ratios of each method and size; no rows give none."""
    goals: dict[str, Goal] = {}
    for row in [row for row in rows if not row["weather"].startswith("calm")]:
        name, weather, size = row["method"], row["weather"], row["pipelines"]
        of, key = {"method": name, "weather": weather, "pipelines": size}, f"{name}/{size}/{weather}"
        if name in TOGETHER:
            meaning = "members of a round over those that live and are not stopped or cut off; published: 0.5"
            goals[f"members/{key}"] = Goal(meaning, "members", of, "one", 0.95)
        meaning = "kept steps of a second that a process lives and is not stopped, over those without faults"
        goals[f"kept/{key}"] = Goal(meaning, "kept", of, "one", 0.97 if weather.startswith("kills") else 0.90)
        meaning = "seconds from a kill to its first kept step, median, of which imports take 10 to 20; published: 149"
        goals[f"back/{key}"] = Goal(meaning, "back", of, "one")
        goals[f"stood/{key}"] = Goal("longest seconds between two rounds of one that lives", "stood", of, "one")
    return ratios(rows, goals)
