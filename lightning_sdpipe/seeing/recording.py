"""A recording of a run's updates, from a scheduler's answers or from a log."""

from __future__ import annotations

import datetime
import time
from collections import ChainMap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from lightning_sdpipe.errors import counted
from lightning_sdpipe.meter import OWN, PHASES
from lightning_sdpipe.policies.events import Joined, Left, Lost, Worker
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.log.event_log import Beginning, Record, read_log
from lightning_sdpipe.scheduler.log.status import Status
from lightning_sdpipe.scheduler.rows import About, Chunk, Doing


@dataclass
class Series:
    """The updates of one worker since it last joined as a new client, oldest first. A row of several updates counts as
    that many equal ones.

    For each update there are its ``numbers``, its ``ends`` in seconds of the scheduler's clock, the microseconds ``us``
    of each phase and ``core`` without a core, and in ``groups`` the sequence number of the awaited group, -1 for none.
    """

    life: int
    numbers: list[int] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    us: list[tuple[float, ...]] = field(default_factory=list)
    core: list[float] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    dropped: int = 0
    made: int = 0
    """Number of updates in this life, including those no longer kept."""
    earlier: tuple[Series, ...] = ()
    """The worker's earlier lives."""

    def __len__(self) -> int:
        return len(self.ends)

    def add(self, chunk: Chunk) -> None:
        """Add the next rows, of the same life."""
        self.dropped += chunk.dropped
        end = chunk.at - sum(sum(row.us) for row in chunk.rows) / 1e6
        for row in chunk.rows:
            us, core, seconds = (
                tuple(x / row.count for x in row.us),
                row.core / row.count,
                sum(row.us) / row.count / 1e6,
            )
            for number in range(row.update - row.count + 1, row.update + 1):
                end += seconds
                self.numbers.append(number)
                self.groups.append(row.group)
                self.ends.append(end)
                self.us.append(us)
                self.core.append(core)
            self.made += row.count

    def copy(self) -> Series:
        """Return a copy, which later calls of :meth:`add` do not change."""
        lists: dict[str, Any] = {
            each.name: [*value] for each in fields(self) if isinstance(value := getattr(self, each.name), list)
        }
        return replace(self, **lists)

    def newest(self, updates: int) -> Series:
        """Return the last ``updates`` updates."""
        return self._part(slice(-updates, None))

    def oldest(self, updates: int) -> Series:
        """Return the first ``updates`` updates."""
        return self._part(slice(updates))

    def _part(self, of: slice) -> Series:
        columns = self.numbers[of], self.ends[of], self.us[of], self.core[of], self.groups[of]
        return Series(self.life, *columns, self.dropped)

    @property
    def lives(self) -> tuple[Series, ...]:
        """All lives of the worker in which it made updates, the present one last."""
        return (*self.earlier, self)

    def begun(self, at: int = 0) -> float:
        """Return when update ``at`` began."""
        return self.ends[at] - sum(self.us[at]) / 1e6

    def own(self) -> list[float]:
        """Return each update's microseconds of own time, without waits for other workers."""
        return [sum(us[:OWN]) for us in self.us]

    def seconds(self) -> float:
        """Return the seconds of all updates."""
        return sum(map(sum, self.us)) / 1e6


@dataclass(frozen=True)
class Recording:
    """A run up to ``now``, in seconds of the scheduler's clock.

    ``active`` has the workers that take part, and since when; in a log in which all have left, all workers. ``lost``
    says which part of the run is missing, if any; ``failure`` why the run failed.
    """

    num_stages: int
    now: float
    series: dict[Worker, Series]
    active: dict[Worker, float]
    about: dict[Worker, About] = field(default_factory=dict)
    lost: str = ""
    failure: str | None = None
    over: bool = False
    """Whether the recording is final."""
    policy: dict[str, Any] = field(default_factory=dict)
    """The scheduler's policy, as plain values."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Reasons of groups, by sequence number, as far as known."""
    state: str = "training"
    """What the run does, or how it ended."""
    begun: float = 0.0
    """When its scheduler was started."""
    gone: dict[Worker, float] = field(default_factory=dict)
    """Workers that were lost and have not come back, and since when."""
    doing: dict[Worker, Doing] = field(default_factory=dict)
    """What each present worker does; in a log, what each did last."""
    restarts: tuple[float, ...] = ()
    """When its scheduler was restarted."""
    clock: float = 0.0
    """The wall clock's time, in seconds since 1970, when the scheduler's clock shows 0."""

    def replicas(self, worker: Worker) -> list[Worker]:
        """Return the other workers of the same stage that have reported updates, in pipelines of the same depth."""
        depths = self._depths()
        return [
            other
            for other in sorted(self.series)
            if other.stage == worker.stage
            and other != worker
            and depths[other.pipeline] == depths.get(worker.pipeline, depths[other.pipeline])
        ]

    @property
    def of_one_depth(self) -> bool:
        """True if all pipelines have the same number of stages."""
        return len({*self._depths().values()}) <= 1

    def _depths(self) -> dict[int, int]:
        """Return the number of stages of each pipeline, as far as they have reported updates."""
        depths: dict[int, int] = {}
        for worker in self.series:
            depths[worker.pipeline] = max(depths.get(worker.pipeline, 0), worker.stage + 1)
        return depths

    def name(self, worker: Worker) -> str:
        """Return a readable name of ``worker``."""
        about = self.about.get(worker)
        return f"stage {worker.stage} of pipeline {worker.pipeline}" + ("" if about is None else f" ({about})")

    def samples_per_second(self) -> float | None:
        """Return the samples per second of all pipelines together while they trained, without sync points; None if a
        batch size is unknown."""
        rate, depths = 0.0, self._depths()
        for worker, series in self.series.items():
            about = self.about.get(worker)
            if worker.stage == depths[worker.pipeline] - 1 and len(series):
                if about is None or about.samples is None:
                    return None
                rate += about.samples * len(series) / series.seconds()
        return rate or None


def of_answers(
    status: Status, reply: m.RowsReply, series: dict[Worker, Series], lost: str, starts: Sequence[float]
) -> Recording:
    """Return the recording from a scheduler's answers, with the workers' updates ``series``. ``starts`` has the times
    when the scheduler was started and restarted."""
    active = {
        Worker(j, i): reply.now - (stage.joined[i] or 0.0)
        for j, stage in enumerate(status.stages)
        for i in stage.active()
    }
    gone = {
        Worker(j, i): reply.now - (stage.silent[i] or 0.0)
        for j, stage in enumerate(status.stages)
        for i, letter in enumerate(stage.states)
        if letter == "l"
    }
    doing, members = dict(reply.doing), status.members
    if members is not None:  # a lost worker's next start is another session, which is away until it joins
        for worker in series.keys() - active.keys() - gone.keys():
            last, present = series[worker], members.lives.get(worker.pipeline)
            if worker.pipeline in members.states and last.life != present and len(last):
                gone[worker] = last.ends[-1]
    failure = status.failure or (members and members.over) or None
    if failure is not None:
        state = f"failed: {failure}"
    elif members is not None and members.held:
        state = f"waiting: {members.held}"
    elif active or doing:  # for a validation, all workers leave the policy
        state = "validating" if any(each.what == "validating" for each in doing.values()) else "training"
    else:
        state = "stopped" if gone else "finished" if any(status.workers()) else "starting"
    return Recording(
        len(status.stages),
        reply.now,
        series,
        active,
        dict(reply.workers),
        lost,
        failure,
        state=state,
        begun=starts[0],
        restarts=tuple(starts[1:]),
        clock=time.time() - reply.now,
        gone=gone,
        doing=doing,
        policy=msgspec.json.decode(status.policy),
        reasons={group.number: group.reason for stage in status.stages for group in stage.groups},
    )


def of_log(path: Path) -> Recording:
    """Return the final recording of the last run whose scheduler wrote the log at ``path``.

    Raises:
        ConfigurationError: the file cannot be read, or is no log.
    """
    return of_records(last_run(read_log(path)))


def last_run(records: Sequence[Record]) -> list[Record]:
    """Return the ``records`` of the last run: a restarted scheduler continues a run if it has found the same
    processes."""
    run = [records[-1]]
    for record in reversed(records[:-1]):
        if record.beginning.at > run[0].beginning.at or not _processes(record) & _processes(run[0]):
            break
        run.insert(0, record)
    return run


def _processes(record: Record) -> set[tuple[Worker, int]]:
    return {(update.rows.worker, update.rows.life) for update in record.updates}


def of_records(records: Sequence[Record]) -> Recording:
    """Return the final recording of a run, from the record of each start of its scheduler."""
    first, last = records[0].beginning, records[-1]
    entries = [entry for record in records for entry in record.entries]
    updates = [update for record in records for update in record.updates]
    ever: set[Worker] = set()
    left: set[Worker] = set()
    gone: dict[Worker, float] = {}
    for entry in entries:
        match entry.event:
            case Joined(worker):
                ever.add(worker)
                left.discard(worker)
                gone.pop(worker, None)
            case Left(worker) | Lost(worker):
                left.add(worker)
                if isinstance(entry.event, Lost):
                    gone[worker] = entry.at
    taking_part = ever - left or ever
    now = max([entry.at for entry in entries] + [update.rows.at for update in updates], default=0.0)
    about = {update.rows.worker: update.about for update in updates if update.about is not None}
    series = series_of(update.rows for update in updates)
    lost = f"its first {first.after} events, which are in no file any more" if first.after else ""
    return Recording(
        first.num_stages,
        now,
        series,
        dict.fromkeys(taking_part, now),
        about,
        lost,
        over=True,
        state=_ended(ever, left, gone),
        begun=first.at,
        restarts=tuple(record.beginning.at for record in records[1:]),
        clock=_wall_clock(first),
        gone=gone,
        doing=dict(ChainMap(*(record.doing for record in reversed(records)))),
        policy=last.beginning.policy,
        reasons={group.sequence: group.reason for entry in entries for group in entry.decisions},
    )


def _wall_clock(beginning: Beginning) -> float:
    """Return the wall clock's time when the scheduler's clock showed 0."""
    return datetime.datetime.fromisoformat(beginning.time).timestamp() - beginning.at


def _ended(ever: set[Worker], left: set[Worker], gone: dict[Worker, float]) -> str:
    if ever - left:
        return f"the log ends while {counted(len(ever - left), 'worker')} took part"
    return "finished" if ever - gone.keys() else "stopped: all workers were lost" if ever else "no worker came"


def series_of(chunks: Iterable[Chunk]) -> dict[Worker, Series]:
    """Return the updates of each worker, separated by life, since a restarted worker is a new one."""
    found: dict[Worker, Series] = {}
    for chunk in chunks:
        add(found, chunk)
    return found


def add(found: dict[Worker, Series], chunk: Chunk) -> bool:
    """Add the rows of ``chunk`` to its worker's series; return False if they have another version's phases."""
    if any(len(row.us) != len(PHASES) for row in chunk.rows):
        return False
    series = found.get(chunk.worker)
    if series is None or series.life != chunk.life:
        series = found[chunk.worker] = Series(chunk.life, earlier=() if series is None else series.lives)
    series.add(chunk)
    return True
