"""What a detector says: its finding, what that costs, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_sdpipe.policies.events import Worker

WARNING, CRITICAL = 0.03, 0.10
"""Of all workers' time: as much stood still because of what was found."""


@dataclass(frozen=True)
class Charge:
    """Shares of all workers' time: what other workers ``stood`` still, and what the slow one ``lacks``, which it
    computed longer than others of its stage. Without both, the run would be 1/(1 − stood − lacks) times as fast."""

    stood: float = 0.0
    lacks: float = 0.0

    def __add__(self, other: Charge) -> Charge:
        return Charge(self.stood + other.stood, self.lacks + other.lacks)

    @property
    def gain(self) -> float:
        """How many times as fast the run would be."""
        return 1 / max(1e-3, 1 - self.stood - self.lacks)


@dataclass(frozen=True)
class Advice:
    """What to do. ``override`` says it on the command line of recipes/, and names the strategy's argument; empty where
    no argument does it. ``gain`` is how many times as fast the run would have been; None where it cannot be told."""

    text: str
    override: str = ""
    gain: float | None = None


@dataclass(frozen=True)
class Finding:
    """Something about ``workers`` that is worth knowing, since a moment of the scheduler's clock.

    ``severity`` is ``"note"``, ``"warning"``, ``"critical"`` or ``"blind"``; ``evidence`` are the numbers that it rests
    on. ``cost`` is None where it cannot be told.
    """

    kind: str
    severity: str
    workers: tuple[Worker, ...]
    since: float
    text: str
    evidence: dict[str, float] = field(default_factory=dict)
    cost: Charge | None = None
    advice: tuple[Advice, ...] = ()


def severity(cost: Charge | None) -> str:
    """By what others stood still; a warning where that is not known."""
    if cost is None or WARNING <= cost.stood < CRITICAL:
        return "warning"
    return "note" if cost.stood < WARNING else "critical"
