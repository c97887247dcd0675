"""Pipelines that measure are all cut as the first of them is, whoever is lost meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.loop import planning
from lightning_sdpipe.partition.pipeline_cut import Balanced, PipelineCut
from lightning_sdpipe.partition.profile import BlockProfile
from lightning_sdpipe.scheduler.client.client import SchedulerClient
from lightning_sdpipe.scheduler.server.key_value_store import KeyValueStore
from lightning_sdpipe.worker.elastic.scheduler_connection import agree, encode, key_of, known
from tests.worker.elastic.jobs import SAMPLES, Model, elastic_run, fit

CUT = PipelineCut(2, "balanced")


class Held(SchedulerClient):
    """The scheduler's store, without the scheduler."""

    def __init__(self) -> None:
        self.store, self.asked = KeyValueStore(), 0
        self.waited: list[float | None] = []

    def put(self, key: str, value: bytes, timeout: float | None = None) -> None:
        self.store.put(key, value)

    def fetch(self, keys: Sequence[str], timeout: float | None = None) -> tuple[bytes | None, ...]:
        return self.store.get(keys)

    def wait(
        self, keys: Sequence[str], timeout: float | None = None, cancelled: Callable[[], bool] | None = None
    ) -> tuple[bytes, ...]:
        self.waited.append(timeout)
        values = tuple(value for value in self.store.get(keys) if value is not None)
        if len(values) < len(keys):
            raise SchedulerError("nobody has set it")
        return values

    def add(self, key: str, amount: int, timeout: float | None = None) -> int:
        self.asked += 1
        return self.store.add(key, amount, (b"", self.asked))[0]


def test_the_first_that_has_measured_tells_its_cut_and_the_others_take_it() -> None:
    store = Held()
    assert known(store, CUT) is None
    assert agree(store, CUT, [2, 4]) == [2, 4]
    assert agree(store, CUT, [3, 3]) == [2, 4] == known(store, CUT)
    other = PipelineCut(2, Balanced(speeds=[1.0, 0.5]))
    assert known(store, other) is None, "who asks for another cut gets its own, and is refused by its fingerprint"
    assert agree(store, other, [4, 2]) == [4, 2]


def test_a_first_one_that_is_lost_before_it_tells_holds_up_the_others_for_a_limited_time() -> None:
    store = Held()
    store.add(key_of(CUT, "number"), 1)
    assert agree(store, CUT, [3, 3], seconds=7.0) == [3, 3]
    assert store.waited == [7.0]
    assert agree(store, CUT, [2, 4]) == [3, 3]


def test_what_members_had_a_new_scheduler_keep_counts_before_what_a_newcomer_measures() -> None:
    store = Held()
    assert known(store, CUT) is None, "the newcomer asks before the members are back"
    store.put(key_of(CUT), encode([2, 4]))
    assert agree(store, CUT, [3, 3]) == [2, 4] == known(store, CUT)


def fit_measured(directory: Path) -> None:
    """Pipelines that measure find unlike costs of the blocks, and by them unlike cuts."""

    def measured(*_: Any) -> tuple[BlockProfile, ...]:
        (directory / f"measured-{os.environ['SDPIPE_PIPELINE']}-{os.getppid()}").touch()
        heavy = int(os.environ["SDPIPE_PIPELINE"]) % 2 * 5
        return tuple(BlockProfile(10.0 if block == heavy else 1.0, 1.0, 8, 8) for block in range(len(Model().net)))

    planning.profile = measured
    fit(directory, samples=SAMPLES, options={"num_stages": 2, "partition": "balanced"})


@pytest.mark.distributed
def test_all_pipelines_are_cut_alike_and_a_newcomer_does_not_measure(tmp_path: Path) -> None:
    work = partial(fit_measured, tmp_path)
    with elastic_run(tmp_path, 2, 2, work=work) as run:
        run.wait_for_turns([0, 1], 8)
        measured = {path.name for path in tmp_path.glob("measured-*")}
        assert measured
        run.kill(0)
        run.wait(lambda: run.ended(0), "the end of its other stage")
        run.restart_scheduler()
        run.wait_for_turns([1], 4)
        run.comes_back(0, work, 4)
        run.ends_as({0: [0, 0], 1: [0, 0]})
        assert {path.name for path in tmp_path.glob("measured-*")} == measured
        cuts: list[Any] = [
            [sorted(start[0]["state"]) for start in run.rows(pipeline, rank)] for pipeline in (0, 1) for rank in (0, 1)
        ]
        assert cuts[0] == cuts[2] * 2
        assert cuts[1] == cuts[3] * 2
