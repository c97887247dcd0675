"""A policy from outside the package: the example of docs/policies.md, in all the places that take one."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hydra
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sdpipe import ConfigurationError, SDPipeStrategy
from lightning_sdpipe.cli import main
from lightning_sdpipe.configuration import check
from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.policies import Worker, registry
from lightning_sdpipe.scheduler.credentials import WorkerKeys
from lightning_sdpipe.scheduler.log.event_log import read_log
from lightning_sdpipe.scheduler.server.process import SchedulerProcess
from lightning_sdpipe.simulate import simulate
from tests.policies.scripted import straggling
from tests.recipes.test_conf import composed
from tests.scheduler.live_scheduler import clients, serving
from tests.strategy.test_strategy import fit

DOCS = Path(__file__).parents[2] / "docs" / "policies.md"
NAME = "my_package.policies:RoundRobin"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the user's package lies."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").touch()
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (source,) = [block for block in blocks if "class RoundRobin(" in block]
    (folder / "my_package" / "policies.py").write_text(f"{source}\nprint('imported')\n")
    return folder


@pytest.fixture
def own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The user's module, as it is imported in their own process."""
    monkeypatch.syspath_prepend(folder)
    yield registry.import_module("my_package.policies")
    for name in ("my_package.policies", "my_package"):
        sys.modules.pop(name, None)


def test_it_is_found_checked_and_simulated(own: ModuleType) -> None:
    assert registry.make(NAME, {"size": 3}) == own.RoundRobin(size=3)
    assert registry.name_of(own.RoundRobin()) == NAME
    for values, message in (
        ({"size": 1}, "size=1"),
        ({"sise": 2}, "did you mean size"),
        ({"size": "2"}, "Expected `int`"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            registry.make(NAME, values)

    @settings(max_examples=30, deadline=None)
    @given(st.integers(1, 4), st.integers(1, 9), st.integers(2, 4), st.integers(0, 99), st.booleans())
    def nobody_gets_stuck(stages: int, pipelines: int, size: int, seed: int, asynchronous: bool) -> None:
        run = simulate(own.RoundRobin(size=size), straggling(stages, pipelines, 12, seed, asynchronous))
        assert run.stuck == []
        assert set(run.reasons) == {"its turn"}
        assert max(len(group.members) for _, group in run.groups) == min(size, pipelines)

    nobody_gets_stuck()


def test_a_scheduler_in_this_process_and_in_another_serve_it(own: ModuleType, tmp_path: Path) -> None:
    def train(address: str, credentials: WorkerKeys | None = None) -> None:
        workers = [Worker(0, i) for i in range(3)]
        with clients(address, *workers, credentials=credentials, joins=True) as (a, b, c):
            for iteration, members in ((0, (0, 1)), (1, (1, 2))):
                for client in (a, b, c):
                    client.ready(iteration)
                groups = [client.group() for client in (a, b, c)]
                (pair,) = {group for group in groups if len(group.members) == 2}
                assert pair.members == tuple(Worker(0, i) for i in members)
                assert pair.reason == "its turn"

    with serving(own.RoundRobin(), 1, 3) as server:
        train(server.address)
    log = tmp_path / "scheduler.jsonl"
    with SchedulerProcess.embedded(own.RoundRobin(), 1, 3, log=log) as scheduler:
        train(scheduler.address, credentials=scheduler.credentials)
    (record,) = read_log(log)
    assert record.beginning.policy == {"type": NAME, "size": 2}
    assert list(record.differences()) == []


def test_a_scheduler_that_cannot_import_it_says_so(
    own: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = own.RoundRobin()
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(folder)])
    with pytest.raises(
        SchedulerError, match=rf"{NAME} cannot be imported: ModuleNotFoundError: No module named 'my_pac"
    ):
        SchedulerProcess.embedded(config, 1, 2)


def test_the_commands_find_it_in_the_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    arguments = ["--policy", NAME, "--stages", "2", "--pipelines", "3"]
    assert main(["simulate", *arguments, "--set", "size=3", "--iterations", "5"]) == 0
    assert "by reason        its turn: " in capsys.readouterr().out
    assert main(["scheduler", *arguments, "--set", "size=1"]) == 2
    assert "size=1 is not allowed" in capsys.readouterr().err
    for name in ("my_package.policies", "my_package"):
        sys.modules.pop(name, None)


def test_a_hydra_configuration_names_it(own: ModuleType) -> None:
    overrides = ["sync=no_sync", "sync._target_=my_package.policies.RoundRobin", "+sync.size=3"]
    config = composed(*overrides)
    check(config.strategy)
    strategy = hydra.utils.instantiate(config.strategy)
    assert strategy.sync == own.RoundRobin(size=3)
    with pytest.raises(ConfigurationError, match=r"sync\.sise is not an option of RoundRobin; did you mean size"):
        check(composed(*overrides[:2], "+sync.sise=3"))


@pytest.mark.distributed
def test_training_goes_by_it(own: ModuleType, tmp_path: Path) -> None:
    strategy = SDPipeStrategy(2, sync=own.RoundRobin(), start_method="fork", log_dir=tmp_path / "logs")
    trainer, _ = fit(tmp_path, strategy, 4, 4)
    assert trainer.state.finished
    (record,) = read_log(tmp_path / "logs" / "scheduler.jsonl")
    assert record.beginning.policy == {"type": NAME, "size": 2}
    decisions: list[Any] = [group for entry in record.entries for group in entry.decisions]
    assert {group.reason for group in decisions} == {"its turn"}
    assert {len(group.members) for group in decisions} == {1, 2}
    assert list(record.differences()) == []


def test_the_import_path_will_do(own: ModuleType) -> None:
    assert SDPipeStrategy(sync=NAME).options.method.policy == own.RoundRobin()


def test_a_log_of_a_scheduler_that_runs_already_is_not_ours_to_ask_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"log_dir=.* does not reach the scheduler at tcp://127\.0\.0\.1:5555"):
        SDPipeStrategy(scheduler="tcp://127.0.0.1:5555", log_dir=tmp_path)
