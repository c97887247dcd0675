"""The rules of a supervisor of one machine's pipelines: events in, decisions out.

A pipeline is M processes that live and die together::

    WAITING ── its time comes ──▶ RUNNING ── a process fails ──▶ ENDING ── the last one has ended ──▶ WAITING | GIVEN_UP
                                     └────── all end with exit code 0 ──▶ FINISHED

- A process that fails takes its pipeline with it: the others of the pipeline get ``grace`` seconds to notice and report
  what they know, then they are killed. So the pipeline's own reason is reported, and not that of a pipeline that waited
  for it.
- The pipeline restarts at once; if it fails again before it has trained, after twice as long each time, up to
  ``longest_delay``. Each restart takes one from the pipeline's budget.
- The run ends by name when restarts are in vain: before any pipeline trains, two raise the same exception (a bug of the
  script would kill one after another; later, the scheduler finds it), fewer than ``min_pipelines`` are left, a script
  ends without having trained, or the scheduler says that the run is over.
- Once a pipeline has finished, the training is over: those that still train come to its end too, and one that does not
  train is not started again, since it would begin a run of its own.

All that the rules know of training comes from the scheduler (:class:`Seen`). They have no processes, clocks or sockets.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable

from lightning_sdpipe.supervision import events
from lightning_sdpipe.supervision.script import UncaughtException
from lightning_sdpipe.supervision.state import GONE, PipelinePhase, PipelineState, Settings

FAILED = 1


class Rules:
    """The rules for one run of a machine's pipelines. ``on`` must be called with times that do not decrease, and at
    ``deadline``."""

    def __init__(self, settings: Settings, stage_of: Callable[[int], int]) -> None:
        """Store the settings; ``stage_of`` returns the stage of a rank."""
        self._settings = settings
        self._stage_of = stage_of
        self._pipelines = [PipelineState(number) for number in range(settings.num_pipelines)]
        self._raised: list[tuple[int, UncaughtException]] = []
        self._shown: int | None = None
        self._leader: int | None = None
        self._lives: frozenset[str] = frozenset()
        """Lives that trained when the scheduler last answered."""
        self._scheduler_again = 0
        self._all_came = self._any_came = self._blemished = False
        self._over_since = math.inf
        """Time at which the first pipeline had finished, and the training with it."""
        self._ends_with: int | None = None
        """Exit code of the run, once its end has begun."""
        self._kill_at = math.inf
        self._finished = False
        self._out: list[events.Decision] = []

    def on(self, event: events.Event, now: float) -> list[events.Decision]:
        """Return the decisions that follow from ``event``, to be carried out in this order."""
        match event:
            case events.Begin():
                for pipeline in self._pipelines:
                    self._launch(pipeline)
            case events.ProcessEnded():
                self._ended(event, now)
            case events.Raising():
                self._raising(event, now)
            case events.Seen():
                self._seen(event, now)
            case events.SchedulerEnded():
                self._scheduler_ended(event)
            case events.SignalReceived():
                self._told(event, now)
            case events.TimePassed():
                pass
        self._let_time_pass(now)
        self._choose_whom_to_show()
        self._finish_if_over()
        decided, self._out = self._out, []
        return decided

    def deadline(self) -> float:
        """Time at which the passing of time changes something; infinite if never."""
        if self._finished or self._ends_with is not None:
            return math.inf if self._finished else self._kill_at
        waits = [pipeline.due for pipeline in self._pipelines if pipeline.phase not in GONE]
        waits += [p.silent_since + self._settings.silence for p in self._pipelines if p.silent_since is not None]
        return min(waits, default=math.inf)

    @property
    def asks(self) -> bool:
        """True if it matters what the scheduler knows."""
        return self._ends_with is None and not self._finished

    # --------------------------------------------------------------- pipelines

    def _launch(self, pipeline: PipelineState) -> None:
        pipeline.phase, pipeline.due = PipelinePhase.RUNNING, math.inf
        pipeline.alive, pipeline.ends = set(range(self._settings.num_stages)), []
        pipeline.told = pipeline.pressed = pipeline.trained = False
        self._out.append(events.Launch(pipeline.number, pipeline.again))

    def _ended(self, event: events.ProcessEnded, now: float) -> None:
        pipeline = self._pipelines[event.pipeline]
        if event.rank not in pipeline.alive:
            raise ValueError(f"{event} of a process that does not run")
        pipeline.alive.discard(event.rank)
        pipeline.ended_at = now
        if not pipeline.pressed:
            pipeline.ends = [end for end in pipeline.ends if end.rank != event.rank] + [event]
        if event.code and pipeline.phase is PipelinePhase.RUNNING:
            if pipeline.left_the_script:
                self._blemished = True
                self._out.append(
                    events.Say(f"pipeline {pipeline.number} failed after the training ({self._describe(event)})")
                )
            else:
                pipeline.begin_to_end(now, self._settings.grace)
        if pipeline.phase is PipelinePhase.ENDING:
            self._say_why(pipeline, event)
        if pipeline.alive:
            return
        if pipeline.phase is PipelinePhase.ENDING:
            self._lost(pipeline, now)
        elif pipeline.trained or self._ends_with is not None:
            self._finished_training(pipeline, now)
        else:  # the scheduler knows whether it has trained; perhaps for too short a time to be seen
            pipeline.due = now + self._settings.silence

    def _raising(self, event: events.Raising, now: float) -> None:
        """Note an exception in a process that will end, perhaps not soon. If another process failed first, that one's
        own report is better."""
        pipeline = self._pipelines[event.pipeline]
        if (
            event.raised.follows_another
            or pipeline.phase is not PipelinePhase.RUNNING
            or pipeline.left_the_script
            or self._ends_with is not None
        ):
            return
        end = events.ProcessEnded(event.pipeline, event.rank, FAILED, event.raised)
        pipeline.ends.append(end)
        pipeline.begin_to_end(now, self._settings.grace)
        self._say_why(pipeline, end)

    def _lost(self, pipeline: PipelineState, now: float) -> None:
        """Deal with a pipeline all of whose processes have ended, and not as they should."""
        if self._ends_with is not None or self._over_since < math.inf:
            pipeline.phase = PipelinePhase.GIVEN_UP
            return
        if self._is_a_bug(pipeline):
            return
        if pipeline.again >= self._settings.restarts:
            pipeline.phase = PipelinePhase.GIVEN_UP
            budget = f"its budget of {self._settings.restarts} restarts is used up"
            self._out.append(events.Say(f"pipeline {pipeline.number} is given up: {budget}"))
            self._end_if_too_few()
            return
        pipeline.again += 1
        delay = 0.0
        if pipeline.in_vain > 1:
            delay = min(self._settings.first_delay * 2.0 ** min(pipeline.in_vain - 2, 30), self._settings.longest_delay)
        pipeline.phase, pipeline.due = PipelinePhase.WAITING, now + delay

    def _finished_training(self, pipeline: PipelineState, now: float) -> None:
        pipeline.phase, pipeline.due = PipelinePhase.FINISHED, math.inf
        self._over_since = min(self._over_since, now)
        for other in self._pipelines:
            if other.phase is PipelinePhase.WAITING and self._ends_with is None:
                other.phase = PipelinePhase.GIVEN_UP
                self._out.append(events.Say(f"pipeline {other.number} does not start again: the training is over"))

    def _turn_away(self, pipeline: PipelineState, now: float) -> None:
        """End a pipeline that does not train yet while the others have finished."""
        pipeline.phase, pipeline.due, pipeline.told = PipelinePhase.ENDING, now + self._settings.farewell, True
        late = f"pipeline {pipeline.number} comes too late: the training is over"
        self._out += [events.Say(late), events.Stop(pipeline.number, signal.SIGTERM)]

    # ----------------------------------------------------------------- reasons

    def _say_why(self, pipeline: PipelineState, event: events.ProcessEnded) -> None:
        """Report the reason at once, unless this process failed because of another one of its pipeline, whose reason
        may yet come."""
        follows = event.code == 0 or (event.raised is not None and event.raised.follows_another)
        if pipeline.told or self._ends_with is not None or (follows and pipeline.alive):
            return
        pipeline.told = True
        reason = self._describe(pipeline.reason)
        self._out.append(events.Say(f"pipeline {pipeline.number} lost ({reason}); {self._who_goes_on()}"))

    def _who_goes_on(self) -> str:
        if not self._any_came:
            return "no pipeline trains yet"
        others = sum(pipeline.trains for pipeline in self._pipelines)
        return f"{others} of {self._settings.num_pipelines} go on"

    def _describe(self, end: events.ProcessEnded) -> str:
        return f"stage {self._stage_of(end.rank)}{events.how(end)}"

    # --------------------------------------------------------------- scheduler

    def _seen(self, event: events.Seen, now: float) -> None:
        if self._ends_with is not None:
            return
        if event.failure is not None:
            self._end(f"the scheduler ended it: {event.failure}", FAILED)
            return
        self._leader = event.leader
        if event.lives:
            if event.resumed is not None and self._lives.isdisjoint(event.lives.values()):
                self._out.append(events.Say(f"no pipeline was left; training goes on from {event.resumed}"))
            self._lives = frozenset(event.lives.values())
        for pipeline in self._pipelines:
            if pipeline.phase is not PipelinePhase.RUNNING:
                continue
            life = event.lives.get(pipeline.number)
            if not pipeline.alive:
                self._judge_the_finished(pipeline, event, now)
            elif life is not None and pipeline.life is None and life != pipeline.last_life:
                self._came(pipeline, life, event, now)
            elif event.asked >= self._over_since and pipeline.comes_too_late(event.ever):
                self._turn_away(pipeline, now)
            elif pipeline.life is not None and (reason := event.gone.get(pipeline.life)) is not None:
                self._is_given_up(pipeline, reason, now)

    def _came(self, pipeline: PipelineState, life: str, event: events.Seen, now: float) -> None:
        pipeline.life, pipeline.trained, self._any_came = life, True, True
        if pipeline.lost_at is not None:
            where = "" if event.update is None else f", at update {event.update}"
            self._out.append(
                events.Say(f"pipeline {pipeline.number} is back after {now - pipeline.lost_at:.1f} s{where}")
            )
            pipeline.lost_at = None
        if not self._all_came and all(other.life is not None for other in self._pipelines):
            self._all_came = True
            self._out.append(events.Say(f"all {self._settings.num_pipelines} pipelines train"))

    def _is_given_up(self, pipeline: PipelineState, reason: str, now: float) -> None:
        """Note that the scheduler goes on without the pipeline. Its processes are told so, perhaps when they wake, and
        have to end."""
        if not pipeline.doubted:  # a process may have ended in this moment, which is the better reason
            pipeline.doubted = True
            return
        reason = next(iter(reason.splitlines()), "no reason is known")
        pipeline.stops_training()
        pipeline.silent_since = pipeline.lost_at = now
        pipeline.told = True
        self._out.append(events.Say(f"pipeline {pipeline.number} lost ({reason}); {self._who_goes_on()}"))

    def _judge_the_finished(self, pipeline: PipelineState, event: events.Seen, now: float) -> None:
        if pipeline.number in event.ever:
            self._finished_training(pipeline, now)
        elif event.asked >= pipeline.ended_at:
            self._end(
                f"the script of pipeline {pipeline.number} ended without training: it has not called Trainer.fit with "
                "SDPipeStrategy",
                FAILED,
            )

    def _scheduler_ended(self, event: events.SchedulerEnded) -> None:
        if self._ends_with is not None or self._finished:
            return
        ended = "killed" if event.code == -signal.SIGKILL else f"exit code {event.code}"
        if self._scheduler_again >= self._settings.restarts:
            budget = f"its budget of {self._settings.restarts} restarts is used up"
            self._end(f"the scheduler ended ({ended}), and {budget}", FAILED)
            return
        self._scheduler_again += 1
        self._out += [events.Say(f"the scheduler ended ({ended}); it starts again"), events.LaunchScheduler()]

    # --------------------------------------------------------------------- end

    def _is_a_bug(self, pipeline: PipelineState) -> bool:
        """End the run and return True if another pipeline has failed with the same exception. The scheduler judges
        those that have trained."""
        raised = pipeline.reason.raised
        killed = any(end.code < 0 for end in pipeline.ends)
        # another pipeline trains on
        joins = any(other.trained and other.phase is PipelinePhase.RUNNING for other in self._pipelines)
        if raised is None or not raised.may_be_a_bug or killed or joins or pipeline.trained:
            return False
        for other, known in self._raised:
            if other != pipeline.number and known.is_like(raised):
                place = f" ({raised.place})" if raised.place else ""
                first, second = sorted((other, pipeline.number))
                self._end(
                    f"pipelines {first} and {second} failed with the same exception, which starting again "
                    f"does not mend: {raised}{place}",
                    FAILED,
                )
                return True
        self._raised.append((pipeline.number, raised))
        return False

    def _end_if_too_few(self) -> None:
        left = [pipeline for pipeline in self._pipelines if pipeline.phase not in GONE]
        least = self._settings.min_pipelines
        if len(left) < least:
            needed = f"{len(left)} of {self._settings.num_pipelines} pipelines are left, and it needs {least}"
            self._end(f"{needed} (--min-pipelines)", FAILED)

    def _told(self, event: events.SignalReceived, now: float) -> None:
        if self._ends_with is not None and self._kill_at > now:
            self._kill_at = now  # a second signal kills at once
            return
        name = "Ctrl-C" if event.signal == signal.SIGINT else events.signal_name(event.signal)
        self._end(name, events.INTERRUPTED + event.signal, event.signal)

    def _end(self, reason: str, code: int, by: int = signal.SIGTERM) -> None:
        if self._ends_with is not None:
            return
        self._ends_with, self._kill_at = code, -math.inf  # the time is set when time passes
        self._out.append(events.Say(f"the run ends: {reason}"))
        for pipeline in self._pipelines:
            if pipeline.alive:
                self._out.append(events.Stop(pipeline.number, by))
                pipeline.due, pipeline.silent_since = math.inf, None
            elif pipeline.phase not in GONE:
                pipeline.phase = PipelinePhase.GIVEN_UP

    def _let_time_pass(self, now: float) -> None:
        if self._ends_with is not None:
            self._press(now)
            return
        for pipeline in self._pipelines:
            silent = pipeline.silent_since is not None and pipeline.silent_since + self._settings.silence <= now
            if silent and pipeline.phase is PipelinePhase.RUNNING:
                pipeline.silent_since = None
                self._out += [
                    events.Say(
                        f"pipeline {pipeline.number} is killed: {self._settings.silence:g} s later it has not ended"
                    ),
                    events.Stop(pipeline.number, signal.SIGKILL),
                ]
            if pipeline.due > now:
                continue
            if pipeline.phase is PipelinePhase.WAITING:
                self._launch(pipeline)
            elif pipeline.phase is PipelinePhase.ENDING:
                pipeline.due, pipeline.pressed = math.inf, True
                self._out.append(events.Stop(pipeline.number, signal.SIGKILL))
            elif pipeline.phase is PipelinePhase.RUNNING:  # it has ended; whether it has trained is unknown
                self._finished_training(pipeline, now)

    def _press(self, now: float) -> None:
        if self._kill_at == -math.inf:
            self._kill_at = now + self._settings.farewell
        elif self._kill_at <= now:
            self._kill_at = math.inf
            self._out += [
                events.Stop(pipeline.number, signal.SIGKILL) for pipeline in self._pipelines if pipeline.alive
            ]

    def _finish_if_over(self) -> None:
        if self._finished or any(pipeline.alive or pipeline.phase not in GONE for pipeline in self._pipelines):
            return
        self._finished = True
        if self._ends_with is None:
            succeeded = any(pipeline.phase is PipelinePhase.FINISHED for pipeline in self._pipelines)
            self._ends_with = 0 if succeeded and not self._blemished else FAILED
        self._out.append(events.Finish(self._ends_with))

    # ---------------------------------------------------------------- terminal

    def _choose_whom_to_show(self) -> None:
        """Show the leader, whose progress is that of all; until it is known, the first pipeline that lives."""
        alive = [pipeline.number for pipeline in self._pipelines if pipeline.alive]
        chosen = next((one for one in (self._leader, self._shown) if one in alive), min(alive, default=None))
        if chosen is not None and chosen != self._shown:
            self._shown = chosen
            self._out.append(events.Show(chosen))
