"""Recordings of workers with given times."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from lightning_sdpipe.policies import Worker, registry
from lightning_sdpipe.policies.events import Progress, Ready
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.scheduler.log.event_log import Beginning, Entry, EventLog, Updates
from lightning_sdpipe.scheduler.rows import About, Chunk, UpdateRow
from lightning_sdpipe.seeing.recording import Recording, series_of
from lightning_sdpipe.simulate import Run
from tests.scheduler.rows import one_row

HEARTBEAT = 16  # updates


def chunks(
    worker: Worker,
    own: Sequence[float],
    *,
    phase: str = "forward",
    every: float = 0.0,
    core: float = 0.0,
    life: int = 1,
) -> list[Chunk]:
    """Of a worker whose own time is ``own`` milliseconds, update by update, all of it over 50 in ``phase`` and ``core``
    of that without a core. It waits for replicas until an update has taken ``every`` milliseconds."""
    made, rows, at = [], [], 0.0
    for number, time in enumerate(own):
        length = max(time, every)
        us = {"backward": round(min(time, 50) * 1e3)}
        us[phase] = us.get(phase, 0) + round(max(0.0, time - 50) * 1e3)
        us["wait_group"] = round((length - time) * 1e3)
        rows.append(one_row(number, core=round(core * max(0.0, time - 50) * 1e3), **us))
        at += length / 1e3
        if len(rows) == HEARTBEAT or number == len(own) - 1:
            made.append(Chunk(worker, life, at, tuple(rows)))
            rows = []
    return made


def recording(
    workers: Mapping[Worker, Sequence[Chunk]],
    about: Mapping[Worker, About] | None = None,
    *,
    now: float | None = None,
    active: Sequence[Worker] | None = None,
    joined: float = 0.0,
    lost: str = "",
    over: bool = False,
) -> Recording:
    """Up to the last of their updates, unless it is ``now``."""
    series = series_of(chunk for told in workers.values() for chunk in told)
    end = max((each.ends[-1] for each in series.values()), default=0.0)
    stages = 1 + max((worker.stage for worker in workers), default=0)
    taking_part = dict.fromkeys(workers if active is None else active, joined)
    return Recording(stages, end if now is None else now, series, taking_part, dict(about or {}), lost, None, over)


Own = Callable[[Worker, int], float | Mapping[str, float]]
"""Seconds of an update: of ``forward``, or by phase."""


def simulated(run: Run, own: Own, first: int = 0) -> Recording:
    """What the workers of a simulation would have told; see :func:`simulated_chunks`."""
    told: dict[Worker, list[Chunk]] = {}
    for chunk in simulated_chunks(run, own, first):
        told.setdefault(chunk.worker, []).append(chunk)
    return recording(told, over=True)


def simulated_chunks(run: Run, own: Own, first: int = 0) -> list[Chunk]:
    """Of the updates from ``first`` on that ended before any worker has finished: ``own`` of computing, and waits for
    stages and groups."""
    groups, newest = dict[tuple[Worker, int], int](), dict[Worker, int]()
    waiting: dict[Worker, list[tuple[float, UpdateRow]]] = {}
    until = min(run.finished.values())
    for at, event, decisions in run.entries:
        if isinstance(event, Ready):
            newest[event.worker] = event.iteration
        for group in decisions:
            groups |= {(member, newest[member]): group.sequence for member in group.members if member in newest}
        if isinstance(event, Progress) and event.iteration >= first and at <= until:
            worker, number = event.worker, event.iteration
            computed = own(worker, number)
            phases = computed if isinstance(computed, Mapping) else {"forward": computed}
            us = {name: round(seconds * 1e6) for name, seconds in phases.items()}
            us["wait_group"] = round(event.waiting * 1e6)
            us["wait_stage"] = max(0, round(event.seconds * 1e6) - sum(us.values()))
            row = msgspec.structs.replace(one_row(number, **us), group=groups.get((worker, number), -1))
            waiting.setdefault(worker, []).append((at, row))
    chunks = []
    for worker, rows in waiting.items():
        for start in range(0, len(rows), HEARTBEAT):
            some = rows[start : start + HEARTBEAT]
            chunks.append(Chunk(worker, 1, some[-1][0], tuple(row for _, row in some)))
    return sorted(chunks, key=lambda chunk: chunk.at)


def simulated_log(path: Path, policy: PolicyConfig, run: Run, own: Own, about: About | None = None) -> Path:
    """The log that a scheduler would have written of a simulation: its policy, events, groups and rows."""
    work = run.work
    log = EventLog(path)
    log.open(
        Beginning(registry.to_plain(policy), work.num_stages, work.num_pipelines, 0.0, "2026-01-01T00:00:00+00:00")
    )
    chunks = deque(simulated_chunks(run, own))
    for at, event, decisions in run.entries:
        log.write(Entry(at, event, decisions))
        while chunks and chunks[0].at <= at:
            log.write(Updates(chunks.popleft(), about))
    log.close()
    return path


def row_of(update: int, own: float, stood: float, group: int = -1, stages: float = 0.0) -> UpdateRow:
    """An update of milliseconds."""
    row = one_row(update, backward=round(own * 1e3), wait_group=round(stood * 1e3), wait_stage=round(stages * 1e3))
    return msgspec.structs.replace(row, group=group)
