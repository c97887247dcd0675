"""What a supervisor keeps of each of its pipelines, and the numbers by which it judges them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from lightning_sdpipe.supervision.events import ProcessEnded


class PipelinePhase(Enum):
    """Of a pipeline; :mod:`~lightning_sdpipe.supervision.rules` says how it comes into each."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    FINISHED = "finished"
    GIVEN_UP = "given up"


GONE = (PipelinePhase.FINISHED, PipelinePhase.GIVEN_UP)


@dataclass(frozen=True)
class Settings:
    """The numbers of the rules: counts, and seconds."""

    num_pipelines: int
    num_stages: int
    restarts: int = 10
    """Of each pipeline, and of the scheduler."""
    min_pipelines: int = 1
    grace: float = 3.0
    """In which the other processes of a failed pipeline end by themselves."""
    farewell: float = 30.0
    """In which all processes end by themselves when the run does."""
    silence: float = 10.0
    """In which a pipeline that the scheduler has given up ends by itself."""
    first_delay: float = 1.0
    longest_delay: float = 30.0


@dataclass
class PipelineState:
    """What is known of one pipeline."""

    number: int
    phase: PipelinePhase = PipelinePhase.WAITING
    alive: set[int] = field(default_factory=set)
    ends: list[ProcessEnded] = field(default_factory=list)
    """Of the processes that have ended by themselves since the last start, in that order."""
    ended_at: float = 0.0
    """The last one."""
    due: float = math.inf
    """When it is started (WAITING), killed (ENDING), or no longer asked about (RUNNING, with nobody alive)."""
    again: int = 0
    in_vain: int = 0
    """Starts in a row after which it never trained."""
    life: str | None = None
    """In which it trains now; the scheduler's name for it."""
    last_life: str | None = None
    trained: bool = False
    """Whether it has trained since the last start."""
    lost_at: float | None = None
    told: bool = False
    """Whether it was said why it was lost."""
    pressed: bool = False
    """Whether its processes have been killed by the supervisor, so that these ends explain nothing."""
    doubted: bool = False
    """Whether the scheduler has given up its life, and it lives."""
    silent_since: float | None = None

    @property
    def trains(self) -> bool:
        """Whether it goes on when another one is lost."""
        return self.phase is PipelinePhase.RUNNING and bool(self.alive) and self.life is not None

    def stops_training(self) -> None:
        """This life of it is over."""
        self.last_life, self.life = self.life or self.last_life, None
        self.silent_since, self.doubted = None, False
