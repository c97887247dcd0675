"""A job leaves nothing behind for the next one in the same process."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hydra import compose, initialize
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lightning_sdpipe.worker.launching import job
from tests.own_session import script


@pytest.fixture
def hydra_job_in(tmp_path: Path) -> Iterator[DictConfig]:
    """This process as one that runs job 3 of a sweep."""
    with initialize(version_base="1.3", config_path=None):
        overrides = ["+a=1", "+b=${a}", "+c={d: [1, '${b}'], nobody: '${oc.env:SDPIPE_NO_SUCH}'}", "+now='${now:%f}'"]
        config = compose(None, overrides, return_hydra_config=True)
    with read_write(config), open_dict(config):
        config.hydra.runtime.output_dir = str(tmp_path)
        config.hydra.job.num = 3
        config.hydra.mode = "MULTIRUN"
    HydraConfig.instance().set_config(config)
    yield config
    HydraConfig.instance().cfg = None


def test_what_was_registered_last_is_undone_first() -> None:
    done: list[str] = []
    job.begin()
    job.at_end(done.append, "first")
    job.at_end(done.append, "second")
    job.begin()  # a second Trainer in the same job
    assert done == []
    job.end()
    job.end()
    assert done == ["second", "first"]


def test_a_copy_of_the_process_undoes_nothing_of_it(tmp_path: Path) -> None:
    job.at_end((tmp_path / "undone").touch)
    with script(tmp_path, job.end) as copy:
        assert copy.wait() == 0
    assert not (tmp_path / "undone").exists()
    job.end()
    assert (tmp_path / "undone").exists()


def _collects(forks: int) -> None:
    """In copies of a process whose last process group is garbage: each has more threads than the group had."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    loop: list[Any] = [dist.new_group([0])]
    loop.append(loop)
    dist.destroy_process_group()
    gc.disable()
    del loop
    for _ in range(forks):
        if (copy := os.fork()) == 0:
            for _ in range(8):
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            gc.collect()
            os._exit(0)
        assert os.waitpid(copy, 0) == (copy, 0)


@pytest.mark.distributed
def test_a_copy_frees_no_process_group_of_the_process(tmp_path: Path) -> None:
    with script(tmp_path, _collects, 3) as process:
        assert process.wait() == 0


@pytest.mark.parametrize("now", [("runtime.output_dir", "another"), ("job.num", 4)])
def test_the_next_job_ends_the_one_before(hydra_job_in: DictConfig, now: tuple[str, Any]) -> None:
    done: list[str] = []
    job.begin()
    job.at_end(done.append, "undone")
    with read_write(HydraConfig.get()):
        OmegaConf.update(HydraConfig.get(), *now)
    job.begin()
    assert done == ["undone"]


def test_others_get_the_job_with_its_values_and_without_its_files(hydra_job_in: DictConfig, tmp_path: Path) -> None:
    assert job.in_sweep()
    rerun = job.rerun()
    assert rerun is not None
    assert rerun.file.parent == tmp_path
    assert rerun.command[-1] == f"--experimental-rerun={rerun.file}"
    config = pickle.loads(rerun.file.read_bytes())
    assert (config.b, config.c.d) == (1, [1, 1])
    assert not OmegaConf.is_interpolation(config, "now")
    assert OmegaConf.is_interpolation(config.c, "nobody")
    assert (config.hydra.job.num, config.hydra.runtime.output_dir) == (3, str(tmp_path))
    assert list(config.hydra.job_logging.handlers) == ["console"]
    assert config.hydra.job_logging.root.handlers == ["console"]
    assert "file" in hydra_job_in.hydra.job_logging.handlers


def test_a_program_without_hydra_is_no_hydra_job() -> None:
    assert (job.key(), job.in_sweep(), job.rerun()) == (None, False, None)
