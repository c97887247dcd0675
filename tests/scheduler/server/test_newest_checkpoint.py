"""What a scheduler that died together with all pipelines still knows of their checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.membership.members import (
    Departed,
    Ended,
    Enrolled,
    Epoch,
    MemberDecision,
    Published,
    RunOver,
    Started,
)
from lightning_sdpipe.policies import Worker
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler.server.newest_checkpoint import keep_newest
from lightning_sdpipe.scheduler.server.service import SchedulerService

W = Worker(0, 0)


class Scheduler:
    """Of one pipeline, with a file that outlives it."""

    def __init__(self, directory: Path, resume: bool) -> None:
        service = SchedulerService(SemiDecentralized(), 1, 1, elastic=ElasticConfig(settle=0.0, resume=resume))
        self.decided: list[MemberDecision] = []
        self.elastic, self.now = service.members, 0.0
        self.elastic.on_decided = lambda now, event, decisions: self.decided.extend(decisions)
        keep_newest(directory / "newest", self.elastic, 0.0)

    def hear(self, *events: Enrolled | Published | Departed | Ended) -> list[MemberDecision]:
        self.decided.clear()
        for event in events:
            self.now += 1
            self.elastic._decide(event, self.now)
        return [*self.decided]


def first(decided: list[MemberDecision]) -> Started:
    return next(decision for decision in decided if isinstance(decision, Started))


@pytest.mark.parametrize("resume", [True, False])
def test_those_that_come_go_on_from_the_newest_checkpoint_if_they_may(tmp_path: Path, resume: bool) -> None:
    before = Scheduler(tmp_path, resume)
    assert not first(before.hear(Enrolled(W, 5, {}))).checkpoint
    before.hear(Published(W, 5, "/c/1.ckpt", 10), Published(W, 5, "/c/2.ckpt", 20))
    after = Scheduler(tmp_path, resume)
    decided = after.hear(Enrolled(W, 6, {}))
    assert first(decided).checkpoint == ("/c/2.ckpt" if resume else "")
    (epoch,) = [decision for decision in decided if isinstance(decision, Epoch)]
    assert epoch.reason == (
        "pipelines 0 start again from /c/2.ckpt, since no member was left" if resume else "pipelines 0 start together"
    )
    over = [decision for decision in after.hear(Ended(W, 6, "was killed")) if isinstance(decision, RunOver)]
    assert [decision.failed for decision in over] == ([] if resume else [True])
    assert resume or "no checkpoint was written" in over[0].reason, "that of another run does not count"


def test_a_run_that_has_finished_leaves_nothing_to_go_on_from(tmp_path: Path) -> None:
    Scheduler(tmp_path, True).hear(Enrolled(W, 5, {}), Published(W, 5, "/c/1.ckpt", 10), Departed(W, 5, True))
    assert not list(tmp_path.iterdir())
    assert not first(Scheduler(tmp_path, True).hear(Enrolled(W, 6, {}))).checkpoint


def test_half_a_file_or_a_full_disk_is_said_and_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "newest").write_text('{"type":"published","wor')
    scheduler = Scheduler(tmp_path, True)
    assert "cannot be read" in caplog.text
    assert not first(scheduler.hear(Enrolled(W, 5, {}))).checkpoint

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    scheduler.hear(Published(W, 5, "/c/1.ckpt", 10))
    assert "cannot be changed (No space left on device)" in caplog.text


@pytest.mark.parametrize("contents", [b"PK\x03\x04 a checkpoint", b'{"format":"sdpipe-journal/1"}', None])
def test_another_file_is_refused_and_stays(tmp_path: Path, contents: bytes | None) -> None:
    file = tmp_path / "newest"
    file.mkdir() if contents is None else file.write_bytes(contents)
    with pytest.raises(ConfigurationError, match="cannot be read" if contents is None else "does not name a checkp"):
        Scheduler(tmp_path, True)
    assert contents is None or file.read_bytes() == contents


def test_a_place_where_nothing_can_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"no file can be written in .*, for --newest: File exists"):
        Scheduler(tmp_path / "file", True)
