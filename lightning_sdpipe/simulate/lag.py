"""How old what models contain became in a run, by any policy: counted from its events alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_sdpipe.policies.decisions import Decision
from lightning_sdpipe.policies.events import Event, Joined, Left, Lost, Ready


def lags(entries: Iterable[tuple[float, Event, Sequence[Decision]]], stage: int, size: int) -> list[tuple[float, int]]:
    """The largest number of steps of any pipeline that a model of ``stage`` does not contain, whenever it changes.

    That is n_i - V_k[i] of ``policies/versions.py`` over those that take part, with pipelines as nodes. A member of a
    group that neither waits nor is answered contains what it got from the end of its step on.

    Args:
        entries: times, events and decisions, as in a scheduler's log.
        size: N, the pipelines.
    """
    versions = [[0] * size for _ in range(size)]
    active: set[int] = set()
    waiting: set[int] = set()
    arriving: dict[int, list[int]] = {}
    history: list[tuple[float, int]] = []
    for at, event, decisions in entries:
        match event:
            case Joined(worker) if worker.stage == stage:
                active.add(worker.pipeline)
            case Left(worker) | Lost(worker) if worker.stage == stage:
                active.discard(worker.pipeline)
                waiting.discard(worker.pipeline)
            case Ready(worker) if worker.stage == stage:
                own = versions[worker.pipeline]
                own[:] = map(max, own, arriving.pop(worker.pipeline, own))
                own[worker.pipeline] += 1
                waiting.add(worker.pipeline)
        groups = [group for group in decisions if group.stage == stage]
        largest = _largest(versions, active)  # before anything that this event lets happen
        for group in groups:
            members = [worker.pipeline for worker in group.members]
            newest = list(map(max, *(versions[p] for p in members))) if len(members) > 1 else versions[members[0]]
            for p in members:
                if p in waiting:
                    versions[p] = list(newest)
                else:
                    arriving[p] = list(map(max, newest, arriving.get(p, newest)))
            waiting.difference_update(p for p, w in zip(members, group.members, strict=True) if w not in group.passive)
        if not history or history[-1][1] != largest:
            history.append((at, largest))
        if groups and (after := _largest(versions, active)) != largest:
            history.append((at, after))
    return history


def _largest(versions: Sequence[Sequence[int]], active: set[int]) -> int:
    return max((versions[i][i] - versions[k][i] for i in active for k in active), default=0)
