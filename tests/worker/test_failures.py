"""Whatever goes wrong ends the run soon, with one clear message and without a process left behind."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_sdpipe import AllReduce, SDPipeStrategy, SemiDecentralized
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.scheduler.credentials import own_keys, read_scheduler_keys
from recipes.harness import namespaces
from tests.features.running import Regression, as_torchrun
from tests.features.table import refused, supported
from tests.namespaces import hosts
from tests.own_session import Script, module, script, scripts
from tests.patience import until
from tests.scheduler.live_scheduler import serving
from tests.scripts import endings, run_case
from tests.strategy.test_strategy import fit
from tests.workers import free_port


def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """What marks the environment of all processes that are executed from now on."""
    marker = f"sdpipe-test-{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv("SDPIPE_TEST_RUN", marker)
    return marker


def processes_of(marker: str) -> dict[int, str]:
    left = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (process / "environ").read_text(errors="replace"):
                left[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
        except OSError:  # ended meanwhile, or not ours
            continue
    return {number: command for number, command in left.items() if command}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("stages", "4 workers cannot form pipelines of num_stages=3 stages.*Use num_stages from"),
        ("too_many_stages", "num_stages=4 is more than the model's 3 blocks"),
        ("partition", r"partition=\[3, 2\] does not cut 3 blocks into 2 stages"),
        ("no_chain", "No blocks were found in Model"),
        ("small_batch", "A batch of 8 samples cannot be split into num_micro_batches=9"),
        ("manual", "Model uses manual optimization"),
        ("compiled", "Model is compiled as one piece.*for layer in model.layers: layer.compile()"),
        ("compiled_chain", "net is compiled as one"),
    ],
)
def test_a_wrong_configuration_is_refused_before_any_process_starts(tmp_path: Path, case: str, message: str) -> None:
    with script(tmp_path, run_case.main, case) as run:
        run.ends(1)
        printed = run.printed()
    assert re.search(message, printed), printed
    assert printed.count("Traceback") == 1
    assert "Starting with" not in printed
    assert re.search(message, printed.splitlines()[-1])


def _with_port(port: int) -> None:
    run_case.main("none", "fork", MASTER_PORT=str(port), MASTER_ADDR="127.0.0.1")


@refused("Failures", "a port that is in use", "is in use by another program")
@pytest.mark.distributed
def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with script(tmp_path, _with_port, port) as run:
            run.ends(1)
            assert f"MASTER_PORT={port} is in use by another program" in run.printed()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "killed",
            r"((receiving from|sending to) stage 0 \(rank 1\) failed|Stage 0 of pipeline 0 \(rank 1\) failed first)",
        ),
        ("killed_all_reduce", r"averaging gradients among ranks \[0, 1\] failed"),
        ("killed_het_pipe", r"((receiving from|sending to) pipeline 1 \(rank 1\)|meeting among ranks \[0, 1\]) failed"),
        (
            "killed_ad_psgd",
            # of which of these it hears first is chance
            r"((exchanging with pipeline 1 of stage 0|meeting among ranks \[0, 1\]) failed"
            r"|Stage 0 of pipeline 1 \(rank 1\) failed first)",
        ),
    ],
)
def test_a_worker_that_is_killed_ends_the_run_whatever_the_method(tmp_path: Path, case: str, message: str) -> None:
    """No launcher looks after these two."""
    port = free_port()
    works = [(as_torchrun, rank, port, 2, run_case.main, (case,)) for rank in range(2)]
    with scripts(tmp_path, *works) as (survivor, killed):
        assert killed.wait() == -signal.SIGKILL
        assert survivor.wait() == 1
        assert killed.left() == survivor.left() == []
        assert re.search(message, survivor.printed()), survivor.printed()


@supported(
    "Failures",
    "`SIGSTOP` of any rank, or a call that holds the GIL",
    "is waited for, for `timeout=` at most; a machine that cannot be reached ends the run after half a minute",
)
@pytest.mark.distributed
def test_a_worker_that_is_stopped_ends_those_that_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And itself, when it wakes up. The scheduler, which has not heard of it for three seconds by then, waits."""
    port = free_port()
    works = [(as_torchrun, rank, port, 2, run_case.main, ("stopped",)) for rank in range(2)]
    with serving(NoSync(), 1, 2, keys=read_scheduler_keys(own_keys()[0]), worker_timeout=3.0) as standing:
        monkeypatch.setenv("SDPIPE_SCHEDULER", standing.address)
        with scripts(tmp_path, *works) as (survivor, stopped):
            assert survivor.wait() == 1
            os.kill(stopped.pid, signal.SIGCONT)
            assert stopped.wait() == 1
            printed = survivor.printed()
    assert re.search(r"averaging gradients among ranks \[0, 1\] failed", printed), printed


def on_host(name: str, rank: int, address: str) -> None:
    namespaces.enter(name)
    own = {
        "SDPIPE_SCHEDULER": address,
        "SDPIPE_KEY_FILE": str(own_keys()[1]),
        "GLOO_SOCKET_IFNAME": namespaces.INTERFACE,
    }
    with mock.patch.dict(os.environ, own):
        as_torchrun(rank, 29400, 2, partial(run_case.main, MASTER_ADDR=namespaces.address(0)), ("parted",))


@supported(
    "Failures",
    "two workers that reach the scheduler but not each other",
    "end the run after half a minute in which no byte moves; both are named",
)
@pytest.mark.distributed
def test_two_workers_that_reach_the_scheduler_but_not_each_other_are_named(tmp_path: Path) -> None:
    options = {"keys": read_scheduler_keys(own_keys()[0]), "worker_timeout": 3.0}
    with hosts(3) as (*names, center), ExitStack() as stack:
        with namespaces.inside(center):
            bind = f"tcp://{namespaces.address(2)}:*"
            standing = stack.enter_context(serving(NoSync(), 1, 2, bind=bind, **options))
        works = [(on_host, name, rank, standing.address) for rank, name in enumerate(names)]
        runs = stack.enter_context(scripts(tmp_path, *works))
        until(lambda: "it trains" in runs[1].printed() or not runs[1].process.is_alive(), runs[1].printed)
        for number in range(2):
            namespaces.part(number)
        for run in runs:
            assert run.wait() == 1
            said = re.search(r"no byte has come or gone between them for 3 s: worker (.*)\n", run.printed())
            assert said, run.printed()
            for pipeline in range(2):
                assert re.search(rf"\(stage 0, pipeline {pipeline}\) is [^;]* among ranks \[0, 1\]", said[1])
            assert re.search(r"nothing that it sent to 10.232.1.[12] is acknowledged", said[1])


WHAT_RUNS = [
    "pipelines × stages = 2 × 2",
    "stage 0: net.0 … net.1 (2), 20 parameters, on rank 1 (cpu), rank 3 (cpu)",
    "stage 1: net.2, 5 parameters, on rank 0 (cpu), rank 2 (cpu)",
    "schedule: 1f1b, 2 micro-batches of a mini-batch",
    f"method: {SemiDecentralized()!r}",
    "exchange: in full precision",
    "data: dealt by speed if the loader allows it",
]
"""Said once, when training begins."""


def any_rank(first: int) -> list[Any]:
    """All ranks, of which ``make test`` tries one: 0, with which the scheduler ends, or 3, which shares neither stage
    nor pipeline with it."""
    return [first, *(pytest.param(rank, marks=pytest.mark.slow) for rank in range(4) if rank != first)]


@supported("Failures", "an exception on any rank", "ends all ranks; the first one's reason is printed")
@pytest.mark.distributed
@pytest.mark.parametrize("rank", any_rank(3))
def test_an_exception_on_any_rank_ends_all(tmp_path: Path, rank: int) -> None:
    with script(tmp_path, endings.main, "fork", f"raise:{rank}") as run:
        run.ends(1)
        assert first_failure(run) == (rank, "ZeroDivisionError: the user's own mistake")
        printed = run.printed()
    assert "ZeroDivisionError: the user's own mistake" in printed
    (said,) = re.findall(r"SDPipe: (.*?)\n  scheduler: tcp://127.0.0.1:\d+, started by rank 0", printed, re.DOTALL)
    assert said.split("\n  ") == WHAT_RUNS


@supported("Failures", "`SIGKILL` of any rank", "ends all ranks; where it was rank 0, after some seconds")
@pytest.mark.distributed
@pytest.mark.parametrize("rank", any_rank(0))
def test_the_death_of_any_rank_ends_all(tmp_path: Path, rank: int) -> None:
    with script(tmp_path, endings.main, "fork", f"kill:{rank}") as run:
        run.ends(1)
        assert f"process {rank} terminated with signal SIGKILL" in run.printed()


@supported("Failures", "`SIGTERM` to any rank", "ends all ranks, after the batch in hand; its exit code is 143")
@pytest.mark.distributed
@pytest.mark.parametrize("rank", any_rank(3))
def test_sigterm_to_any_rank_ends_all(tmp_path: Path, rank: int) -> None:
    with script(tmp_path, endings.main, "fork", "none") as run:
        os.kill(training_ranks(run)[rank], signal.SIGTERM)
        run.ends(1)
        assert first_failure(run) == (rank, "ended by SIGTERM")
        # the first process hears either of the one that ended, or of one that this one took down with it
        told = f"process {rank} terminated with exit code 143|failed first and ended the run: ended by SIGTERM"
        assert re.search(told, run.printed())


@supported("Failures", "Ctrl-C", "in a terminal, which tells all ranks, or `SIGINT` to the first process alone")
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("number", "tell"),
    [
        (signal.SIGINT, os.killpg),
        (signal.SIGTERM, os.kill),
        pytest.param(signal.SIGINT, os.kill, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, os.killpg, marks=pytest.mark.slow),
    ],
    ids=["SIGINT to all", "SIGTERM to the first", "SIGINT to the first", "SIGTERM to all"],
)
def test_a_signal_to_the_first_process_or_to_all_ends_all(tmp_path: Path, number: signal.Signals, tell: Any) -> None:
    with script(tmp_path, endings.main, "fork", "none", 2) as run:
        training_ranks(run, 2)
        tell(run.pid, number)
        run.ends(1 if number == signal.SIGINT else -signal.SIGTERM)


def in_the_background(*arguments: Any) -> None:
    """As a shell starts it with ``&``, and nohup."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    endings.main(*arguments)


@supported("Failures", "`SIGKILL` of the first process", "ends all ranks, in the background of a shell too")
@pytest.mark.distributed
def test_the_death_of_the_process_that_forked_ends_all(tmp_path: Path) -> None:
    with script(tmp_path, in_the_background, "fork", "none", 2) as run:
        training_ranks(run, 2)
        os.kill(run.pid, signal.SIGKILL)
        run.ends(-signal.SIGKILL)


@pytest.mark.distributed
@pytest.mark.parametrize("fault", [pytest.param("term:0", marks=pytest.mark.slow), "linger:0"])
def test_sigterm_to_the_users_process_ends_those_that_run_its_script_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Also when they end first, while it waits for them, and take longer than it waits."""
    marker = mark(monkeypatch)
    with script(tmp_path, module, "tests.scripts.endings", "popen", fault, "2") as run:
        assert run.wait() == 143, run.printed()
        assert run.left(0) == []
    assert "Traceback" not in run.printed()
    assert processes_of(marker) == {}


def training_ranks(run: Script, count: int = 4) -> dict[int, int]:
    """The process of each rank, once all are training."""

    def found() -> dict[str, str]:
        return dict(re.findall(r"rank (\d) is process (\d+)\n", run.printed()))

    until(lambda: len(found()) == count or not run.process.is_alive(), run.printed)
    return {int(rank): int(process) for rank, process in found().items()}


def first_failure(run: Script) -> tuple[int, str]:
    """The rank and its reason, as the scheduler wrote it down: once."""
    pattern = r"scheduler: worker \(stage (\d), pipeline (\d)\) failed first: (.*); the run is over"
    ((stage, pipeline, reason),) = re.findall(pattern, run.printed())
    return 2 * int(pipeline) + (1 - int(stage)), reason


class Failing(Regression):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == 1:
            raise ZeroDivisionError("the user's own mistake")
        return super().training_step(batch, batch_idx)


def held() -> tuple[list[str], set[str]]:
    """The sockets and the child processes of this process."""
    links = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    threads = Path("/proc/self/task").iterdir()
    children = {child for thread in threads for child in (thread / "children").read_text().split()}
    return sorted(link for link in links if link.startswith("socket:")), children


@supported("Failures", 'a new `fit` after a failed one, with `start_method="fork"`', "in the same process")
@pytest.mark.distributed
def test_a_new_fit_after_a_failed_one(tmp_path: Path) -> None:
    def strategy() -> SDPipeStrategy:
        return SDPipeStrategy(2, AllReduce(), start_method="fork")

    before, variables = held(), dict(os.environ)
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="the user's own mistake"):
        fit(tmp_path / "failed", strategy(), 4, 4, Failing())
    assert multiprocessing.active_children() == []
    assert held() == before
    assert dict(os.environ) == variables
    trainer, _ = fit(tmp_path / "again", strategy(), 4, 4)
    assert trainer.callback_metrics["loss_epoch"] < 1
