"""Files appear under their names when they are complete, and whoever fails to write one leaves nothing behind."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.checkpoints import files
from lightning_sdpipe.checkpoints.distributed import DistributedWriter, read_whole
from lightning_sdpipe.checkpoints.files import WholeFiles
from lightning_sdpipe.errors import ConfigurationError, NotWrittenError, WorkerFailedError
from lightning_sdpipe.topology.groups import ProcessGroups
from lightning_sdpipe.topology.mesh import Mesh, OnePipeline
from tests.disks import disk_of
from tests.patience import limit
from tests.workers import run_workers


def checkpoint(size: int) -> dict[str, Any]:
    return {"state_dict": {"weight": torch.ones(size)}, "epoch": size}


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def test_what_was_there_stays_when_the_disk_is_full(tmp_path: Path) -> None:
    whole, path = WholeFiles(), tmp_path / "saved" / "last.ckpt"
    whole.save_checkpoint(checkpoint(10), path)
    message = (
        r"last.ckpt was not written \(File too large\): its tensors take 400,000 bytes, and [\d,]+ bytes are free in"
    )
    with disk_of(50_000), pytest.raises(NotWrittenError, match=message):
        whole.save_checkpoint(checkpoint(100_000), path)
    assert names(path.parent) == ["last.ckpt"]
    assert whole.load_checkpoint(path, weights_only=True)["epoch"] == 10
    whole.save_checkpoint(checkpoint(20), path)
    assert whole.load_checkpoint(path, weights_only=True)["epoch"] == 20


HARMED: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
    "else": lambda data: b"not found",
}


@pytest.mark.parametrize("harm", HARMED)
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_file_that_was_cut_off_is_named_with_those_beside_it(tmp_path: Path, harm: str, weights_only: bool) -> None:
    whole, path = WholeFiles(), tmp_path / "last.ckpt"
    for place in (path, tmp_path / "epoch=3.ckpt"):
        whole.save_checkpoint(checkpoint(1000), place)
    path.write_bytes(HARMED[harm](path.read_bytes()))
    with pytest.raises(ConfigurationError, match=r"checkpoint .*/last.ckpt is damaged .* there are: epoch=3.ckpt\."):
        whole.load_checkpoint(path, weights_only=weights_only)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "meta.pt"])
@pytest.mark.parametrize("harm", ["empty", "half", None])
def test_a_distributed_checkpoint_with_a_file_that_was_cut_off_is_named(
    tmp_path: Path, file: str, harm: str | None
) -> None:
    path = tmp_path / "last.ckpt"
    save({"state_dict": {"weight": torch.ones(1000)}}, checkpoint_id=path, no_dist=True)
    WholeFiles().save_checkpoint({"epoch": 1}, path / "meta.pt")
    assert read_whole(path, WholeFiles())["epoch"] == 1
    if harm is None:
        (path / file).unlink()
    else:
        (path / file).write_bytes(HARMED[harm]((path / file).read_bytes()))
    with pytest.raises((ConfigurationError, FileNotFoundError), match=r"last.ckpt( is damaged|/meta.pt)"):
        read_whole(path, WholeFiles())


class Writers:
    """Processes of one run that follow each other as the one that writes; all are this process, by other names."""

    mark = "2a-"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1
        monkeypatch.setattr(files, "_own_name", lambda: f"host-{self.now}")

    def files(self, number: int, during: Callable[[], None] = lambda: None) -> WholeFiles:
        """Those of one; ``during`` happens when it has been allowed to put its own in place."""
        writers = self

        class One:
            mark = Writers.mark

            def publish(self, path: Path) -> None:
                if number < writers.now:
                    raise WorkerFailedError("it was replaced")
                during()

            def published(self, path: Path) -> None:
                """It is not asked for here."""

        made = WholeFiles()
        made.publisher = One()
        return made

    def succeed(self, path: Path, size: int) -> None:
        """The second one writes."""
        self.now = 2
        self.files(2).save_checkpoint(checkpoint(size), path)


class Stopped:
    """What is being packed when its process is stopped, and wakes when its successor has written."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self.meanwhile = meanwhile

    def __reduce__(self) -> Any:
        self.meanwhile()
        return int, (0,)


def test_who_wakes_up_late_writes_nothing_into_what_its_successor_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers, path = Writers(monkeypatch), tmp_path / "last.ckpt"
    successor = partial(writers.succeed, path, 20_000)
    with pytest.raises(WorkerFailedError, match="replaced"):
        writers.files(1).save_checkpoint({**checkpoint(10_000), "late": Stopped(successor)}, path)
    assert names(tmp_path) == ["last.ckpt"]
    loaded = WholeFiles().load_checkpoint(path, weights_only=True)
    assert (loaded["epoch"], len(loaded["state_dict"]["weight"])) == (20_000, 20_000)


def test_who_is_stopped_between_being_allowed_and_renaming_finds_nothing_to_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers, path = Writers(monkeypatch), tmp_path / "last.ckpt"
    with pytest.raises(FileNotFoundError):
        writers.files(1, during=partial(writers.succeed, path, 20)).save_checkpoint(checkpoint(10), path)
    assert names(tmp_path) == ["last.ckpt"]
    assert WholeFiles().load_checkpoint(path, weights_only=True)["epoch"] == 20


def test_what_the_killed_left_is_removed_and_what_others_write_is_not(tmp_path: Path) -> None:
    host, path = socket.gethostname(), tmp_path / "last.ckpt"
    ended = subprocess.Popen(["true"])
    ended.wait()
    mine, alive = f"{os.getpid()}-abcd", f"{os.getppid()}-abcd"
    for name in (f"{host}-{ended.pid}-abcd", f"{host}-{mine}", f"{host}-{alive}", f"elsewhere-{ended.pid}-abcd"):
        (tmp_path / f".last.ckpt.{name}.writing").touch()
    WholeFiles().save_checkpoint(checkpoint(10), path)
    left = [
        f".last.ckpt.{name}.writing" for name in (f"elsewhere-{ended.pid}-abcd", f"{host}-{mine}", f"{host}-{alive}")
    ]
    assert names(tmp_path) == sorted([*left, "last.ckpt"])


def test_what_is_no_fault_of_the_disk_stays_what_it_is(tmp_path: Path) -> None:
    def fails() -> None:
        raise RuntimeError("no such state")

    with pytest.raises(RuntimeError, match="no such state"):
        WholeFiles().save_checkpoint({"state": Stopped(fails)}, tmp_path / "last.ckpt")
    assert names(tmp_path) == []


@pytest.mark.parametrize("ends", [True, False])
def test_a_full_disk_ends_the_run_or_is_said_each_time_and_the_last_whole_one_is_kept(
    tmp_path: Path, ends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = SDPipeStrategy(on_checkpoint_error=None if ends else "continue")
    strategy.save_checkpoint(checkpoint(10), tmp_path / "1.ckpt")
    for number in (2, 3):
        with disk_of(50_000), pytest.raises(NotWrittenError) if ends else nullcontext():
            strategy.save_checkpoint(checkpoint(100_000), tmp_path / f"{number}.ckpt")
        if not ends:
            strategy.remove_checkpoint(tmp_path / "1.ckpt")  # as ModelCheckpoint does, which takes it for written
            assert caplog.text.count(f"{number}.ckpt was not written") == 1
    assert names(tmp_path) == ["1.ckpt"]
    strategy.save_checkpoint(checkpoint(10), tmp_path / "4.ckpt")
    strategy.remove_checkpoint(tmp_path / "3.ckpt")
    assert names(tmp_path) == ["1.ckpt", "4.ckpt"]


def test_a_local_address_is_a_path(tmp_path: Path) -> None:
    WholeFiles().save_checkpoint(checkpoint(10), f"file://{tmp_path}/last.ckpt")
    assert names(tmp_path) == ["last.ckpt"]


def test_what_lies_elsewhere_is_written_as_lightning_does() -> None:
    whole = WholeFiles()
    whole.save_checkpoint(checkpoint(10), "memory://saved/last.ckpt")
    assert whole.load_checkpoint("memory://saved/last.ckpt", weights_only=True)["epoch"] == 10
    fsspec.filesystem("memory").rm("/saved", recursive=True)


def test_the_strategy_uses_them_unless_it_is_given_others(tmp_path: Path) -> None:
    own, wrapping = WholeFiles(), AsyncCheckpointIO()
    assert isinstance(SDPipeStrategy().checkpoint_io, WholeFiles)
    assert SDPipeStrategy(checkpoint_io=own).checkpoint_io is own
    strategy = SDPipeStrategy(checkpoint_io=wrapping)
    assert strategy.checkpoint_io is wrapping
    assert isinstance(wrapping.checkpoint_io, WholeFiles)


def _save(rank: int, path: Path, asynchronous: bool) -> list[str]:
    """Saves a checkpoint, and a longer one for which rank 1 has no space: the error of that, and what there is."""
    groups = ProcessGroups.open(Mesh.build(2, 2), limit())
    writer = DistributedWriter(groups, asynchronous)

    def save(size: int) -> None:
        parts: dict[str, Tensor] = {f"weight {rank}": torch.ones(size)}
        writer.save({"state_dict": parts, "epoch": size}, path, WholeFiles())
        assert (writer._pending is not None) == asynchronous
        writer.wait()

    save(10)
    message = ""
    with disk_of(50_000) if rank == 1 else nullcontext():
        try:
            save(100_000)
        except BaseException as error:  # as torch's CheckpointException is
            message = type(error).__name__
    torch.distributed.barrier()
    return [message, *names(path.parent)]


@pytest.mark.distributed
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_distributed_checkpoint_that_one_rank_cannot_write(tmp_path: Path, asynchronous: bool) -> None:
    path = tmp_path / "last.ckpt"
    for message, *left in run_workers(2, _save, path, asynchronous):
        assert message
        assert left == ["last.ckpt"]
    assert torch.load(path / "meta.pt")["epoch"] == 10


def _has_no_space_for_the_rest(rank: int, path: Path) -> list[str]:
    writer = DistributedWriter(ProcessGroups.open(Mesh.build(1, 1), limit()), False)
    with disk_of(50_000), pytest.raises(NotWrittenError, match=r"meta\.pt was not written"):
        writer.save({"state_dict": {}, "metrics": torch.ones(100_000)}, path, WholeFiles())
    return names(path.parent)


@pytest.mark.distributed
def test_nothing_is_left_where_there_is_no_space_for_the_rest_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    assert run_workers(1, _has_no_space_for_the_rest, tmp_path / "last.ckpt") == [[]]


class OneRun:
    """A run whose scheduler lets this pipeline write, or not."""

    mark = "2a-"

    def __init__(self, may: bool) -> None:
        self.may, self.heard = may, list[Path]()

    def publish(self, path: Path) -> None:
        if not self.may:
            raise WorkerFailedError("it was replaced")

    def published(self, path: Path) -> None:
        self.heard.append(path)


def _save_in_a_run(rank: int, path: Path, asynchronous: bool) -> list[str]:
    """Saves as pipeline 3 of an elastic run, and again when another one has taken its place."""
    groups = ProcessGroups.open(OnePipeline.of(2, 3, 4), limit())
    writer, heard = DistributedWriter(groups, asynchronous), list[Path]()
    for may in (True, False):
        run = OneRun(may)
        parts = {"state_dict": {f"weight {rank}": torch.ones(10)}, "optimizer_states": [{"state": {rank: {}}}]}
        try:
            writer.save(parts, path, WholeFiles(), run)
            assert (writer._pending is not None) == asynchronous
            writer.wait()
        except WorkerFailedError:
            assert (rank, may) == (0, False)
        heard += run.heard
    torch.distributed.barrier()
    return [*map(str, heard), *names(path.parent)]


@pytest.mark.distributed
@pytest.mark.parametrize("asynchronous", [False, True])
def test_who_leads_writes_all_parts_and_removes_what_a_lost_one_has_begun(tmp_path: Path, asynchronous: bool) -> None:
    path, other = tmp_path / "last.ckpt", ".last.ckpt.3b-elsewhere-7-abcd.part"
    for name in (".earlier.ckpt.2a-elsewhere-7-abcd.part", other):  # of this run, and of one that writes there, too
        (tmp_path / name).mkdir()
        (tmp_path / name / "meta.pt").touch()
    first, second = run_workers(2, _save_in_a_run, path, asynchronous)
    assert first == [str(path), other, "last.ckpt"]
    assert second == [other, "last.ckpt"]
    state = read_whole(path, WholeFiles())["state_dict"]
    assert sorted(state) == ["weight 0", "weight 1"]
