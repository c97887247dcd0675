"""torchft beside this package: replicas that do the same emulated work and average gradients, one of them killed.

torchft is no dependency of this project. Where it is not installed, the part says how to install it, and is left out.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import hydra

from lightning_sdpipe.scheduler.server.process import reserve_port
from recipes.baselines.torchft_replica import replica
from recipes.suites.elastic import Fault, Record, Work, World, read_records, said
from recipes.suites.grid import Goal, Ratios, Row, ratios, rotated

VICTIM = 2
INSTALL = "pip install torchft==0.2.0"


def measure(
    *,
    num_pipelines: int,
    batch_seconds: float,
    num_parameters: int,
    after: int,
    seconds: float,
    repeats: int,
    method: Any,
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Return the survivors' longest step and a median one, of both, in the same run, each in a Trainer.

    Args:
        after: updates until the victim is killed.
        seconds: after that which are looked at.
        repeats: of each.
    """
    if importlib.util.find_spec("torchft") is None:
        print(f"torchft is not installed, and the comparison with it is left out; for it: {INSTALL}", flush=True)
        return [], {}
    rows: list[Row] = []
    sync = hydra.utils.instantiate(method)
    work = Work(
        *(1, num_pipelines, sync, 5000 * num_pipelines),
        batch_seconds=batch_seconds,
        num_parameters=num_parameters,
        seed=seed,
    )
    for repeat in range(repeats):
        for library in rotated(["torchft", "sdpipe"], repeat):
            records, killed = (_torchft if library == "torchft" else _ours)(work, after, seconds)
            figures = _figures([record for record in records if record.pipeline != VICTIM], killed)
            print(f"{library}: {figures}", flush=True)
            rows.append({"library": library, "repeat": repeat} | figures)
    goals = {
        key: Goal(f"{meaning}, ours over torchft's", column, {"library": "sdpipe"}, {"library": "torchft"}, value)
        for key, meaning, column, value in (
            ("torchft/longest_step", "survivors' longest step after a kill", "longest_s", 0.5),
            ("torchft/steady", "a median step without faults", "median_s", 1.0),
        )
    }
    return rows, ratios(rows, goals)


def _figures(survivors: Sequence[Record], killed: float) -> dict[str, float]:
    steps = [step for record in survivors for step in pairwise(record.times("update"))]
    return {
        "median_s": statistics.median(end - begin for begin, end in steps if end <= killed),
        "longest_s": max(end - begin for begin, end in steps if end > killed),
    }


def _ours(work: Work, after: int, seconds: float) -> tuple[list[Record], float]:
    with tempfile.TemporaryDirectory() as directory, World(Path(directory), work) as it:
        it.start({VICTIM: Fault("forward", after)})
        it.wait(lambda: not it.lives(VICTIM), "the death of one")
        time.sleep(seconds)
        records = it.records()
    (victim,) = [record for record in records if record.pipeline == VICTIM]
    return records, victim.times("strikes")[0]


def _torchft(work: Work, after: int, seconds: float) -> tuple[list[Record], float]:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory, reserve_port() as port:
        address = f"127.0.0.1:{port.getsockname()[1]}"
        port.close()  # the lighthouse does not share it
        options = ["--min_replicas", "1", "--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "2000"]
        program = Path(directory, "lighthouse.py")  # the package's own script may lie anywhere
        program.write_text("from torchft._torchft import lighthouse_main\nlighthouse_main()\n")
        with open(Path(directory, "lighthouse.log"), "wb") as log:
            server = subprocess.Popen(
                [sys.executable, str(program), *options, "--bind", address], stdout=log, stderr=log
            )
        processes = []
        for number in range(work.num_pipelines):
            arguments = (work, Path(directory), number, f"http://{address}", after if number == VICTIM else None)
            processes.append(context.Process(target=replica, args=arguments))
        try:
            time.sleep(1.0)  # it says nowhere that it listens
            for process in processes:
                process.start()
            processes[VICTIM].join(120)
            if processes[VICTIM].exitcode != -signal.SIGKILL:
                code = processes[VICTIM].exitcode
                raise RuntimeError(f"torchft's victim ended with {code}: {said(Path(directory))}")
            time.sleep(seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()
            server.kill()
            server.wait()
        records = read_records(Path(directory))
    return records, records[VICTIM].times("strikes")[0]
