"""Cluster environments: where the processes of a job meet, and which ports they use."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch.distributed import DistStoreError

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.topology.tcp_store import is_loopback
from lightning_sdpipe.worker.launching.elastic_job import ElasticJob

_CHOSEN = 10_000  # the first port that may be chosen
_OFTEN = 50  # tries
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "/sys/class/net/lo"


def choose_port() -> None:
    """Set MASTER_PORT for processes that this one starts on its machine, unless it is given.

    Lightning would take a free port from those that the system hands out to connections. Until rank 0 listens there,
    which takes seconds where others have to import first, any connection may get it.
    """
    if "MASTER_PORT" not in os.environ and "STANDALONE_PORT" not in os.environ:
        port = free_port()
        if port is not None:
            os.environ["MASTER_PORT"] = str(port)


def free_port() -> int | None:
    """Draw a free port below those that the system hands out; None if there is none."""
    try:
        handed_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        handed_out = 32_768
    draws = random.SystemRandom()  # independent of the user's seed
    for _ in range(_OFTEN if handed_out > _CHOSEN else 0):
        port = draws.randrange(_CHOSEN, handed_out)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    return None


@contextmanager
def naming_the_port(environment: ClusterEnvironment) -> Iterator[None]:
    """Raise ConfigurationError if opening the process groups, in the block, fails because another program has the port,
    or some processes have not come."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise ConfigurationError(
                f"MASTER_PORT={environment.main_port} is in use by another program. Choose another one, or unset "
                "MASTER_PORT to let the system choose."
            ) from error
        if isinstance(error, DistStoreError):
            raise ConfigurationError(
                f"Not all of {environment.world_size()} processes have come to {environment.main_address}, port "
                f"{environment.main_port}, in time ({str(error).splitlines()[0]}). Start each machine once, with "
                "as many devices and the same address of the first one, under a number of its own (NODE_RANK, or "
                "--node-rank)."
            ) from error
        raise


def keep_gloo_on_loopback(environment: ClusterEnvironment) -> Callable[[], object]:
    """Make gloo listen on loopback, too, if all processes meet there. Return a function that undoes it.

    By itself gloo takes the address of the host's name, which other machines may reach.
    """
    if is_loopback(environment.main_address) and _GLOO_INTERFACE not in os.environ and Path(_LOOPBACK).exists():
        os.environ[_GLOO_INTERFACE] = Path(_LOOPBACK).name
        return partial(os.environ.pop, _GLOO_INTERFACE, None)
    return lambda: None


def where_to_listen(environment: ClusterEnvironment, num_nodes: int) -> str:
    """Return the address for a scheduler that rank 0 starts: on this machine only, if the run is."""
    if num_nodes == 1:
        return "tcp://127.0.0.1:*"
    host = socket.gethostbyname(environment.main_address)  # ZeroMQ binds to addresses only
    return f"tcp://{host}:*"


def refuse_strangers(environment: ClusterEnvironment, num_nodes: int) -> None:
    """Raise ConfigurationError if several machines start their processes by themselves, and this one was not told where
    the others meet or which of them it is: it would wait for processes that look for it elsewhere. Also raise it for a
    port or machine number that is not a number."""
    if not isinstance(environment, LightningEnvironment):
        return
    for name in ("MASTER_PORT", "NODE_RANK", "GROUP_RANK"):
        if not os.environ.get(name, "0").isdecimal():
            raise ConfigurationError(f"{name}={os.environ[name]!r} is no number.")
    if num_nodes == 1:
        return
    needed = {"MASTER_ADDR": ["MASTER_ADDR"], "MASTER_PORT": ["MASTER_PORT"], "NODE_RANK": ["NODE_RANK", "GROUP_RANK"]}
    missing = [name for name, names in needed.items() if not any(each in os.environ for each in names)]
    if missing:
        raise ConfigurationError(
            f"num_nodes={num_nodes}, and neither torchrun nor srun has started this process, nor is "
            f"{', '.join(missing)} set: the machines would not find each other. Start the script with torchrun or srun "
            "on each of them; or set there MASTER_ADDR and MASTER_PORT of the first one, and NODE_RANK, from 0 to "
            f"{num_nodes - 1}."
        )
    if not 0 <= environment.node_rank() < num_nodes:
        raise ConfigurationError(
            f"NODE_RANK={environment.node_rank()} is not allowed with num_nodes={num_nodes}: number the machines from "
            f"0 to {num_nodes - 1}."
        )


def check_tasks(environment: ClusterEnvironment, num_devices: int, num_nodes: int) -> None:
    """Raise ConfigurationError if SLURM has started another number of processes than the Trainer counts: those that are
    missing would be waited for."""
    if isinstance(environment, SLURMEnvironment):
        by_srun = f"srun --nodes={num_nodes} --ntasks-per-node={num_devices}, without --ntasks"
        how = f": {by_srun}, or other devices and num_nodes"
        _compare("SLURM has started {} tasks (SLURM_NTASKS)", environment, num_devices, num_nodes, how)


def _compare(
    started: str, environment: ClusterEnvironment, num_devices: int, num_nodes: int, how_to_make_equal: str
) -> None:
    if environment.world_size() != num_devices * num_nodes:
        raise ConfigurationError(
            f"{started.format(environment.world_size())}, and the Trainer's devices={num_devices} × num_nodes="
            f"{num_nodes} are {num_devices * num_nodes}. Make them equal{how_to_make_equal}."
        )


class ElasticEnvironment(ClusterEnvironment):
    """The environment that the job's launcher has described, on any platform.

    Lightning would look for SLURM first, even if ``sdpipe run`` is what SLURM started, and would refuse a Trainer whose
    devices × num_nodes are not the job's processes.
    """

    def __init__(self, job: ElasticJob) -> None:
        super().__init__()
        self.job = job

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self.job.main_address

    @property
    def main_port(self) -> int:
        return self.job.main_port

    @staticmethod
    def detect() -> bool:
        """Return False: the strategy makes it, Lightning does not choose it."""
        return False

    def world_size(self) -> int:
        return self.job.world_size

    def set_world_size(self, size: int) -> None:
        """No-op: the launcher has set it."""

    def global_rank(self) -> int:
        return self.job.rank

    def set_global_rank(self, rank: int) -> None:
        """No-op: the launcher has set it."""

    def local_rank(self) -> int:
        return self.job.local_rank

    def node_rank(self) -> int:
        return self.job.node_rank


class TorchrunEnvironment(TorchElasticEnvironment):
    """The environment that torchrun has described, which may have started more processes on one machine than on
    another.

    Args:
        unlike: machines may have different numbers of devices, since the stages of each pipeline are listed. Lightning
            would refuse a Trainer whose devices × num_nodes are not all processes.
    """

    def __init__(self, unlike: bool) -> None:
        super().__init__()
        self.unlike = unlike

    @staticmethod
    def detect() -> bool:
        """Return False: the strategy makes it, Lightning does not choose it."""
        return False

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare the Trainer with torchrun, unless ``num_devices`` are those of this machine only.

        Raises:
            ConfigurationError: the numbers of processes differ.
        """
        if not self.unlike:
            by_list = "list the stages of each pipeline, as in num_stages=[1, 1, 1] for three"
            how = f", or, if the machines have unlike numbers of devices, {by_list}"
            _compare("torchrun has started {} processes", self, num_devices, num_nodes, how)


def environment_for(unlike: bool) -> ClusterEnvironment | None:
    """Return the environment of a torchrun job, whose machines may be ``unlike``; None if Lightning is to choose it."""
    return TorchrunEnvironment(unlike) if TorchElasticEnvironment.detect() else None
