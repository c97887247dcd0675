from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_sdpipe.checkpoints import distributed
from lightning_sdpipe.checkpoints.distributed import is_distributed, replacing
from lightning_sdpipe.partition.ownership import Ownership
from lightning_sdpipe.topology.mesh import Mesh


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


def test_each_pipeline_gets_its_own_state_of_a_later_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one, of plain SGD, has no state in any pipeline."""
    saved = {f"{distributed._of(1)}.{row}.0.exp_avg": None for row in range(2)}
    monkeypatch.setattr(distributed, "_metadata", lambda _: SimpleNamespace(state_dict_metadata=saved))
    monkeypatch.setattr(distributed, "_read", lambda path, metadata, wanted, files: {"wanted": wanted})
    for rank, key in enumerate(saved):
        groups: Any = SimpleNamespace(mesh=Mesh.build(2, 1), rank=rank)
        found = distributed.read_part(Path(), Ownership({}), [[0], [0]], groups, SimpleNamespace())  # type: ignore[arg-type]
        assert found == {"wanted": [key]}
