"""A worker says in a file what the scheduler shall decide by."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import pytest

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.policies.phd_psgd import PHDPSGD
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler import policy_file
from tests.disks import disk_of


@pytest.mark.parametrize(
    "policy", [SemiDecentralized(window=math.inf, connectivity=3), PHDPSGD(groups=[[0, 2], [1]])], ids=repr
)
def test_the_first_one_counts_and_all_are_equal(policy: PolicyConfig, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    for _ in range(2):
        policy_file.offer(path, policy)
        assert policy_file.read(path) == policy
    with pytest.raises(
        ConfigurationError, match=r"asks for .*no_sync.*was started for .*(semi_decentralized|phd_psgd)"
    ):
        policy_file.offer(path, NoSync())
    assert os.listdir(tmp_path) == ["policy.json"]


def test_modules_are_found_where_the_worker_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "policy.json"
    monkeypatch.setattr(sys, "path", [*sys.path, "/somewhere/of/the/user"])
    policy_file.offer(path, NoSync())
    monkeypatch.setattr(sys, "path", sys.path[:-1])
    policy_file.read(path)
    assert sys.path[-1] == "/somewhere/of/the/user"


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"policy": {"type": "no_sync"}})])
def test_another_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "policy.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="is no policy file"):
        policy_file.read(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"is no policy file of a worker.*No such file"):
        policy_file.read(tmp_path / "policy.json")


def test_a_full_disk(tmp_path: Path) -> None:
    """Who comes later need not write; the first one has to, and says so."""
    policy_file.offer(tmp_path / "policy.json", NoSync())
    with disk_of(0):
        policy_file.offer(tmp_path / "policy.json", NoSync())
        with pytest.raises(ConfigurationError, match=r"other.json cannot be written \(File too large\)"):
            policy_file.offer(tmp_path / "other.json", NoSync())
    assert [path.name for path in tmp_path.iterdir()] == ["policy.json"]
