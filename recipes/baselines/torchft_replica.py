"""A replica that averages gradients by torchft, in a Trainer. torchft is no dependency of this project."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from lightning_sdpipe.scheduler.server.process import reserve_port
from recipes.suites.elastic import Diary, Work, set_up
from recipes.suites.emulated import LEARNING_RATE, EmulatedChain, passes
from recipes.suites.trainings import make_trainer, random_features


def replica(work: Work, directory: Path, number: int, lighthouse: str, dies_at: int | None) -> None:
    """Be a replica group of one process, in that process, which kills itself before the update ``dies_at``, if it is
    given."""
    name, port = f"0001-{number}-0", reserve_port()
    own = {"TORCHFT_LIGHTHOUSE": lighthouse, "REPLICA_GROUP_ID": str(number), "GLOO_SOCKET_IFNAME": "lo"}
    diary = set_up(directory, name, own)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.getsockname()[1])}
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
