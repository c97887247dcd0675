"""Where replicas of a stage wait for each other: at the same key, until all who are awaited have come.

A meeting replaces a collective that spans replicas. Whoever dies is not waited for, and a meeting is decided once: who
asks again gets the same answer, and who comes late is told so, and is alone. Keys are the workers' own; those who wait
at different keys, when nobody is left to come, would wait for ever and are refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from lightning_sdpipe.policies.members import Met

REMEMBERED = 64
"""Meetings of a stage whose answers are kept."""


class Meetings:
    """Of all stages."""

    def __init__(self, num_stages: int) -> None:
        self.next_sequence = 0
        self._waiting: list[dict[int, tuple[str, bytes]]] = [{} for _ in range(num_stages)]
        """Of each stage: at which key each pipeline's worker waits, and with what."""
        self._been: list[OrderedDict[str, Met]] = [OrderedDict() for _ in range(num_stages)]

    def comes(self, stage: int, pipeline: int, key: str, value: bytes) -> Met | None:
        """A worker is at ``key``; the answer, if it has been decided before."""
        met = self._been[stage].get(key)
        if met is None:
            self._waiting[stage][pipeline] = key, value
            return None
        if pipeline in met.pipelines:
            return met
        return Met(stage, key, (pipeline,), (value,), met.sequence, past=True)

    def missing(self, stage: int, key: str, awaited: Collection[int]) -> list[int]:
        """Who of ``awaited`` is not at ``key``."""
        waiting = self._waiting[stage]
        return sorted(i for i in awaited if waiting.get(i, ("", b""))[0] != key)

    def key(self, stage: int, pipeline: int) -> str | None:
        """Where that worker waits."""
        waits = self._waiting[stage].get(pipeline)
        return None if waits is None else waits[0]

    def goes(self, pipeline: int) -> None:
        """``pipeline`` is gone."""
        for waiting in self._waiting:
            waiting.pop(pipeline, None)

    def remember(self, met: Met) -> None:
        """An earlier scheduler has decided it."""
        been = self._been[met.stage]
        if not met.past and met.key not in been:
            been[met.key] = met
            self.next_sequence = max(self.next_sequence, met.sequence + 1)
            self._forget(been)

    def decide(self, awaited: Collection[int]) -> list[Met]:
        """The meetings to which all ``awaited`` pipelines have come, or (late) one that has been."""
        decided: list[Met] = []
        if not awaited:
            return decided
        for stage, waiting in enumerate(self._waiting):
            for pipeline, (key, value) in list(waiting.items()):
                been = self._been[stage].get(key)
                if been is not None:  # remembered since it asked
                    del waiting[pipeline]
                    inside = pipeline in been.pipelines
                    decided.append(been if inside else Met(stage, key, (pipeline,), (value,), been.sequence, past=True))
            keys = {waiting[i][0] for i in awaited if i in waiting}
            if len(keys) != 1 or self.missing(stage, key := next(iter(keys)), awaited):
                continue
            pipelines = tuple(sorted(awaited))
            met = Met(stage, key, pipelines, tuple(waiting.pop(i)[1] for i in pipelines), self.next_sequence)
            self.next_sequence += 1
            self._been[stage][key] = met
            self._forget(self._been[stage])
            decided.append(met)
        return decided

    def contradictions(self, awaited: Collection[int]) -> dict[int, dict[int, str]]:
        """Of each stage in which all ``awaited`` wait, but not at one key: where. They wait no longer."""
        found: dict[int, dict[int, str]] = {}
        for stage, waiting in enumerate(self._waiting):
            if awaited and all(i in waiting for i in awaited) and len({waiting[i][0] for i in awaited}) > 1:
                found[stage] = {i: waiting.pop(i)[0] for i in sorted(awaited)}
        return found

    @staticmethod
    def _forget(been: OrderedDict[str, Met]) -> None:
        while len(been) > REMEMBERED:
            been.popitem(last=False)
