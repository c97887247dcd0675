from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_sdpipe.checkpoints.distributed import is_distributed, replacing


def directory(path: Path) -> None:
    path.mkdir()
    (path / "meta.pt").touch()


@pytest.mark.parametrize("make", [directory, Path.touch, lambda path: None], ids=["directory", "file", "nothing"])
def test_a_checkpoint_takes_the_place_of_any_kind(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "last.ckpt"
    make(path)
    with replacing(path):
        assert not path.exists()
        path.write_text("new")
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def test_what_was_there_is_kept_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    directory(path)

    def replace() -> None:
        with replacing(path):
            path.write_text("the beginn")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace()
    assert is_distributed(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]
