"""Results of a detector: a finding, its cost, and advice."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_sdpipe.policies.events import Worker

WARNING, CRITICAL = 0.03, 0.10
"""Shares of all workers' time for which they stood still because of a finding, from which on it is a warning, or
critical."""


@dataclass(frozen=True)
class Charge:
    """Shares of all workers' time: the time for which other workers ``stood`` still, and the time that the slow one
    ``lacks``, which it computed longer than others of its stage. Without both, the run would be 1/(1 − stood − lacks)
    times as fast."""

    stood: float = 0.0
    lacks: float = 0.0

    def __add__(self, other: Charge) -> Charge:
        return Charge(self.stood + other.stood, self.lacks + other.lacks)

    @property
    def gain(self) -> float:
        """Factor by which the run would be faster."""
        return 1 / max(1e-3, 1 - self.stood - self.lacks)


@dataclass(frozen=True)
class Advice:
    """Advice on a finding. ``python`` is what to write in a script, and ``override`` the same on the command line of
    recipes/; both are empty where no argument does it. ``gain`` is the factor by which the run would have been faster;
    None where it is unknown."""

    text: str
    python: str = ""
    override: str = ""
    gain: float | None = None


@dataclass(frozen=True)
class Finding:
    """An observation about ``workers``, from a moment of the scheduler's clock on.

    ``severity`` is ``"note"``, ``"warning"``, ``"critical"`` or ``"blind"``; ``evidence`` are the numbers behind it.
    ``cost`` is None where it is unknown.
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
    """Return the severity by the time for which others stood still; a warning where that is not known."""
    if cost is None or WARNING <= cost.stood < CRITICAL:
        return "warning"
    return "note" if cost.stood < WARNING else "critical"
