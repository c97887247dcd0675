"""Barriers of the replicas of a stage: all wait at the same key until every awaited one has come.

A barrier replaces a collective that spans replicas. A worker that dies is not waited for. A barrier is decided once: a
worker that asks again gets the same answer, and one that comes late is told so, and is alone. Keys are the workers'
own; workers that wait at different keys, when no other is left to come, would wait for ever and are refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from lightning_sdpipe.membership.members import Met

REMEMBERED = 64
"""Barriers of a stage whose answers are kept."""


class DecidedBarriers:
    """Waiting and decided barriers of all stages."""

    def __init__(self, num_stages: int) -> None:
        self.next_sequence = 0
        self._waiting: list[dict[int, tuple[str, bytes]]] = [{} for _ in range(num_stages)]
        """Key at which each pipeline's worker waits, and the value that it brings, for each stage."""
        self._been: list[OrderedDict[str, Met]] = [OrderedDict() for _ in range(num_stages)]
        self._replaced: list[dict[str, set[int]]] = [{} for _ in range(num_stages)]
        """Pipelines that have gone since they passed a barrier, by stage and key; their next start did not pass it."""

    def comes(self, stage: int, pipeline: int, key: str, value: bytes) -> Met | None:
        """Let a worker wait at ``key``, or return the answer if the barrier has been decided before."""
        self._waiting[stage].pop(pipeline, None)
        if key not in self._been[stage]:
            self._waiting[stage][pipeline] = key, value
            return None
        return self._answer(stage, pipeline, key, value)

    def missing(self, stage: int, key: str, awaited: Collection[int]) -> list[int]:
        """Return the pipelines of ``awaited`` that are not at ``key``."""
        waiting = self._waiting[stage]
        return sorted(i for i in awaited if waiting.get(i, ("", b""))[0] != key)

    def key(self, stage: int, pipeline: int) -> str | None:
        """Return the key at which that worker waits, if any."""
        waits = self._waiting[stage].get(pipeline)
        return None if waits is None else waits[0]

    def goes(self, pipeline: int) -> None:
        """Forget ``pipeline``, which is gone."""
        for waiting, been, replaced in zip(self._waiting, self._been, self._replaced, strict=True):
            waiting.pop(pipeline, None)
            for key, met in been.items():
                if pipeline in met.pipelines:
                    replaced.setdefault(key, set()).add(pipeline)

    def begin_anew(self) -> None:
        """Forget all decided barriers before a new start: no pipeline that passed them is left."""
        for been, replaced in zip(self._been, self._replaced, strict=True):
            been.clear()
            replaced.clear()

    def remember(self, met: Met) -> None:
        """Remember a barrier that an earlier scheduler has decided."""
        been = self._been[met.stage]
        if not met.past and met.key not in been:
            been[met.key] = met
            self.next_sequence = max(self.next_sequence, met.sequence + 1)
            self._forget(met.stage)

    def decide(self, awaited_in: Sequence[Collection[int]]) -> list[Met]:
        """Return the barriers that all awaited pipelines of a stage have reached, and answers to late pipelines."""
        decided: list[Met] = []
        for stage, (waiting, awaited) in enumerate(zip(self._waiting, awaited_in, strict=True)):
            for pipeline, (key, value) in list(waiting.items()):
                if key in self._been[stage]:  # decided since it asked
                    del waiting[pipeline]
                    decided.append(self._answer(stage, pipeline, key, value))
            keys = {waiting[i][0] for i in awaited if i in waiting}
            if len(keys) != 1 or self.missing(stage, key := next(iter(keys)), awaited):
                continue
            pipelines = tuple(sorted(awaited))
            met = Met(stage, key, pipelines, tuple(waiting.pop(i)[1] for i in pipelines), self.next_sequence)
            self.next_sequence += 1
            self._been[stage][key] = met
            self._forget(stage)
            decided.append(met)
        return decided

    def contradictions(self, awaited_in: Sequence[Collection[int]]) -> dict[int, dict[int, str]]:
        """Return, by stage, the keys of awaited pipelines that all wait, but not at one key. They wait no longer."""
        found: dict[int, dict[int, str]] = {}
        for stage, (waiting, awaited) in enumerate(zip(self._waiting, awaited_in, strict=True)):
            if awaited and all(i in waiting for i in awaited) and len({waiting[i][0] for i in awaited}) > 1:
                found[stage] = {i: waiting.pop(i)[0] for i in sorted(awaited)}
        return found

    def _answer(self, stage: int, pipeline: int, key: str, value: bytes) -> Met:
        """Return the answer for a pipeline that comes to a barrier that is decided."""
        met = self._been[stage][key]
        if pipeline in met.pipelines and pipeline not in self._replaced[stage].get(key, ()):
            return met
        return Met(stage, key, (pipeline,), (value,), met.sequence, past=True)

    def _forget(self, stage: int) -> None:
        been = self._been[stage]
        while len(been) > REMEMBERED:
            key, _ = been.popitem(last=False)
            self._replaced[stage].pop(key, None)
