"""A store through which the workers of a job share values and wait for each other, to measure their links."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import msgspec
from torch.distributed.distributed_c10d import Store

from lightning_sdpipe.errors import ConfigurationError, WorkerFailedError
from lightning_sdpipe.topology.tcp_store import open_store

T = TypeVar("T")

HOW_TO_START = (
    "`sdpipe measure` runs on all workers of a job: start it with torchrun (`torchrun --nproc-per-node=4 --no-python "
    "sdpipe measure -o network.json`, on every machine) or with srun."
)


@dataclass(frozen=True)
class JobStore:
    """This process's place in its job, and a store that all workers reach.

    Args:
        store: a store of strings.
        rank: rank of this process.
        size: number of processes.
        local_rank: rank among the processes of the same host.
        patience: longest wait in seconds for another process.
    """

    store: Store
    rank: int
    size: int
    local_rank: int
    patience: float

    @classmethod
    def join(cls, patience: float) -> JobStore:
        """Join the job that torchrun or SLURM has described in the environment.

        Raises:
            ConfigurationError: the environment describes no job, or the first rank cannot be reached.
        """
        address, port, rank, size, local_rank = _place()
        try:
            store = open_store(address, port, rank, size, False, timedelta(seconds=patience))
        except (RuntimeError, OSError) as error:
            raise ConfigurationError(
                f"The workers cannot meet: {str(error).splitlines()[0]}. {HOW_TO_START}"
            ) from error
        return cls(store, rank, size, local_rank, patience)

    def share(self, name: str, value: T, kind: type[T]) -> list[T]:
        """Share ``value`` under this name, wait until all ranks have done so, and return their values.

        Raises:
            WorkerFailedError: a rank did not share in time, or gave up; the message names it.
        """
        self._put(name, _Entry(msgspec.Raw(msgspec.json.encode(value))))
        self._await(name)
        entries = [msgspec.json.decode(self.store.get(f"{name}/{rank}"), type=_Entry) for rank in range(self.size)]
        for rank, entry in enumerate(entries):
            if entry.error:
                raise WorkerFailedError(f"rank {rank}: {entry.error}")
        return [msgspec.json.decode(entry.value, type=kind) for entry in entries]

    def give_up(self, name: str, error: str) -> None:
        """Tell the ranks that share under this name why this one cannot."""
        self._put(name, _Entry(msgspec.Raw(b"null"), error))

    def leave(self) -> None:
        """Leave the job. Rank 0, whose process may hold the store, waits until all ranks have left."""
        self._put("left", _Entry(msgspec.Raw(b"null")))
        if self.rank == 0:
            self._await("left")

    def _put(self, name: str, entry: _Entry) -> None:
        self.store.set(f"{name}/{self.rank}", msgspec.json.encode(entry).decode())

    def _await(self, name: str) -> None:
        try:
            self.store.wait([f"{name}/{rank}" for rank in range(self.size)], timedelta(seconds=self.patience))
        except RuntimeError as error:
            if missing := self._missing(name):  # the last one may have come since
                ranks = ", ".join(map(str, missing))
                said = f"rank {ranks} did not come to {name!r} within {self.patience:.0f} s"
                raise WorkerFailedError(said) from error

    def _missing(self, name: str) -> Sequence[int]:
        try:
            return [rank for rank in range(self.size) if not self.store.check([f"{name}/{rank}"])]
        except RuntimeError:  # rank 0 is gone, and the store with it
            return [0]


class _Entry(msgspec.Struct):
    """The value that a rank shares, or the reason why it has given up."""

    value: msgspec.Raw
    error: str = ""


def _place() -> tuple[str, int, int, int, int]:
    """Return the address and port of the store, this process's rank, the number of ranks, and the local rank."""
    here = os.environ
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= here.keys():
        rank, size, local_rank = int(here["RANK"]), int(here["WORLD_SIZE"]), int(here.get("LOCAL_RANK", "0"))
        return here["MASTER_ADDR"], int(here["MASTER_PORT"]), rank, size, local_rank
    if "SLURM_NTASKS" not in here:
        raise ConfigurationError(HOW_TO_START)
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment  # takes long to import

    job = SLURMEnvironment(auto_requeue=False)
    return job.main_address, job.main_port, job.global_rank(), job.world_size(), job.local_rank()
