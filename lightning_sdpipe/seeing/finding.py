"""Results of detectors: a finding, its cost, and advice; and the costs of slow pipelines for the others, from the rows
of all workers.

The functions are pure. The members of a group wait until the last one has come. The member that stood still least came
last, and is charged what each of the others stood still beyond that. If it had been held up itself, in its last group,
it passes the charge on to the members that it waited for there, up to the length of that wait; else a chain of pairs
would hide half of what its slowest member costs.

Within a pipeline, a stage waits for a slow one whatever the groups: the time for which a pipeline's workers wait for
its stages, beyond that of other pipelines, is charged to it, too.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lightning_sdpipe.meter import EXCHANGE, FOR_NEIGHBOURS, OWN, WAIT_GROUP, WAIT_STAGE
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.seeing.recording import Recording

FOR_STAGES = (*FOR_NEIGHBOURS, WAIT_STAGE)
Meeting = Sequence[tuple[Worker, int]]
"""Workers of a stage that met, each with the place of its update in its series."""

SCHEDULES = ("1f1b", "gpipe", "pipedream")
"""Schedules for which the time of an update follows from the times of the stages."""
RECENT, LEAST = 192, 64
"""Number of newest updates of each worker that are examined, and least number of which anything is said."""
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
    recipes/; both are empty where no argument does it. ``gain`` is the largest factor by which the run would have been
    faster; None where it is unknown."""

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


FOR_CAUSE = {
    "data": (Advice("load batches in more processes", "DataLoader(num_workers=4)", "data.num_workers=4"),),
    "without a core": (Advice("run fewer threads, programs or workers on the machine"),),
    "gc": (Advice("keep garbage collection out of training: call gc.freeze() when it begins"),),
    "other": (Advice("look for a hook, callback or logger that takes long"),),
}
"""Advice by the cause of long own times, where there is any: a phase, or that the thread had no core."""


def severity(cost: Charge | None) -> str:
    """Return the severity by the time for which others stood still; a warning where that is not known."""
    if cost is None or WARNING <= cost.stood < CRITICAL:
        return "warning"
    return "note" if cost.stood < WARNING else "critical"


def recent(recording: Recording, least: int = LEAST) -> Recording:
    """Return the newest updates of workers that have reported at least so many."""
    enough = {worker: series.newest(RECENT) for worker, series in recording.series.items() if len(series) >= least}
    return replace(recording, series=enough)


def update_time(stages: Sequence[float], micro_batches: int, schedule: str) -> float:
    """Return the time of an update of a pipeline whose stages compute this long; see :data:`SCHEDULES`."""
    if schedule == "pipedream":
        return max(stages)
    return (sum(stages) + (micro_batches - 1) * max(stages)) / micro_batches


def bound(recording: Recording) -> float | None:
    """Return how many times as fast the run would be if no pipeline waited for another: the rates that follow from the
    workers' own times over the measured ones. None where that is unknown."""
    alone = measured = 0.0
    for pipeline in {worker.pipeline for worker in recording.series}:
        stages = [series for worker, series in sorted(recording.series.items()) if worker.pipeline == pipeline]
        about = recording.about.get(Worker(0, pipeline))
        if len(stages) > 1 and (about is None or about.schedule not in SCHEDULES):
            return None
        own = [statistics.fmean(series.own()) / 1e6 for series in stages]
        alone += 1 / update_time(own, *((1, "") if about is None else (about.micro_batches, about.schedule)))
        measured += len(stages[-1]) / stages[-1].seconds()
    return round(alone / measured, 3) if measured else None


def meetings(recording: Recording) -> list[Meeting]:
    """Return groups of at least two members with known rows, in the order in which they were decided. Where no worker
    has waited for a group, gradients are averaged, and all replicas meet in each update."""
    by_sequence = any(group >= 0 for series in recording.series.values() for group in series.groups)
    met: defaultdict[tuple[int, int], list[tuple[Worker, int]]] = defaultdict(list)
    for worker, series in sorted(recording.series.items()):
        for at, number in enumerate(series.groups if by_sequence else series.numbers):
            if number >= 0:
                met[number, worker.stage].append((worker, at))
    return [members for _, members in sorted(met.items()) if len(members) > 1]


def stood_still(recording: Recording, worker: Worker, at: int) -> float:
    """Return the microseconds for which the worker stood still in this update for its group, the exchange included."""
    us = recording.series[worker].us[at]
    return us[WAIT_GROUP] + us[EXCHANGE]


def costs(recording: Recording, begun: float = -math.inf) -> dict[int, Charge]:
    """Return what each pipeline cost, from a moment of the scheduler's clock on."""
    seen = {w: [at for at, end in enumerate(s.ends) if end > begun] for w, s in recording.series.items()}
    seen = {worker: places for worker, places in seen.items() if places}
    total = sum(sum(recording.series[worker].us[at]) for worker, places in seen.items() for at in places)
    charged = _charges(recording, begun)
    found = {}
    for pipeline in sorted({worker.pipeline for worker in seen}):
        inner, lacks = 0.0, 0.0
        for worker in (worker for worker in seen if worker.pipeline == pipeline):
            peers = [other for other in recording.replicas(worker) if other in seen]
            if peers:
                waits, own = (
                    _mean(recording, worker, seen[worker], phases)
                    - statistics.median(_mean(recording, peer, seen[peer], phases) for peer in peers)
                    for phases in (FOR_STAGES, range(OWN))
                )
                inner += max(0.0, waits) * len(seen[worker])
                lacks = max(lacks, own * len(seen[worker]))
        found[pipeline] = Charge((charged[pipeline] + inner) / total, lacks / total) if total else Charge()
    return found


def _charges(recording: Recording, begun: float) -> defaultdict[int, float]:
    """Return the microseconds for which others stood still in their groups for each pipeline."""
    charged: defaultdict[int, float] = defaultdict(float)
    held_up: dict[Worker, dict[int, float]] = {}
    """Pipelines that held each worker up in its last group, and for how long."""
    for members in meetings(recording):
        still = {worker: stood_still(recording, worker, at) for worker, at in members}
        last = min(still, key=still.__getitem__)
        passed = held_up.get(last, {})
        for worker, at in members:
            left = still[worker] - still[last]
            blamed: dict[int, float] = {}
            for pipeline, long in passed.items():
                blamed[pipeline] = min(left, long)
                left -= blamed[pipeline]
            blamed[last.pipeline] = blamed.get(last.pipeline, 0.0) + left
            if worker != last:
                held_up[worker] = blamed
                if recording.series[worker].ends[at] > begun:
                    for pipeline, long in blamed.items():
                        charged[pipeline] += long
    return charged


def _mean(recording: Recording, worker: Worker, places: Sequence[int], phases: Sequence[int]) -> float:
    us = recording.series[worker].us
    return statistics.fmean(sum(us[at][phase] for phase in phases) for at in places)
