"""Whatever goes wrong ends the run soon, with one clear message and without a process left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run_case(case: str, **environment: str) -> str:
    """What the run of ``case`` printed; it must fail, within a minute of its start, and leave nothing behind."""
    marker = f"sdpipe-test-{os.getpid()}-{time.monotonic_ns()}"
    finished = subprocess.run(
        [sys.executable, "-m", "tests.scripts.run_case", case],
        cwd=ROOT,
        env=os.environ | environment | {"SDPIPE_TEST_RUN": marker, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert finished.returncode != 0, finished.stdout
    assert processes_of(marker) == []
    return finished.stdout


def processes_of(marker: str) -> list[str]:
    left = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (process / "environ").read_text(errors="replace"):
                left.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:  # ended meanwhile, or not ours
            continue
    return [command for command in left if command]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("stages", "4 workers cannot form pipelines of num_stages=3 stages.*Use num_stages from"),
        ("too_many_stages", "num_stages=4 is more than the model's 3 blocks"),
        ("partition", r"partition=\[3, 2\] does not cut 3 blocks into 2 stages"),
        ("no_chain", "No chain of blocks was found in Model"),
    ],
)
def test_a_wrong_configuration_is_refused_before_any_process_starts(case: str, message: str) -> None:
    printed = run_case(case)
    assert re.search(message, printed), printed
    assert printed.count("Traceback") == 1
    assert "Starting with" not in printed


@pytest.mark.distributed
def test_a_batch_smaller_than_the_micro_batches_says_so() -> None:
    printed = run_case("small_batch")
    assert "A batch of 8 samples cannot be split into num_micro_batches=9" in printed


@pytest.mark.distributed
def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        printed = run_case("none", MASTER_PORT=str(port), MASTER_ADDR="127.0.0.1")
    assert f"MASTER_PORT={port} is in use" in printed


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["raises", "raises_on_zero"])
def test_a_worker_that_raises_ends_the_run_with_its_reason(case: str) -> None:
    printed = run_case(case)
    assert "ZeroDivisionError: the user's own mistake" in printed
    assert "failed first and ended the run: ZeroDivisionError" in printed


@pytest.mark.distributed
def test_a_worker_that_is_killed_ends_the_run() -> None:
    printed = run_case("killed")
    assert re.search(r"(receiving from|sending to) stage 0 \(rank 1\) failed", printed), printed


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("killed_all_reduce", r"averaging gradients among ranks \[0, 1\] failed"),
        ("killed_het_pipe", r"(receiving from|sending to) pipeline 1 \(rank 1\) failed"),
        ("killed_ad_psgd", r"(receiving from|sending to) pipeline 1 of stage 0 \(rank 1\) failed"),
    ],
)
def test_a_replica_that_is_killed_ends_the_run_whatever_the_method(case: str, message: str) -> None:
    printed = run_case(case)
    assert re.search(message, printed), printed


@pytest.mark.distributed
@pytest.mark.parametrize(("number", "whom"), [(signal.SIGTERM, 3), (signal.SIGINT, None)])
def test_a_signal_to_one_process_ends_all_forked_ones(number: signal.Signals, whom: int | None) -> None:
    marker = f"sdpipe-test-{os.getpid()}-{time.monotonic_ns()}"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.scripts.endings", "fork", "none"],
        cwd=ROOT,
        env=os.environ | {"SDPIPE_TEST_RUN": marker, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    ranks: dict[int, int] = {}
    for line in process.stdout:
        ranks |= {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d) is process (\d+)", line)}
        if len(ranks) == 4:
            break
    os.kill(process.pid if whom is None else ranks[whom], number)
    printed = process.communicate(timeout=30)[0]
    assert process.returncode != 0
    assert processes_of(marker) == []
    expected = (
        "Detected KeyboardInterrupt" if whom is None else f"(rank {whom}) failed first and ended the run: ended by"
    )
    assert expected in printed
