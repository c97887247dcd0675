"""Results of detectors: a finding, its cost, and advice. The costs of slow pipelines for the others come from the rows
of all workers.

The functions are pure. The members of a group wait until the last one has come. The member that stood still least came
last, and is charged the time that each of the others stood still beyond that. If it had been held up itself in its last
group, it passes the charge on to the members that held it up there, up to the length of that wait; else a chain of
pairs would hide half of what its slowest member costs.

Within a pipeline, stages wait for a slow one whatever the groups. So a pipeline is also charged the time that its
workers wait for its stages beyond that of other pipelines.
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
"""Workers of a stage that met, each with the index of its update in its series."""

SCHEDULES = ("1f1b", "gpipe", "pipedream")
"""Schedules for which the time of an update follows from the times of the stages."""
RECENT, LEAST = 192, 64
"""Number of each worker's newest updates that are examined, and the least number for a finding."""
WARNING, CRITICAL = 0.03, 0.10
"""A finding is a warning, or critical, from these shares on of all workers' time that they stood still because of
it."""


@dataclass(frozen=True)
class Charge:
    """Shares of all workers' time: the time that other workers ``stood`` still, and the time that the slow one
    ``lacks``, since it computed longer than others of its stage. Without both, the run would be 1/(1 − stood − lacks)
    times as fast."""

    stood: float = 0.0
    lacks: float = 0.0

    def __add__(self, other: Charge) -> Charge:
        return Charge(self.stood + other.stood, self.lacks + other.lacks)

    @property
    def gain(self) -> float:
        """Ratio of the run's speed without this charge to its speed."""
        return 1 / max(1e-3, 1 - self.stood - self.lacks)


@dataclass(frozen=True)
class Advice:
    """Advice on a finding. ``python`` is what to write in a script, and ``override`` the same for the command line of
    recipes/; both are empty if no argument does it. ``gain`` is the largest ratio of the speed with this advice to the
    present one; None if unknown."""

    text: str
    python: str = ""
    override: str = ""
    gain: float | None = None


@dataclass(frozen=True)
class Finding:
    """An observation about ``workers``, from a moment of the scheduler's clock on.

    ``severity`` is ``"note"``, ``"warning"``, ``"critical"`` or ``"blind"``; ``evidence`` has the numbers behind it.
    ``cost`` is None if unknown.
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
"""Advice by the cause of long own times: a phase, or that the thread had no core."""


def severity(cost: Charge | None) -> str:
    """Return the severity by the time that others stood still; a warning if that is unknown."""
    if cost is None or WARNING <= cost.stood < CRITICAL:
        return "warning"
    return "note" if cost.stood < WARNING else "critical"


def recent(recording: Recording, least: int = LEAST) -> Recording:
    """Return the newest updates of the workers that have reported at least ``least``."""
    enough = {worker: series.newest(RECENT) for worker, series in recording.series.items() if len(series) >= least}
    return replace(recording, series=enough)


def update_time(stages: Sequence[float], micro_batches: int, schedule: str) -> float:
    """Return the time of an update, given the time that each stage computes; see :data:`SCHEDULES`."""
    if schedule == "pipedream":
        return max(stages)
    return (sum(stages) + (micro_batches - 1) * max(stages)) / micro_batches


def bound(recording: Recording) -> float | None:
    """Return the ratio of the run's speed if no pipeline waited for another, which follows from the workers' own times,
    to its measured speed; None if unknown."""
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
    """Return the groups with known rows of at least two members, in the order in which they were decided. If no worker
    has waited for a group, gradients are averaged, and all replicas meet in each update."""
    by_sequence = any(group >= 0 for series in recording.series.values() for group in series.groups)
    met: defaultdict[tuple[int, int], list[tuple[Worker, int]]] = defaultdict(list)
    for worker, series in sorted(recording.series.items()):
        for at, number in enumerate(series.groups if by_sequence else series.numbers):
            if number >= 0:
                met[number, worker.stage].append((worker, at))
    return [members for _, members in sorted(met.items()) if len(members) > 1]


def stood_still(recording: Recording, worker: Worker, at: int) -> float:
    """Return the microseconds that the worker stood still for its group in this update, the exchange included."""
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
    """Return, for each pipeline, the microseconds that others stood still in their groups because of it."""
    charged: defaultdict[int, float] = defaultdict(float)
    held_up: dict[Worker, dict[int, float]] = {}
    """Pipelines that held each worker up in its last group, and for how many microseconds."""
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
