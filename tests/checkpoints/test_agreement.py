"""Ranks that would go on from unlike checkpoints, or of which some have none, are refused on all of them, by name."""

from __future__ import annotations

import functools
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.checkpoints.agreement import agree_on, described, digest
from lightning_sdpipe.checkpoints.files import WholeFiles
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.sync import AllReduce
from lightning_sdpipe.topology.groups import ProcessGroups
from lightning_sdpipe.topology.mesh import Mesh
from tests.features.running import Regression, on_four_ranks, pipelines, train_loader
from tests.workers import run_workers

pytestmark = pytest.mark.distributed


def _written(place: Any, step: int, value: float = 1.0) -> Any:
    state = {"weight": torch.full((100,), value)}
    WholeFiles().save_checkpoint({"epoch": step // 10, "global_step": step, "state_dict": state}, place)
    return place


def _agreed(rank: int, directory: Path) -> dict[str, str]:
    groups, own = ProcessGroups.open(Mesh.build(3, 1), None), directory / str(rank)
    same = _written(directory / f"one by {rank}.ckpt", 10)
    if rank == 0:
        _written(directory / "parts.ckpt" / "meta.pt", 10)
        Path(directory, "legacy.ckpt").write_bytes(b"of an old format")
    torch.distributed.barrier()
    shutil.copytree(directory / "parts.ckpt", own / "parts.ckpt")
    in_memory = _written(f"memory://{rank}/last.ckpt", 10 + rank // 2)
    cases = {
        "none": None,
        "copies": shutil.copy(directory / "one by 0.ckpt", own / "copy.ckpt"),
        "copies of parts": own / "parts.ckpt",
        "an old format": directory / "legacy.ckpt",
        "nowhere": directory / "no.ckpt",
        "other steps": _written(own / "last.ckpt", 10 + rank // 2),
        "other values": _written(own / "best.ckpt", 10, rank // 2),
        "other addresses": in_memory,
        "one has none": None if rank == 1 else same if rank else directory / "one by 0.ckpt",
        "one is not there yet": own / ("no.ckpt" if rank == 2 else "copy.ckpt"),
        "other parts": own / "parts.ckpt" if rank else _written(directory / "more.ckpt" / "meta.pt", 20).parent,
    }
    outcomes = {}
    for name, path in cases.items():
        try:
            outcomes[name] = "" if agree_on(path, groups) == path else "another path"
        except ConfigurationError as error:
            outcomes[name] = str(error).replace(str(directory), "…")
    fsspec.filesystem("memory").rm(f"/{rank}", recursive=True)
    return outcomes


UNLIKE = {
    "other steps": [
        "ranks [0]: …/0/last.ckpt (epoch 1, step 10, contents ",
        "ranks [2]: …/2/last.ckpt (epoch 1, step 11,",
    ],
    "other values": ["ranks [2]: …/2/best.ckpt (epoch 1, step 10, contents "],
    "other addresses": ["ranks [2]: memory://2/last.ckpt (epoch 1, step 11, contents "],
    "one has none": ["ranks [1]: none;"],
    "one is not there yet": ["ranks [2]: none at …/2/no.ckpt. Give all ranks the same one"],
    "other parts": ["ranks [0]: …/more.ckpt (epoch 2, step 20, contents "],
}


def test_each_rank_hears_what_the_others_have(tmp_path: Path) -> None:
    outcomes, *others = run_workers(3, _agreed, tmp_path)
    assert others == [outcomes, outcomes]
    for name, said in outcomes.items():
        for part in UNLIKE.get(name, []):
            assert part in said, name
        assert bool(said) == (name in UNLIKE), name


def test_a_server_that_gives_whole_files_only_has_the_same_as_a_disk(tmp_path: Path) -> None:
    path = _written(tmp_path / "last.ckpt", 10)
    serves = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), serves) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        found, missing = digest(f"{address}/last.ckpt"), digest(f"{address}/no.ckpt")
        said = described(f"{address}/last.ckpt", found)
        server.shutdown()
    assert (found, missing) == (digest(path), 0)
    assert said.startswith(f"{address}/last.ckpt (epoch 1, step 10, contents ")


def _fit(place: Path, path: Any, saves_at: Any = None) -> str:
    strategy = SDPipeStrategy(1, AllReduce(), save_distributed_checkpoint=saves_at is not None)
    saver = ModelCheckpoint(saves_at or place / "saved", save_last=True)
    try:
        pipelines(place, strategy, max_epochs=1, callbacks=[saver]).fit(Regression(), train_loader(), ckpt_path=path)
    except ConfigurationError as error:
        return str(error)
    return ""


def _with_a_disk_of_its_own(directory: Path) -> str:
    """The rank of another machine finds no checkpoint that rank 0 has written."""
    first = _fit(directory, None)
    rank = torch.distributed.get_rank()
    return first + _fit(directory if rank == 0 else directory / "other", "last")


def test_a_run_is_refused_before_it_waits_for_a_rank_without_a_file(tmp_path: Path) -> None:
    for said in on_four_ranks(_with_a_disk_of_its_own, tmp_path, count=2):
        assert "The ranks would continue from different checkpoints: ranks [0]: " in said
        assert "last.ckpt (epoch 0, step 4, contents" in said
        assert "ranks [1]: none. Give all ranks" in said


def test_parts_cannot_be_written_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (said,) = on_four_ranks(_fit, tmp_path, None, "memory://saved", count=1)
    assert "and memory://saved is not one. Pass such a directory as ModelCheckpoint(dirpath" in said
    assert not list(tmp_path.glob("memory*"))
