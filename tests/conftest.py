"""What holds for every test."""

from __future__ import annotations

import functools
import gc
import logging
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from lightning_sdpipe import openmp
from tests.large_pages import fork_in_large_pages
from tests.scheduler.forked import forked_schedulers

pytest_plugins = ["tests.patience"]
settings.register_profile("shared host", deadline=None, max_examples=30)  # an example may wait long for a core
settings.register_profile("long", deadline=None, max_examples=10_000)  # --hypothesis-profile=long, before a release
settings.register_profile("quick", deadline=None, max_examples=20)
settings.load_profile("shared host")
torch.set_num_threads(1)  # test files run side by side, and threads of small tensors would only wait for each other
os.environ["OMP_NUM_THREADS"] = "1"  # else Lightning gives a job of one process all cores, where others compute, too

LEAN = str(Path(__file__).parent / "lean")  # for the processes that tests start
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [LEAN, os.environ.get("PYTHONPATH")]))

gc.disable()  # until all is imported: what imports make, stays

# What takes longest, first: else one process of xdist would end with it alone. They wait for other processes mostly.
# Then all else that does, and at last what takes milliseconds.
LONG = [
    *("strategy/test_accelerators.py", "recipes/suites/test_smoke.py", "golden/test_golden.py", "test_sweep.py"),
    *("worker/elastic/test_runs.py", "features/test_6_freezing.py", "features/test_4_optimization.py"),
    *("recipes/test_train.py", "recipes/test_examples.py", "features/test_4_one_stage.py", "worker/test_failures.py"),
    *("worker/elastic/test_diloco.py", "features/test_5_checkpoints.py", "loop/test_dealt_training.py"),
    *("loop/test_uneven.py", "sync/test_hybrid_groups.py", "worker/elastic/test_all_reduce.py"),
    *("pipeline/test_side_channels.py", "worker/launching/test_launching.py", "worker/elastic/test_checkpoints.py"),
    *("worker/elastic/test_without_flush.py", "recipes/test_experiments.py", "features/test_1_trainer_options.py"),
    *("worker/test_unlike_pipelines.py", "features/test_4_lock_step.py", "supervision/test_command.py"),
    *("placement/test_measure.py", "features/test_1_trainer.py", "loop/test_every_checkpoint.py", "test_wheel.py"),
    *("sync/test_mover_choice.py", "sync/test_methods.py", "supervision/test_supervisor.py"),
    *("strategy/test_strategy.py", "sync/test_every_exchange.py", "exchange/test_encoded_mean.py"),
    *("recipes/test_conf.py", "test_configuration.py", "recipes/suites/test_virtual.py"),
    "recipes/suites/test_placement.py",
]


def pytest_xdist_auto_num_workers() -> int:
    """Two more than there are cores: tests that start processes wait for them about half of the time. With one more, a
    ninth of the time of two cores was left over."""
    return (os.cpu_count() or 1) + 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = {Path(__file__).parent / name: number for number, name in enumerate(LONG)}
    waits = {item.path for item in items if item.get_closest_marker("distributed")}
    items.sort(key=lambda item: (first.get(item.path, len(LONG)), item.path not in waits))


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # what is there now stays, and need not be looked through again and again
    gc.set_threshold(700, 10, 10)  # Python's own again, also where xdist has started this process as the tests' are
    gc.enable()


@functools.cache
def train_once() -> None:
    if "lightning.pytorch" in sys.modules:
        from tests.features.running import train_before_forks

        with tempfile.TemporaryDirectory() as directory, mock.patch.dict(os.environ):
            train_before_forks(Path(directory))
        gc.collect()
        gc.freeze()  # in forks, to look through what this has imported would copy it


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Train before the forks of a test and of its fixtures, except where forks are to have new devices: autograd that
    has run takes no more of them."""
    if item.get_closest_marker("distributed"):
        if not getattr(item.module, "NEW_DEVICES", False):  # type: ignore[attr-defined]
            train_once()
        if item.session.testscollected > 100:  # else what it costs at first is more than it spares
            fork_in_large_pages()


def inherited() -> dict[str, Any]:
    """What processes that later tests fork would find changed."""
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    heard = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
    return {
        "working directory": os.getcwd(),
        "process group of torch.distributed": dist.is_initialized(),
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        **{name: resource.getrlimit(getattr(resource, name)) for name in limits},
        **{number.name: signal.getsignal(number) for number in heard},
    }


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left() -> Iterator[None]:
    before = inherited()
    yield
    after = inherited()
    assert after == before, {name: value for name, value in after.items() if value != before[name]}


@pytest.fixture(autouse=True, scope="session")
def schedulers_are_forked() -> Iterator[None]:
    """Those that rank 0 of a training starts, and those of elastic runs."""
    names = ("lightning_sdpipe.worker.scheduler_connection", "recipes.harness.pipelines")
    places = [sys.modules[name] for name in names if name in sys.modules]
    if not places:  # no test trains
        yield
        return
    with forked_schedulers() as kind, pytest.MonkeyPatch.context() as patch:
        for place in places:
            patch.setattr(place, "SchedulerProcess", kind)
        yield


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In place of the one in the home directory."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_environment(cache: Path) -> Iterator[None]:
    """Lightning keeps seeds and ports in the environment, where the next test would find them."""
    before = dict(os.environ)
    os.environ["XDG_CACHE_HOME"] = str(cache)
    for name in ("XDG_RUNTIME_DIR", "PL_GLOBAL_SEED", "PL_SEED_WORKERS", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)


def _loggers() -> list[logging.Logger]:
    return [value for value in logging.root.manager.loggerDict.values() if isinstance(value, logging.Logger)]


@pytest.fixture(autouse=True, scope="module")
def own_loggers() -> Iterator[None]:
    """A suite that runs in a test silences Lightning, for the processes that later tests fork as well."""
    before = {each: (each.level, each.propagate, each.disabled, each.handlers[:]) for each in _loggers()}
    yield
    for logger in _loggers():
        level, propagate, disabled, handlers = before.get(logger, (logging.NOTSET, True, False, []))
        if logger.level != level:  # else each call would empty the caches of all loggers
            logger.setLevel(level)
        logger.propagate, logger.disabled, logger.handlers = propagate, disabled, handlers


@pytest.fixture
def two_threads() -> Iterator[None]:
    """This process computes with two."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)
    openmp.end_threads()  # else processes that later tests fork would wait for them
