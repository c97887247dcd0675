from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_sdpipe.partition import profile
from lightning_sdpipe.partition.profile import BlockProfile

CPU = torch.device("cpu")
PROFILE = (BlockProfile(0.25, 0.5, 1024, 1024), BlockProfile(0.125, 0.25, None, 0))
BLOCKS = [("0",), ("1",)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lightning_sdpipe" / "profiles"


def test_a_stored_profile_is_found_again(own_cache: Path) -> None:
    assert profile.load("key") is None
    profile.store("key", PROFILE)
    assert profile.load("key") == PROFILE
    assert [path.name for path in own_cache.iterdir()] == ["key.json"]


def test_a_damaged_file_is_no_profile(own_cache: Path) -> None:
    profile.store("key", PROFILE)
    (own_cache / "key.json").write_bytes(b'[{"forward_seconds": "soon"}]')
    assert profile.load("key") is None


def test_a_directory_that_cannot_be_written_is_no_error(own_cache: Path) -> None:
    own_cache.parent.write_text("a file where a directory should be")
    profile.store("key", PROFILE)
    assert profile.load("key") is None


def test_model_shape_and_blocks_make_the_key() -> None:
    def key(width: int = 4, batch: int = 2, blocks: list[tuple[str, ...]] = BLOCKS) -> str:
        model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))
        return profile.fingerprint(model, blocks, {"x": torch.zeros(batch, 4)}, CPU)

    assert key() == key()
    assert len({key(), key(width=5), key(batch=3), key(blocks=[("0", "1")])}) == 4
