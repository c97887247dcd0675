"""The events of a soak run, at drawn times, and its recovery from them."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from recipes.harness import namespaces, small_disks
from recipes.suites.elastic import PHASES, Fault, World

SILENCE = 2.0
"""The run's limit of silence."""
STILL = 90.0  # seconds without an update of any pipeline after which a run counts as hung
INSIDE = [phase for phase in PHASES if phase not in ("pause", "validation")]
CUTS, FULL = ("cut", "scheduler_cut"), ("full_checkpoints", "full_logs")
WEIGHTS = {
    **{"kill": 24, "term": 6, "silent": 6, "stop": 12, "cut": 12, "scheduler": 6, "scheduler_cut": 8, "two": 8},
    **{"leader_and_scheduler": 6, "full_checkpoints": 6, "full_logs": 8, "all": 3},
}
LASTS = dict.fromkeys(WEIGHTS, (0.2, 3 * SILENCE))
"""Shortest and longest seconds of each kind of event that lasts."""
VICTIMS = {"kill": 1, "term": 1, "silent": 1, "stop": 1, "cut": 1, "leader_and_scheduler": 1, "two": 2}


class Events:
    """Kills and stops processes, cuts connections and fills disks at drawn times while the run goes on, and undoes it
    after a while.

    Except in the event ``all``, one member is always left alone, since otherwise nothing would have the model.

    Args:
        world: a world that has not been started.
        draws: random generator for kinds, times and victims.
        count: most events.
        calm: mean seconds between two events.
        left_out: kinds that cannot be made here.
        disks: disks that may be filled, by the kind of event.
        weights: weights of the kinds.
        lasts: shortest and longest seconds of each kind.
        away: shortest and longest seconds from the end of a pipeline to its next start.
        inside: phases in one of which every fourth process that is started again kills itself.
        regular: whether events come every ``calm`` seconds, and a dead pipeline is restarted at once without a fault.
    """

    def __init__(
        self,
        world: World,
        draws: random.Random,
        count: int,
        calm: float,
        left_out: frozenset[str],
        disks: Mapping[str, Path],
        weights: Mapping[str, float] = WEIGHTS,
        lasts: Mapping[str, tuple[float, float]] = LASTS,
        away: tuple[float, float] = (0.0, 1.0),
        inside: Sequence[str] = INSIDE,
        regular: bool = False,
    ) -> None:
        self.what: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.bystanders = 0
        """Number of starts of pipelines that failed though they were not hit."""
        self.told: list[str] = []
        """Lines with times, to explain a failed run."""
        self.finished: set[int] = set()
        self.able: list[tuple[float, int, int]] = []
        """Times, and since then how many running pipelines are not stopped, and how many of those not cut off."""
        self.kills: list[tuple[int, float]] = []
        """Each pipeline that was killed, and when."""
        self.ended = ""
        """Why the run ended early, if it had to."""
        self._world, self._draws, self._most, self._calm = world, draws, count, calm
        self._left_out, self._disks, self._weights, self._regular = left_out, disks, weights, regular
        self._lasts, self._away, self._inside = lasts, away, inside
        self._everybody = range(world.work.num_pipelines)
        self._due: dict[int, float] = {}
        """When each dead pipeline is restarted."""
        self._impaired: list[tuple[float, str, Callable[[], None]]] = []
        """What is stopped, cut off or full, until when, and a function that undoes it."""
        self._doomed: set[int] = set()
        """Pipelines whose newest start was killed, or told to end, but may not have ended yet."""
        self._fallen: set[int] = set()
        """Pipelines of which an earlier start has killed itself by a drawn fault."""
        self._hit: set[int] = set()
        """Pipelines whose newest start was hit by an event."""
        self._made, self._made_at, self._asks_at = -1, time.monotonic(), 0.0

    @property
    def count(self) -> int:
        """Events so far."""
        return self.what.total()

    def until_the_end(self) -> Events:
        """Return when all live pipelines have finished, or the run has ended because all were lost.

        Raises:
            TimeoutError: the run makes no progress, or has ended for another reason.
        """
        world = self._world
        world.launch_all()
        world.wait(lambda: all(map(world.updates, self._everybody)), "an update of all", 300.0)
        next_event = self._next(time.monotonic())
        try:
            while not (self._is_over() or self.ended):
                time.sleep(0.02)
                self._look_for_a_hang()
                self._bury_and_start()
                self._undo(time.monotonic())
                self._count_the_able()
                if time.monotonic() >= next_event and self.count < self._most:
                    next_event = self._next(next_event if self._regular else time.monotonic())
                    self._strike()
        finally:
            self._undo(float("inf"))
        return self

    def _next(self, after: float) -> float:
        return after + (self._calm if self._regular else self._draws.expovariate(1 / self._calm))

    # ------------------------------------------------------- what has happened

    def _is_over(self) -> bool:
        """Return whether a pipeline has finished and no other is alive."""
        ended = {i for i in self._everybody if i not in self._due and None not in self._world.exit_codes(i)}
        self.finished = {i for i in ended if not any(self._world.exit_codes(i))}
        return bool(self.finished) and all(i in ended or i in self._due for i in self._everybody)

    def _lives(self, pipeline: int, rank: int) -> bool:
        return self._world.exit_codes(pipeline)[rank:][:1] == [None]

    def _count_the_able(self) -> None:
        running = [i for i in self._everybody if self._lives(i, 0) and not self._is_impaired(f"process {i}")]
        able = len(running), sum(not self._is_impaired(f"cable {i}") for i in running)
        if not self.able or self.able[-1][1:] != able:
            self.able.append((time.monotonic(), *able))

    def _look_for_a_hang(self) -> None:
        now, made = time.monotonic(), sum(path.stat().st_size for path in self._world.directory.glob("*.diary"))
        if made != self._made:
            self._made, self._made_at = made, now
        if now >= self._asks_at:
            self._asks_at = now + 5.0
            if (over := self._world.failure()) is not None:
                own_hand = {i for i in self._everybody if i in self._fallen or self._fell(i)}
                innocent = [i for i in self._everybody if i not in self._hit | own_hand and self._world.updates(i)]
                if "all pipelines are lost" not in over or innocent or not (self.what["all"] or own_hand):
                    raise TimeoutError(f"the run was ended; pipelines {innocent} were not even hit: {over}")
                self.ended = over
                self._tell(f"the run has ended: {over}")
        if now - self._made_at > STILL:
            raise TimeoutError(f"there was no update for {STILL:g} s; {self._world.said()}")

    def _fell(self, pipeline: int) -> bool:
        """Return whether the pipeline's newest start killed itself by a drawn fault."""
        newest = self._world.records(pipeline)[-self._world.num_stages :]
        return any(record.said("strikes") for record in newest)

    def _bury_and_start(self) -> None:
        now, world = time.monotonic(), self._world
        for pipeline in self._everybody:
            if pipeline in self._due:
                if now >= self._due[pipeline] and not self.finished:
                    del self._due[pipeline]
                    self._doomed.discard(pipeline)
                    (self._hit.add if self._is_impaired(f"cable {pipeline}") else self._hit.discard)(pipeline)
                    self._tell(f"starts pipeline {pipeline}")
                    world.launch(pipeline, self._perhaps_a_fault())
            elif any(world.exit_codes(pipeline)):  # a process of it has failed or was killed; kill the rest
                if self._fell(pipeline):
                    self._fallen.add(pipeline)
                elif pipeline not in self._hit and world.updates(pipeline):
                    self.bystanders += 1
                    self._tell(f"pipeline {pipeline} failed, and was not hit")
                world.end(pipeline)
                self._due[pipeline] = now + (0.0 if self._regular else self._draws.uniform(*self._away))

    def _is_whole(self, pipeline: int) -> bool:
        """Return whether the pipeline trains and nothing is wrong with it now, even if a scheduler that is cut off
        cannot know."""
        if pipeline in self._doomed or pipeline in self._due or self._is_impaired(f"cable {pipeline}"):
            return False
        trains = self._world.lives(pipeline) and self._world.updates(pipeline) > 0
        return trains and not self._is_impaired(f"process {pipeline}")

    # ------------------------------------------------------------ what happens

    def _perhaps_a_fault(self) -> Fault | None:
        if self._regular or not self._inside or self.count >= self._most or self._draws.random() > 0.25:
            return None
        phase = self._draws.choice(self._inside)
        fault = Fault(phase, self._draws.randrange(2 * self._world.work.batches // len(self._everybody)))
        self._happens(phase, f"to come: {fault}")
        return fault

    def _strike(self) -> None:
        world, draws = self._world, self._draws
        kind = draws.choices(list(self._weights), list(self._weights.values()))[0]
        seconds, rank = draws.uniform(*self._lasts[kind]), draws.randrange(world.work.num_stages)
        if kind in self._left_out:
            self.left_out[kind] += 1
            return
        members = world.status().members
        whole = sorted(i for i in (members.lives if members else {}) if self._is_whole(i))
        if kind in VICTIMS and len(whole) <= VICTIMS[kind]:
            return
        victims = draws.sample(whole, VICTIMS.get(kind, 0))
        if kind == "leader_and_scheduler" and members is not None and members.leader in whole:
            victims = [members.leader]
        elif kind == "all":
            victims = [i for i in self._everybody if i not in self._due]
        self._hit.update(victims)
        if kind not in ("stop", "cut"):
            self._doomed.update(victims)
        match kind:
            case "stop" | "silent":
                self._stop(victims[0], rank, seconds, wakes=kind == "stop")
            case "cut" | "scheduler_cut":
                self._cut(victims[0] if victims else len(self._everybody), seconds)
            case "full_checkpoints" | "full_logs":
                small_disks.fill(self._disks[kind])
                self._until(seconds, kind, lambda: small_disks.empty(self._disks[kind]))
            case _:
                for victim in victims:
                    if kind != "all" or self._lives(victim, rank):
                        at = world.kill(victim, rank, signal.SIGTERM if kind == "term" else signal.SIGKILL)
                        self.kills.append((victim, at))
        if kind in ("scheduler", "leader_and_scheduler") or (kind == "full_logs" and seconds > SILENCE):
            world.restart_scheduler()
        self._happens(kind, f"pipelines {victims}, rank {rank}, {seconds:.1f} s")

    def _stop(self, pipeline: int, rank: int, seconds: float, wakes: bool) -> None:
        world, start = self._world, self._world.newest[pipeline]
        world.kill(pipeline, rank, signal.SIGSTOP)

        def goes_on() -> None:
            if world.newest[pipeline] == start and self._lives(pipeline, rank):
                world.kill(pipeline, rank, signal.SIGCONT if wakes else signal.SIGKILL)
                if wakes and seconds < SILENCE / 2:
                    self._hit.discard(pipeline)  # such a short stop must do no harm

        self._until(seconds, f"process {pipeline}", goes_on)

    def _cut(self, number: int, seconds: float) -> None:
        namespaces.plug(number, False)

        def heals() -> None:
            namespaces.plug(number, True)
            if seconds < SILENCE / 2:
                self._hit.discard(number)

        self._until(seconds, f"cable {number}", heals)

    def _until(self, seconds: float, what: str, undo: Callable[[], None]) -> None:
        self._impaired.append((time.monotonic() + seconds, what, undo))

    def _is_impaired(self, what: str) -> bool:
        return any(what == each for _, each, _ in self._impaired)

    def _undo(self, now: float) -> None:
        for each in [each for each in self._impaired if each[0] <= now]:
            self._impaired.remove(each)
            if not self._is_impaired(each[1]):  # of several that overlap, only the last undoes it
                self._tell(f"{each[1]} is as before")
                each[2]()

    def _happens(self, kind: str, more: str) -> None:
        self.what[kind] += 1
        self._tell(f"{kind} {more}")

    def _tell(self, what: str) -> None:
        self.told.append(f"{time.strftime('%H:%M:%S')} {time.monotonic():.3f} {what}")
