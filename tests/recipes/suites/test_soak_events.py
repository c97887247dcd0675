"""What the soak does to a run: it is drawn from a seed, it is undone, and it spares one member unless that is drawn."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.suites import namespaces
from recipes.suites.faults import small_disks
from recipes.suites.faults.injected_faults import Fault
from recipes.suites.soak import events
from recipes.suites.soak.events import CUTS, FULL, Events

PIPELINES, STAGES = 3, 2
LOST = "all pipelines are lost (pipeline 0 lost)"


class Acted:
    """A run in virtual time: pipelines are members as long as they live, and all finish after a minute."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, lasts: float = 60.0) -> None:
        self.directory, self.work = directory, SimpleNamespace(num_pipelines=PIPELINES, num_stages=STAGES, batches=5)
        self.now, self.lasts, self.over, self.resumes = 0.0, lasts, "", True
        self.all_hit = False
        """Was there a moment without a pipeline that nothing had happened to?"""
        self.codes: dict[int, list[int | None]] = {}
        self.starts: dict[int, int] = {}
        self.trains: dict[int, bool] = {}
        self.stopped: set[int] = set()
        self.unplugged: set[int] = set()
        self.full: set[Path] = set()
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep, strftime=lambda _: "")
        monkeypatch.setattr(events, "time", clock)
        monkeypatch.setattr(namespaces, "plug", self.plug)
        monkeypatch.setattr(small_disks, "fill", self.full.add)
        monkeypatch.setattr(small_disks, "empty", self.full.remove)

    def sleep(self, seconds: float) -> None:
        before, self.now = self.now, self.now + 5 * seconds
        if int(before) < int(self.now):
            (self.directory / "0001-0-0.diary").write_text("x" * int(self.now))
        if self.now > self.lasts:
            self.codes = {i: [0 if code is None else code for code in codes] for i, codes in self.codes.items()}
        elif not [i for i in self.members() if i not in self.stopped | self.unplugged]:
            self.all_hit = True

    def plug(self, number: int, on: bool) -> None:
        (self.unplugged.remove if on else self.unplugged.add)(number)

    def launch(self, pipeline: int, fault: Fault | None = None) -> None:
        self.trains[pipeline] = not self.over
        self.codes[pipeline] = [1 if self.over else None] * STAGES
        self.starts[pipeline] = self.starts.get(pipeline, 0) + 1

    def start(self) -> None:
        """Launch all; it has a scheduler."""
        for pipeline in range(PIPELINES):
            self.launch(pipeline)

    def wait(self, holds: Any, what: str) -> None:
        assert holds(), what

    def restart_scheduler(self) -> None:
        """It goes on at once."""

    def kill(self, pipeline: int, rank: int = 0, number: int = signal.SIGKILL) -> None:
        assert self.codes[pipeline][rank] is None
        if number == signal.SIGSTOP:
            self.stopped.add(pipeline)
            return
        self.stopped.discard(pipeline)
        if number != signal.SIGCONT:
            self.codes[pipeline][rank] = -number
        if not (self.resumes or self.members()):
            self.over = LOST

    def lives(self, pipeline: int) -> bool:
        return self.codes[pipeline] == [None] * STAGES

    def exit_codes(self, pipeline: int) -> list[int | None]:
        return self.codes.get(pipeline, [])

    def end(self, pipeline: int) -> None:
        self.codes.pop(pipeline)
        self.stopped.discard(pipeline)

    def start_of(self, pipeline: int) -> int:
        return self.starts[pipeline]

    def updates(self, pipeline: int) -> int:
        return int(self.trains[pipeline])

    def members(self) -> list[int]:
        return sorted(i for i in self.codes if self.lives(i))

    def status(self) -> Any:
        members = self.members()
        return SimpleNamespace(members=SimpleNamespace(lives=members, leader=members[0] if members else None))

    def failure(self) -> str | None:
        return self.over or None


def happened(world: Any, seed: int, left_out: frozenset[str] = frozenset(), count: int = 40) -> Events:
    disks = {kind: world.directory / kind for kind in FULL}
    return Events(world, random.Random(seed), count, 1.0, left_out, disks).until_the_end()


@pytest.mark.parametrize("seed", range(2))
def test_one_member_is_left_alone_and_everything_is_undone(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Acted(tmp_path, monkeypatch)
    first = happened(world, seed, frozenset({"all"}))
    assert first.count > 20
    assert not world.all_hit
    assert not world.stopped | world.unplugged
    assert not world.full
    assert first.bystanders == 0
    again = happened(Acted(tmp_path, monkeypatch), seed, frozenset({"all"}))
    assert [line.split(" ", 2)[2] for line in again.told] == [line.split(" ", 2)[2] for line in first.told]


def test_what_cannot_be_made_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = happened(Acted(tmp_path, monkeypatch, lasts=150.0), 1, frozenset({*CUTS, *FULL}), count=120)
    assert not done.what.keys() & {*CUTS, *FULL}
    assert done.left_out.keys() == {*CUTS, *FULL}
    assert {"all", "two", "leader_and_scheduler", "stop"} < done.what.keys()


def test_a_run_that_lost_all_ends_by_that_name_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "WEIGHTS", {"all": 1})
    world = Acted(tmp_path, monkeypatch)
    world.resumes = False
    assert happened(world, 1).ended == LOST
    world = Acted(tmp_path, monkeypatch)
    start = world.start
    monkeypatch.setattr(world, "start", lambda: (start(), setattr(world, "over", LOST)))
    with pytest.raises(TimeoutError, match=r"pipelines \[0, 1, 2\] were not even hit"):
        happened(world, 1, count=0)
