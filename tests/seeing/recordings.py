"""Recordings of workers with given times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_sdpipe.policies import Worker
from lightning_sdpipe.scheduler.rows import About, Chunk
from lightning_sdpipe.seeing.recording import Recording, series_of
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
