"""The rules of a supervisor of one machine's pipelines: events in, decisions out.

A pipeline is M processes that live and die together::

    WAITING ── its time comes ──▶ RUNNING ── a process fails ──▶ ENDING ── the last one has ended ──▶ WAITING | GONE
                                     └────── all end with exit code 0 ──▶ GONE

- A process that fails takes its pipeline with it: the others of the pipeline get ``grace`` seconds to notice and end by
  themselves, then they are killed. If the scheduler goes on without a pipeline, all of its processes get ``silence``
  seconds.
- The pipeline restarts at once; if it fails again before it has trained, after twice as long each time, up to
  ``longest_delay``. Each restart takes one from the pipeline's budget.
- The run ends, and says why, when restarts are in vain: no pipeline has come to train in two starts each, fewer than
  ``min_pipelines`` are left, a script ends without having trained, or the scheduler says that the run is over, as for
  two pipelines that fail with the same exception.
- Once a pipeline has finished, the training is over: those that still train come to its end too, and one that does not
  train is not started again, since it would begin a run of its own.

All that the rules know of training comes from the scheduler (:class:`Seen`). They have no processes, clocks or sockets.
"""

from __future__ import annotations

import math
import re
import signal
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias

from lightning_sdpipe.errors import LOST_CONNECTION, counted
from lightning_sdpipe.scheduler.log.status import MembersStatus

NO_MEMBERS = MembersStatus(0, "", None, {}, "", {}, [], [], None)
FAILED = 1
INTERRUPTED = 128
"""Base of the exit code of what a signal ended; the number of the signal is added to it."""

_OF_OTHERS = re.compile(
    f"WorkerFailedError|MustEndError|RunOverError|SIGTERMException|KeyboardInterrupt|{LOST_CONNECTION}"
)
"""In the last words of a process that failed because of another one."""


@dataclass(frozen=True)
class Settings:
    """Settings of the rules: counts, and seconds."""

    num_pipelines: int
    num_stages: int
    restarts: int = 10
    """Restarts of each pipeline, and of the scheduler."""
    min_pipelines: int = 1
    grace: float = 3.0
    """Seconds in which the other processes of a failed pipeline end by themselves."""
    farewell: float = 30.0
    """Seconds in which all processes end by themselves when the run does."""
    silence: float = 10.0
    """Seconds in which a pipeline that the scheduler has given up ends by itself."""
    first_delay: float = 1.0
    longest_delay: float = 30.0


# --------------------------------------------------------------------- events


@dataclass(frozen=True)
class ProcessEnded:
    """A process of a pipeline, or that of the scheduler (None), has ended: with ``code``, or by the signal −``code``.
    ``last`` is the last line that it printed, after a failure most often that of a traceback. For the scheduler only
    this counts: it says how it has ended, or why it does not start."""

    pipeline: int | None
    stage: int
    code: int
    last: str = ""

    @property
    def follows_another(self) -> bool:
        """True if another process failed first, and this one because of it."""
        return self.code > 0 and _OF_OTHERS.search(self.last) is not None

    def __str__(self) -> str:
        if self.code == -signal.SIGKILL:
            return f"stage {self.stage} killed"
        if self.code < 0:
            return f"stage {self.stage} ended by signal {-self.code} ({signal.strsignal(-self.code)})"
        return f"stage {self.stage} ended with exit code {self.code}" + (f": {self.last}" if self.last else "")


@dataclass(frozen=True)
class Seen:
    """The scheduler's answer to a question that was asked at ``asked``: the members, and what has ended the run."""

    asked: float
    members: MembersStatus = NO_MEMBERS
    failure: str | None = None


@dataclass(frozen=True)
class SignalReceived:
    """The supervisor got this signal."""

    signal: int


Event: TypeAlias = ProcessEnded | Seen | SignalReceived

# ------------------------------------------------------------------ decisions


@dataclass(frozen=True)
class Launch:
    """Start the processes of a pipeline, or the scheduler (None) at the same address; ``again`` counts the earlier
    starts."""

    pipeline: int | None
    again: int


@dataclass(frozen=True)
class Stop:
    """Send a signal to the live processes of the pipeline."""

    pipeline: int
    signal: int


@dataclass(frozen=True)
class Say:
    """Print a line for the user."""

    line: str


Decision: TypeAlias = Launch | Stop | Say

# ---------------------------------------------------------------------- rules


class _Phase(Enum):
    WAITING = auto()
    RUNNING = auto()
    ENDING = auto()
    GONE = auto()


@dataclass
class _Pipeline:
    number: int
    phase: _Phase = _Phase.WAITING
    alive: set[int] = field(default_factory=set)
    ends: list[ProcessEnded] = field(default_factory=list)
    """Ends of the processes that have ended by themselves since the last start, in that order."""
    due: float = -math.inf
    """Time at which it is started (WAITING), killed (ENDING), or no longer asked about (RUNNING, with no process
    alive)."""
    again: int = 0
    in_vain: int = 0
    """Starts in a row in which it never trained."""
    life: int = -1
    """Incarnation in which it trained last, if it ever has."""
    trained: bool = False
    """True if it has trained since the last start."""
    lost_at: float | None = None
    told: bool = False
    """True if the reason for its loss was reported."""


class Rules:
    """The rules for one run of a machine's pipelines. ``on`` must be called often, with times that do not decrease."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pipelines = [_Pipeline(number) for number in range(settings.num_pipelines)]
        self.shown: int | None = None
        """Pipeline whose output the user sees: the leader, whose progress is that of all, or one that lives."""
        self._leader: int | None = None
        self._lives: frozenset[int] = frozenset()
        """Incarnations that trained when the scheduler last answered."""
        self._all_came = self._any_came = self._blemished = False
        self._losses = self._returns = self._scheduler_again = 0
        self._missed = 0.0
        """Seconds that pipelines were away before they came back, added up."""
        self._over_since = math.inf
        """Time at which the first pipeline had finished, and the training with it."""
        self.code: int | None = None
        """Exit code of the run, once all processes have ended."""
        self._ends_with: int | None = None
        """Exit code of the run, once its end has begun."""
        self._kill_at = math.inf
        self._out: list[Decision] = []

    @property
    def ends(self) -> bool:
        """True once the end of the run has begun."""
        return self._ends_with is not None

    def on(self, event: Event | None, now: float) -> list[Decision]:
        """Return the decisions that follow from ``event``, or only from the time, to be carried out in this order."""
        match event:
            case ProcessEnded(None) if not self.ends:
                self._scheduler_ended(event.last, now)
            case ProcessEnded(int(number)):
                self._ended(self._pipelines[number], event, now)
            case Seen() if not self.ends:
                self._seen(event, now)
            case SignalReceived() if self.ends:  # a second signal kills at once
                self._kill_at = min(self._kill_at, now)
            case SignalReceived(number):
                name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
                self._end(name, INTERRUPTED + number, now, number)
        self._let_time_pass(now)
        alive = [pipeline.number for pipeline in self._pipelines if pipeline.alive]
        self.shown = next((one for one in (self._leader, self.shown) if one in alive), min(alive, default=None))
        if not alive and all(pipeline.phase is _Phase.GONE for pipeline in self._pipelines):
            if self._returns and self.code is None:
                lost, back = counted(self._losses, "time"), counted(self._returns, "time")
                self._say(f"pipelines were lost {lost} and came back {back}, after {self._missed:.1f} s in all")
            code = 0 if self._over_since < math.inf and not self._blemished else FAILED
            self.code = code if self._ends_with is None else self._ends_with
        decided, self._out = self._out, []
        return decided

    # --------------------------------------------------------------- pipelines

    def _launch(self, pipeline: _Pipeline) -> None:
        pipeline.phase, pipeline.due = _Phase.RUNNING, math.inf
        pipeline.alive, pipeline.ends = set(range(self._settings.num_stages)), []
        pipeline.told = pipeline.trained = False
        self._out.append(Launch(pipeline.number, pipeline.again))

    def _ended(self, pipeline: _Pipeline, event: ProcessEnded, now: float) -> None:
        pipeline.alive.remove(event.stage)
        left = pipeline.trained and any(end.code == 0 for end in pipeline.ends)
        if pipeline.phase is _Phase.RUNNING or pipeline.due < math.inf:  # and has not been killed by this supervisor
            pipeline.ends.append(event)
        if pipeline.phase is _Phase.RUNNING and event.code and left:
            self._blemished = True
            self._say(f"pipeline {pipeline.number} failed after the training ({event})")
        elif pipeline.phase is _Phase.RUNNING and event.code:
            self._begin_to_end(pipeline, now, self._settings.grace)
        if pipeline.phase is _Phase.ENDING:
            self._say_why(pipeline, event)
        if pipeline.alive:
            return
        if pipeline.phase is _Phase.ENDING:
            self._lost(pipeline, now)
        elif pipeline.trained or self.ends:
            self._finished_training(pipeline, now)
        else:  # the scheduler knows whether it has trained; perhaps for too short a time to be seen
            pipeline.due = now + self._settings.silence

    def _begin_to_end(self, pipeline: _Pipeline, now: float, patience: float) -> None:
        pipeline.phase, pipeline.due = _Phase.ENDING, now + patience
        pipeline.lost_at = now if pipeline.lost_at is None else pipeline.lost_at
        pipeline.in_vain = 0 if pipeline.trained else pipeline.in_vain + 1

    def _lost(self, pipeline: _Pipeline, now: float) -> None:
        """Deal with a failed pipeline whose processes have all ended."""
        settings = self._settings
        if self.ends or self._over_since < math.inf:
            pipeline.phase = _Phase.GONE
        elif pipeline.again >= settings.restarts:
            pipeline.phase = _Phase.GONE
            self._say(f"pipeline {pipeline.number} is given up: its budget of {settings.restarts} restarts is used up")
            left = sum(other.phase is not _Phase.GONE for other in self._pipelines)
            if left < settings.min_pipelines:
                needed = f"{left} of {settings.num_pipelines} pipelines are left, and it needs {settings.min_pipelines}"
                self._end(f"{needed} (--min-pipelines)", FAILED, now)
        elif not self._any_came and all(other.in_vain > 1 for other in self._pipelines):
            self._end("no pipeline came to train in two starts each; their logs say why", FAILED, now)
        else:
            pipeline.again += 1
            doubled = min(pipeline.in_vain - 2, 30)
            delay = 0.0 if doubled < 0 else min(settings.first_delay * 2.0**doubled, settings.longest_delay)
            pipeline.phase, pipeline.due = _Phase.WAITING, now + delay

    def _finished_training(self, pipeline: _Pipeline, now: float) -> None:
        pipeline.phase, pipeline.due = _Phase.GONE, math.inf
        self._over_since = min(self._over_since, now)
        for other in self._pipelines:
            if other.phase is _Phase.WAITING and not self.ends:
                other.phase = _Phase.GONE
                self._say(f"pipeline {other.number} does not start again: the training is over")

    # ----------------------------------------------------------------- reasons

    def _say_why(self, pipeline: _Pipeline, event: ProcessEnded) -> None:
        """Report the reason at once, unless this process failed because of another one of its pipeline, whose reason
        may yet come."""
        if pipeline.told or self.ends or (pipeline.alive and (event.code == 0 or event.follows_another)):
            return
        failed = sorted((end for end in pipeline.ends if end.code), key=lambda end: end.follows_another)
        self._say_lost(pipeline, str(failed[0]))

    def _say_lost(self, pipeline: _Pipeline, reason: str) -> None:
        pipeline.told = True
        self._losses += 1
        others = sum(one.trained and one.phase is _Phase.RUNNING for one in self._pipelines)
        go_on = f"{others} of {len(self._pipelines)} go on" if self._any_came else "no pipeline trains yet"
        self._say(f"pipeline {pipeline.number} lost ({reason}); {go_on}")

    def _say(self, line: str) -> None:
        self._out.append(Say(line))

    # --------------------------------------------------------------- scheduler

    def _seen(self, event: Seen, now: float) -> None:
        members = event.members
        if failure := event.failure or members.over:
            self._end(f"the scheduler ended it: {failure}", FAILED, now)
            return
        self._leader = members.leader
        if members.lives:
            if members.resumed is not None and self._lives.isdisjoint(members.lives.values()):
                self._say(f"no pipeline was left; training continues from {members.resumed}")
            self._lives = frozenset(members.lives.values())
        gone = dict(zip(members.gone, members.reasons, strict=True))
        for pipeline in self._pipelines:
            if pipeline.phase is not _Phase.RUNNING:
                continue
            number, life = pipeline.number, members.lives.get(pipeline.number)
            never = not pipeline.trained and (pipeline.lost_at is not None or number not in members.ever)
            if not pipeline.alive:
                if number in members.ever:
                    self._finished_training(pipeline, now)
                elif event.asked >= pipeline.due - self._settings.silence:  # asked after its end
                    script = f"the script of pipeline {number} ended without training"
                    self._end(f"{script}: it has not called Trainer.fit with SDPipeStrategy", FAILED, now)
            elif life is not None and not pipeline.trained and life != pipeline.life:
                self._came(pipeline, life, members.update, now)
            elif event.asked >= self._over_since and never:
                self._say(f"pipeline {number} comes too late: the training is over")
                self._out.append(Stop(number, signal.SIGTERM))
                self._begin_to_end(pipeline, now, self._settings.farewell)
                pipeline.told = True
            elif pipeline.trained and (reason := gone.get((number, pipeline.life))) is not None:
                self._begin_to_end(pipeline, now, self._settings.silence)
                self._say_lost(pipeline, next(iter(reason.splitlines()), "no reason is known"))

    def _came(self, pipeline: _Pipeline, life: int, update: int | None, now: float) -> None:
        pipeline.life, pipeline.trained, self._any_came = life, True, True
        if pipeline.lost_at is not None:
            where = "" if update is None else f", at update {update}"
            self._say(f"pipeline {pipeline.number} is back after {now - pipeline.lost_at:.1f} s{where}")
            self._returns, self._missed = self._returns + 1, self._missed + now - pipeline.lost_at
            pipeline.lost_at = None
        if not self._all_came and all(each.trained and each.phase is _Phase.RUNNING for each in self._pipelines):
            self._all_came = True
            self._say(f"all {len(self._pipelines)} pipelines train")

    def _scheduler_ended(self, how: str, now: float) -> None:
        if self._scheduler_again >= self._settings.restarts:
            self._end(f"{how}, and its budget of {self._settings.restarts} restarts is used up", FAILED, now)
            return
        self._scheduler_again += 1
        self._say(f"{how}; it starts again")
        self._out.append(Launch(None, self._scheduler_again))

    # --------------------------------------------------------------------- end

    def _end(self, reason: str, code: int, now: float, by: int = signal.SIGTERM) -> None:
        self._ends_with, self._kill_at = code, now + self._settings.farewell
        self._say(f"the run ends: {reason}")
        for pipeline in self._pipelines:
            if pipeline.alive:
                self._out.append(Stop(pipeline.number, by))
            else:
                pipeline.phase = _Phase.GONE

    def _let_time_pass(self, now: float) -> None:
        if self.ends:
            if self._kill_at <= now:
                self._kill_at = math.inf
                self._out += [Stop(pipeline.number, signal.SIGKILL) for pipeline in self._pipelines if pipeline.alive]
            return
        for pipeline in self._pipelines:
            if pipeline.due > now:
                continue
            if pipeline.phase is _Phase.WAITING:
                self._launch(pipeline)
            elif pipeline.phase is _Phase.ENDING:
                pipeline.due = math.inf
                self._out.append(Stop(pipeline.number, signal.SIGKILL))
            elif pipeline.phase is _Phase.RUNNING:  # it has ended; whether it has trained is unknown
                self._finished_training(pipeline, now)
