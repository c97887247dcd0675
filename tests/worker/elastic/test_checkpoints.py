"""Checkpoints of elastic runs that each stage of the leader writes its part of."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_sdpipe.checkpoints import distributed
from lightning_sdpipe.checkpoints.files import WholeFiles
from tests.worker.elastic.jobs import BATCH, SAMPLES, ElasticRun, Model, elastic_run, fit

pytestmark = pytest.mark.distributed


def fit_and_be_killed_while_writing(directory: Path) -> None:
    """Rank 0 of pipeline 0 is, when it has begun the checkpoint of step 20."""
    begin, killed = distributed.async_save, directory / "killed"

    def watched(parts: Any, checkpoint_id: Path, **more: Any) -> Any:
        if os.environ["RANK"] == "0" and "step=20" in checkpoint_id.name and not killed.exists():
            killed.write_text(checkpoint_id.name)
            os.kill(os.getpid(), signal.SIGKILL)
        return begin(parts, checkpoint_id=checkpoint_id, **more)

    distributed.async_save = watched
    fit(directory, samples=SAMPLES, options={"num_stages": 2, "save_distributed_checkpoint": "async"})


def saved(run: ElasticRun) -> dict[int, Path]:
    """The whole checkpoints, by the step that they say."""
    return {int(path.stem.split("=")[-1]): path for path in run.directory.rglob("checkpoints/*.ckpt")}


def test_a_leader_is_killed_while_its_stages_write_and_the_next_one_writes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = partial(fit_and_be_killed_while_writing, tmp_path)
    with elastic_run(tmp_path, 2, 2, resume=True, work=work) as run:
        run.wait((tmp_path / "killed").exists, "the beginning of the second checkpoint")
        run.wait(lambda: run.ended(0), "the end of the leader's other stage")
        run.wait(lambda: max(saved(run)) >= 40, "checkpoints of the next leader")
        assert not list(tmp_path.rglob("*.part")), "the half is removed"
        newest = max(saved(run))
        for pipeline in range(2):
            run.end(pipeline)
        for pipeline in range(2):
            run.start(pipeline, work)
        run.wait(lambda: all(len(run.rows(pipeline)) == 2 for pipeline in range(2)), "their first turns")
        run.wait_for_turns([0, 1], 12)
        run.ends_as({0: [0, 0], 1: [0, 0]})
        started = {run.rows(pipeline)[-1][0]["started"] for pipeline in range(2)}
        assert started <= {newest - 10, newest}, "from a checkpoint that the scheduler has heard of"
        assert set(saved(run)) == {*range(10, run.rows(1)[-1][-1]["ended"] + 1, 10)} - {20}
    monkeypatch.setenv("SDPIPE_PIPELINE", "0")
    whole = distributed.read_whole(saved(run)[30], WholeFiles())
    assert set(whole["state_dict"]) == set(Model().state_dict())
    assert len(whole["optimizer_states"][0]["state"]) == len(list(Model().parameters()))
    assert BATCH * whole["global_step"] > 0
