"""Replicas that average gradients with torchft, each in its own Trainer. This project does not depend on torchft."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from lightning_sdpipe.scheduler.server.process import reserve_port
from recipes.harness.pipelines import Record, Traces, set_up
from recipes.suites.elastic import UpdateDiary, Work
from recipes.suites.emulated import LEARNING_RATE, EmulatedChain, passes
from recipes.suites.trainings import make_trainer, quiet, random_features


def run(work: Work, victim: int, after: int, seconds: float) -> tuple[list[Record], float]:
    """Train one replica for each pipeline. The ``victim`` kills itself after ``after`` updates; the others train for
    ``seconds`` more. Return their records, and when the victim died."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory, reserve_port() as port:
        address = f"127.0.0.1:{port.getsockname()[1]}"
        port.close()  # the lighthouse does not share the port
        options = ["--min_replicas", "1", "--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "2000"]
        program = Path(directory, "lighthouse.py")  # the package's own script may be anywhere
        program.write_text("from torchft._torchft import lighthouse_main\nlighthouse_main()\n")
        with open(Path(directory, "lighthouse.log"), "wb") as log:
            server = subprocess.Popen(
                [sys.executable, str(program), *options, "--bind", address], stdout=log, stderr=log
            )
        processes = []
        for number in range(work.num_pipelines):
            arguments = (work, Path(directory), number, f"http://{address}", after if number == victim else None)
            processes.append(context.Process(target=replica, args=arguments))
        try:
            time.sleep(1.0)  # the lighthouse does not tell when it listens
            for process in processes:
                process.start()
            processes[victim].join(120)
            if processes[victim].exitcode != -signal.SIGKILL:
                code = processes[victim].exitcode
                raise RuntimeError(f"torchft's victim ended with {code}: {Traces(Path(directory)).said()}")
            time.sleep(seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()
            server.kill()
            server.wait()
        records = Traces(Path(directory)).records()
    return records, records[victim].times("strikes")[0]


def replica(work: Work, directory: Path, number: int, lighthouse: str, dies_at: int | None) -> None:
    """Run a replica group of one process in this process, which kills itself before the update ``dies_at``, if
    given."""
    port = reserve_port()
    own = {"TORCHFT_LIGHTHOUSE": lighthouse, "REPLICA_GROUP_ID": str(number), "GLOO_SOCKET_IFNAME": "lo"}
    set_up(directory / f"0001-{number}-0")
    quiet()
    diary = UpdateDiary()
    os.environ |= {**own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.getsockname()[1])}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    import torchft  # type: ignore[import-not-found, unused-ignore]

    store = TCPStore("127.0.0.1", port.getsockname()[1], is_master=True, wait_for_workers=False)
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):  # else Lightning takes them for torchrun's
        del os.environ[name]
    torch.manual_seed(work.seed)
    module = Replica(work, dies_at)
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
    trainer = make_trainer("auto", 1, diary)
    trainer.fit(module, random_features(work.batches // work.num_pipelines, 1))


class Replica(EmulatedChain):
    """The module of a replica, which optimizes manually, since torchft's optimizer takes no closure.

    Args:
        work: the replica's work.
        dies_at: the update before which the process kills itself; None for never.
    """

    def __init__(self, work: Work, dies_at: int | None) -> None:
        super().__init__(1, *passes(work.batch_seconds), work.num_parameters)
        self.automatic_optimization = False
        self._dies_at = dies_at

    def wrap(self, blocks: Any, optimizer: Any) -> None:
        """Train with torchft's wrappers."""
        self._wrapped = (blocks, optimizer)  # a tuple, since an attribute would register the blocks again

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        blocks, optimizer = self._wrapped
        if self._dies_at is not None and batch_idx >= self._dies_at:
            for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, UpdateDiary):
                    callback.say(strikes=batch_idx)
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        self.manual_backward(blocks(batch).mean())
        optimizer.step()

    def configure_optimizers(self) -> None:
        """Return None: Lightning has no optimizer to step."""
