"""A supervisor's state of each of its pipelines, and the settings by which it judges them."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from lightning_sdpipe.supervision.events import ProcessEnded


class PipelinePhase(Enum):
    """Phases of a pipeline; :mod:`~lightning_sdpipe.supervision.rules` says how it enters each."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    FINISHED = "finished"
    GIVEN_UP = "given up"


GONE = (PipelinePhase.FINISHED, PipelinePhase.GIVEN_UP)


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


@dataclass
class PipelineState:
    """State of one pipeline."""

    number: int
    phase: PipelinePhase = PipelinePhase.WAITING
    alive: set[int] = field(default_factory=set)
    ends: list[ProcessEnded] = field(default_factory=list)
    """Ends of the processes that have ended by themselves since the last start, in that order."""
    ended_at: float = 0.0
    """Time at which the last process ended."""
    due: float = math.inf
    """Time at which it is started (WAITING), killed (ENDING), or no longer asked about (RUNNING, with no process
    alive)."""
    again: int = 0
    in_vain: int = 0
    """Starts in a row after which it never trained."""
    life: str | None = None
    """Life in which it trains now, as the scheduler names it."""
    last_life: str | None = None
    trained: bool = False
    """True if it has trained since the last start."""
    lost_at: float | None = None
    told: bool = False
    """True if the reason of its loss was reported."""
    pressed: bool = False
    """True if the supervisor has killed its processes, so that these ends explain nothing."""
    doubted: bool = False
    """True if the scheduler has given up its life although its processes live."""
    silent_since: float | None = None

    @property
    def trains(self) -> bool:
        """True if it goes on when another pipeline is lost."""
        return self.phase is PipelinePhase.RUNNING and bool(self.alive) and self.life is not None

    @property
    def left_the_script(self) -> bool:
        """True if a stage of it has come to the end of the script after training."""
        return self.trained and any(end.code == 0 for end in self.ends)

    @property
    def reason(self) -> ProcessEnded:
        """The end that explains the others: a killed process, or an exception of its own, or the first."""
        failed = [end for end in self.ends if end.code]
        own = [end for end in failed if end.code < 0 or end.raised is None or not end.raised.follows_another]
        return (own or failed)[0]

    def comes_too_late(self, ever: Collection[int]) -> bool:
        """Return whether the others have finished before it trains; ``ever`` are those that have trained."""
        return not self.trained and (self.lost_at is not None or self.number not in ever)

    def begin_to_end(self, now: float, grace: float) -> None:
        """Begin to end the pipeline after the failure of a process; the others have ``grace`` seconds to end by
        themselves."""
        self.phase, self.due = PipelinePhase.ENDING, now + grace
        self.lost_at = now if self.lost_at is None else self.lost_at
        self.in_vain = 0 if self.trained else self.in_vain + 1
        self.stops_training()

    def stops_training(self) -> None:
        """Note that its present life is over."""
        self.last_life, self.life = self.life or self.last_life, None
        self.silent_since, self.doubted = None, False
