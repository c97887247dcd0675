"""The workers of a job that measure each other: who they are, and meeting at agreed points."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import msgspec
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from lightning_sdpipe.errors import ConfigurationError, WorkerFailedError

T = TypeVar("T")

HOW_TO_START = (
    "`sdpipe measure` runs on all workers of a job: start it with torchrun (`torchrun --nproc-per-node=4 --no-python "
    "sdpipe measure network.json`, on every machine) or with srun."
)


@dataclass(frozen=True)
class Meeting:
    """This process among the workers of its job, and a store that all of them reach.

    Args:
        store: of strings.
        rank: of this process.
        size: how many there are.
        local_rank: among those of the same host.
        patience: seconds to wait for another at most.
    """

    store: Store
    rank: int
    size: int
    local_rank: int
    patience: float

    @classmethod
    def join(cls, patience: float) -> Meeting:
        """By what torchrun or SLURM has put into the environment.

        Raises:
            ConfigurationError: neither has, or the first rank cannot be reached.
        """
        if "RANK" not in os.environ:
            _as_slurm_says()
        try:
            store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=patience)))
        except (ValueError, RuntimeError) as error:
            raise ConfigurationError(
                f"The workers cannot meet: {str(error).splitlines()[0]}. {HOW_TO_START}"
            ) from error
        return cls(store, rank, size, int(os.environ.get("LOCAL_RANK", "0")), patience)

    def share(self, name: str, value: T, kind: type[T]) -> list[T]:
        """What every rank shares under this name, by rank; returns when all have.

        Raises:
            WorkerFailedError: somebody did not come in time; names who.
        """
        self.store.set(f"{name}/{self.rank}", msgspec.json.encode(value).decode())
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        try:
            self.store.wait(keys, timedelta(seconds=self.patience))
        except RuntimeError as error:
            raise WorkerFailedError(
                f"rank {_listed(self._missing(name))} did not come to {name!r} within {self.patience:.0f} s"
            ) from error
        return [msgspec.json.decode(self.store.get(key), type=kind) for key in keys]

    def _missing(self, name: str) -> Sequence[int]:
        try:
            return [rank for rank in range(self.size) if not self.store.check([f"{name}/{rank}"])]
        except RuntimeError:  # the store itself is gone, with its rank
            return [0]


def _as_slurm_says() -> None:
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

    if not SLURMEnvironment.detect():
        raise ConfigurationError(HOW_TO_START)
    job = SLURMEnvironment(auto_requeue=False)
    os.environ |= {
        "RANK": str(job.global_rank()),
        "WORLD_SIZE": str(job.world_size()),
        "LOCAL_RANK": str(job.local_rank()),
        "MASTER_ADDR": job.main_address,
        "MASTER_PORT": str(job.main_port),
    }


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
