"""torchft beside this package: replicas that do the same emulated work and average gradients, one of them killed.

torchft is no dependency of this project. Where it is not installed, the part says how to install it, and is left out.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import hydra
import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from lightning_sdpipe.scheduler.server.process import reserve_port
from recipes.suites.emulated import LEARNING_RATE, Validated, passes
from recipes.suites.faults.elastic_world import Record, Work, read_records, said, set_up, world
from recipes.suites.faults.injected_faults import Diary, Fault
from recipes.suites.ratios import Ratios, Row, ratio, rotated
from recipes.suites.trainings import make_trainer, random_features

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
    """The survivors' longest step and a median one, of both, in the same run, each in a Trainer.

    Args:
        after: updates until the victim is killed.
        seconds: after that which are looked at.
        repeats: of each.
    """
    if importlib.util.find_spec("torchft") is None:
        print(f"torchft is not installed, and the comparison with it is left out; for it: {INSTALL}", flush=True)
        return [], {}
    rows: list[Row] = []
    longest, steady = [], []
    work = Work(
        1, num_pipelines, hydra.utils.instantiate(method), batch_seconds, num_parameters, batches=5000, seed=seed
    )
    for repeat in range(repeats):
        figures = {}
        for library in rotated(["torchft", "sdpipe"], repeat):
            records, killed = _torchft(work, after, seconds) if library == "torchft" else _ours(work, after, seconds)
            figures[library] = _figures([record for record in records if record.pipeline != VICTIM], killed)
            print(f"{library}: {figures[library]}", flush=True)
            rows.append({"library": library, "repeat": repeat} | figures[library])
        longest.append(figures["sdpipe"]["longest_s"] / figures["torchft"]["longest_s"])
        steady.append(figures["sdpipe"]["median_s"] / figures["torchft"]["median_s"])
    return rows, {
        "torchft/longest_step": ratio(longest, 0.5, "survivors' longest step after a kill, ours over torchft's"),
        "torchft/steady": ratio(steady, 1.0, "a median step without faults, ours over torchft's"),
    }


def _figures(survivors: Sequence[Record], killed: float) -> dict[str, float]:
    steps = [step for record in survivors for step in pairwise(record.times("update"))]
    return {
        "median_s": statistics.median(end - begin for begin, end in steps if end <= killed),
        "longest_s": max(end - begin for begin, end in steps if end > killed),
    }


def _ours(work: Work, after: int, seconds: float) -> tuple[list[Record], float]:
    with tempfile.TemporaryDirectory() as directory, world(Path(directory), work) as it:
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
        processes = [
            context.Process(target=_replica, args=(work, Path(directory), number, f"http://{address}", after))
            for number in range(work.num_pipelines)
        ]
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


def _replica(work: Work, directory: Path, number: int, lighthouse: str, after: int) -> None:
    """One replica group of one process, in that process."""
    name, port = f"0001-{number}-0", reserve_port()
    own = {"TORCHFT_LIGHTHOUSE": lighthouse, "REPLICA_GROUP_ID": str(number), "GLOO_SOCKET_IFNAME": "lo"}
    set_up(directory, name, own)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.getsockname()[1])}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    import torchft  # type: ignore[import-not-found, unused-ignore]

    store = TCPStore("127.0.0.1", port.getsockname()[1], is_master=True, wait_for_workers=False)
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):  # else Lightning takes them for torchrun's
        del os.environ[name]
    torch.manual_seed(work.seed)
    module = _Replica(work, after if number == VICTIM else None)
    inner = torch.optim.SGD(module.parameters(), LEARNING_RATE)

    def load(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"replica{number}_",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=10),
    )
    module.wrap(torchft.DistributedDataParallel(manager, module.blocks), torchft.Optimizer(manager, inner))
    trainer = make_trainer("auto", 1, Diary(directory / f"{name}.diary"))
    trainer.fit(module, random_features(work.batches, 1))


class _Replica(Validated):
    """The module of a replica, which optimizes by hand, since torchft's optimizer takes no closure.

    Args:
        work: of the replica.
        dies_at: the update before which its process kills itself, if it does.
    """

    def __init__(self, work: Work, dies_at: int | None) -> None:
        super().__init__(1, *passes(work.batch_seconds), work.num_parameters)
        self.automatic_optimization = False
        self._dies_at = dies_at

    def wrap(self, blocks: Any, optimizer: Any) -> None:
        """Train by torchft's wrappers."""
        self._wrapped = (blocks, optimizer)  # in a tuple, since an attribute would register the blocks again

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        blocks, optimizer = self._wrapped
        if self._dies_at is not None and batch_idx >= self._dies_at:
            for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, Diary):
                    callback.say("strikes")
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        self.manual_backward(blocks(batch).mean())
        optimizer.step()

    def configure_optimizers(self) -> None:
        """Lightning has none to step."""
