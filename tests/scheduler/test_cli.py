"""``sdpipe``: keys, service, status."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from lightning_sdpipe.cli import main
from lightning_sdpipe.errors import ConfigurationError, SchedulerError
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.policies import Worker
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler import command
from lightning_sdpipe.scheduler.client.wire import ask_status
from lightning_sdpipe.scheduler.credentials import (
    make_keys,
    own_keys,
    read_scheduler_keys,
    read_worker_keys,
    write_keys,
)
from lightning_sdpipe.scheduler.server.process import SchedulerSettings
from tests.scheduler.live_scheduler import clients, serving

W = Worker


def test_versions_for_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"python +3\.\d+\.\d+, tested; Linux.*, \d+ processors", lines[0])
    for package, line in zip(("lightning-sdpipe", "torch", "lightning"), lines[1:4], strict=True):
        assert re.fullmatch(rf"{package} +\d+\.\d+.*", line)


def test_keys_are_readable_by_their_owner_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygen", "-o", str(tmp_path / "keys")]) == 0
    printed = capsys.readouterr()
    for name in ("scheduler.key", "worker.key"):
        path = tmp_path / "keys" / name
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert str(path) in printed.out
        assert json.loads(path.read_text())["secret"] not in printed.out + printed.err
    scheduler = read_scheduler_keys(tmp_path / "keys" / "scheduler.key")
    worker = read_worker_keys(tmp_path / "keys" / "worker.key")
    assert (worker.scheduler_public, scheduler.worker_public) == (scheduler.public, worker.public)
    assert main(["keygen", "-o", str(tmp_path / "keys")]) == 2
    assert "exists already" in capsys.readouterr().err


def test_bad_key_files_are_refused(tmp_path: Path) -> None:
    scheduler, worker = write_keys(tmp_path)
    with pytest.raises(ConfigurationError, match=r"needs scheduler\.key"):
        read_scheduler_keys(worker)
    with pytest.raises(ConfigurationError, match=r"needs worker\.key"):
        read_worker_keys(scheduler)
    with pytest.raises(ConfigurationError, match="sdpipe keygen"):
        read_worker_keys(tmp_path / "absent")
    worker.chmod(0o640)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        read_worker_keys(worker)
    worker.write_text("{")
    worker.chmod(0o600)
    with pytest.raises(ConfigurationError, match="not a key file"):
        read_worker_keys(worker)


def test_status_shows_stages_and_pipelines(capsys: pytest.CaptureFixture[str]) -> None:
    spec = SemiDecentralized(window=60.0)
    scheduler_file, worker_file = own_keys()
    keys, credentials = read_scheduler_keys(scheduler_file), read_worker_keys(worker_file)
    with (
        serving(spec, 2, 2, keys=keys) as server,
        clients(server.address, W(0, 0), W(0, 1), W(1, 0), credentials=credentials, joins=True) as (a, b, _),
    ):
        a.ready(4)
        b.ready(3)
        a.group()
        b.group()
        a.ready(5)
        a.first_failure(1.0)  # by when the ready was heard
        assert main(["status", server.address]) == 0
        page = capsys.readouterr().out
        assert page.splitlines()[:4] == [
            "slow?    too short to tell (0 of 96 updates)",
            "",
            "no worker has reported an update yet",
            "",
        ]
        assert page.splitlines()[4:7] == [
            "pipeline  stage 0                 stage 1",
            "0         waiting 5 {0,1}         computing",
            "1         computing 3 (-2) {0,1}",
        ]
        assert "groups by size  2: 1" in page
        assert page.splitlines()[-6:-2] == [
            "sync-graph of stage 0 in the last 10 rounds: connected by the last 2 of them; ρ 0.000",
            "  P-Reduce's theorem 1: ρ̄ 0, for learning rates up to 1 where L = 1",
            "  rounds since  0",
            "  1             1",
        ]
        assert main(["status", server.address, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["policy"]["window"], told["signals"]) == (60.0, 3)
        assert {"stage": 0, "pipeline": 0, "state": "waiting", "iteration": 5}.items() <= told["workers"][0].items()
        groups = [{"number": 0, "round": 0, "pipelines": [0, 1], "reason": "everybody came", "weights": None}]
        assert (told["stages"][0]["groups"], told["stages"][0]["rounds_since_met"]) == (groups, [[0, 1, 1]])


@pytest.mark.parametrize("name", ["secret", "public", "scheduler_public"])
@pytest.mark.parametrize("wrong", [lambda key: key[:-1], lambda key: key + "0" * 5, lambda key: key[:-1] + "ü"])
def test_a_key_that_is_none_is_refused_at_once(
    tmp_path: Path, name: str, wrong: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, path = write_keys(tmp_path)
    keys = json.loads(path.read_text())
    path.write_text(json.dumps(keys | {name: wrong(keys[name])}))
    with serving(SemiDecentralized(), 1, 1) as server:
        assert main(["status", server.address, "--key-file", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"{path} is not a key file" in said
    assert keys["secret"][:8] not in said
    with pytest.raises(ConfigurationError, match="a key has 40 characters of the alphabet z85"):
        msgspec.structs.replace(make_keys()[0], secret=wrong(keys["secret"]))


def test_status_of_nobody_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "tcp://127.0.0.1:9", "--timeout", "0.1"]) == 2
    assert "tcp://127.0.0.1:9 did not answer within 0.1 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "window"], "NAME=VALUE"),
        (["--set", "window=-1"], "window=-1"),
        (["--set", "no_such=1"], "no_such"),
        (["--policy", "no_such"], "no_such"),
        (["--bind", "tcp://0.0.0.0:*"], "sdpipe keygen"),
        (["--bind", "nonsense"], "nonsense"),
    ],
)
def test_a_scheduler_that_cannot_start_says_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["scheduler", "--stages", "1", "--pipelines", "2", "--bind", "tcp://127.0.0.1:*"]
    assert main(base + arguments) == 2
    assert message in capsys.readouterr().err


def test_options_of_an_elastic_run_reach_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[SchedulerSettings] = []
    monkeypatch.setattr(command, "serve", lambda settings, *_: served.append(settings))
    options = "--min-pipelines 2 --start-pipelines 3 --gather 4 --hold-limit 5 --resume --policy-file policy.json"
    files = "--log events --newest newest --worker-timeout 6"
    assert main(f"scheduler --stages 1 --pipelines 4 {options} {files}".split()) == 0
    (settings,) = served
    assert settings.elastic == ElasticConfig(2, 3, 4.0, 5.0, resume=True)
    assert (settings.policy_file, settings.worker_timeout) == (Path("policy.json"), 6.0)
    assert (settings.files.log, settings.files.newest) == (Path("events"), Path("newest"))


def test_a_pipeline_has_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["scheduler", "--stages", "0", "--pipelines", "2"])
    assert "0: give a number of at least 1, or one for each pipeline, like 1,2,2" in capsys.readouterr().err


def test_the_keys_of_an_account_are_made_once_and_are_its_own() -> None:
    with ThreadPoolExecutor(4) as pool:
        made = {pool.submit(own_keys) for _ in range(4)}
    assert len({future.result() for future in made}) == 1
    scheduler, worker = own_keys()
    assert read_worker_keys(worker).scheduler_public == read_scheduler_keys(scheduler).public
    assert [path.stat().st_mode & 0o777 for path in (scheduler, worker, worker.parent)] == [0o600, 0o600, 0o700]
    assert sorted(worker.parent.parent.iterdir()) == [worker.parent]


def test_no_place_for_the_keys_of_an_account_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigurationError, match=r"no keys can be written .*sdpipe keygen"):
        own_keys()


def test_a_scheduler_that_is_started_by_hand_answers_its_own_account_only(capsys: pytest.CaptureFixture[str]) -> None:
    """The lines of docs/scheduler.md, which name no keys."""
    command = [sys.executable, "-m", "lightning_sdpipe.cli", "scheduler", "--bind", "tcp://127.0.0.1:*"]
    process = subprocess.Popen(
        [*command, "--stages", "2", "--pipelines", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        assert main(["status", address]) == 0
        assert "no worker has joined yet" in capsys.readouterr().out
        for credentials in (None, make_keys()[1]):
            with pytest.raises(SchedulerError, match=r"asks for a key|has another key"):
                ask_status(address, credentials=credentials)
    finally:
        process.kill()
        _, log = process.communicate()
    assert f"workers take {own_keys()[1]}" in log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_scheduler_of_its_own_serves_with_keys_until_told_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    scheduler_key, worker_key = write_keys(tmp_path)
    command = [sys.executable, "-m", "lightning_sdpipe.cli", "scheduler", "--bind", "tcp://127.0.0.1:*"]
    command += ["--stages", "1", "--pipelines", "1", "--key-file", str(scheduler_key)]
    command += ["--policy", "local_sgd", "--set", "every=2", "--verbose"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        with clients(address, W(0, 0), credentials=read_worker_keys(worker_key), joins=True) as (a,):
            a.ready(1)
            a.group()
        process.send_signal(number)
        _, log = process.communicate()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == 0
    assert "group 0 of stage 0: local step" in log
    for keys in make_keys():
        assert keys.secret not in log
    assert os.path.exists(worker_key)
