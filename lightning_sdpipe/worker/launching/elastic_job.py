"""One pipeline of an elastic run, as the environment of its processes describes it.

In an elastic run every pipeline is a job of its own: the M processes of its stages are its world, and pipelines meet at
a scheduler that runs by itself. ``SDPIPE_PIPELINE`` says which pipeline a job is and that the run is elastic;
``SDPIPE_SCHEDULER`` gives the scheduler's address; ``SDPIPE_KEY_FILE`` the workers' keys for it. The job's launcher
gives its ranks, in the variables that ``torchrun`` sets: ``sdpipe run`` sets the same. It also sets
``SDPIPE_POLICY_FILE``, the file to which a worker has to write the policy before it asks for the scheduler
(:mod:`lightning_sdpipe.scheduler.policy_file`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_sdpipe.errors import ConfigurationError

PIPELINE, SCHEDULER, KEY_FILE = "SDPIPE_PIPELINE", "SDPIPE_SCHEDULER", "SDPIPE_KEY_FILE"
POLICY_FILE = "SDPIPE_POLICY_FILE"

_BY_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_HOW_TO_START = (
    "start it with `sdpipe run --pipelines N --stages M SCRIPT`, or each pipeline with `torchrun --standalone "
    "--nproc-per-node M SCRIPT`"
)


@dataclass(frozen=True)
class ElasticJob:
    """One process of one pipeline."""

    pipeline: int
    rank: int
    world_size: int
    """The number M of processes of the job, one per stage."""
    local_rank: int
    local_world_size: int
    """Processes of the job on this machine."""
    node_rank: int
    main_address: str
    main_port: int
    policy_file: Path | None = None
    """File to write before the scheduler is asked for anything; None if the scheduler knows its policy."""

    @property
    def num_nodes(self) -> int:
        """Machines of the job."""
        return self.world_size // self.local_world_size

    def num_stages(self, asked: int | Sequence[int]) -> int:
        """Return M. ``asked`` is the strategy's ``num_stages``; its default, 1, asks for nothing.

        Raises:
            ConfigurationError: another number was asked for, or one for each pipeline.
        """
        if not isinstance(asked, int):
            raise ConfigurationError(
                f"num_stages={list(asked)} is for an ordinary run: pipelines of an elastic run ({PIPELINE} is set) "
                f"have equally many stages. Leave num_stages out, or unset {PIPELINE} and start all as one job."
            )
        if asked not in (1, self.world_size):
            raise ConfigurationError(
                f"num_stages={asked}, but pipeline {self.pipeline} was started with {self.world_size} processes, and "
                f"an elastic run has one for each stage. Start {asked} (`sdpipe run --stages {asked}`, `torchrun "
                f"--nproc-per-node {asked}`), or leave num_stages out."
            )
        return self.world_size

    def data(self, asked: Literal["auto", "dealt", "sharded"]) -> Literal["dealt"]:
        """Return how batches are divided. ``asked`` is the strategy's ``data``.

        Raises:
            ConfigurationError: shards were asked for.
        """
        if asked == "sharded":
            raise ConfigurationError(
                f"data='sharded', but pipeline {self.pipeline} is one of an elastic run: the shard of a "
                "pipeline that is gone would not be trained. Leave data out; batches are dealt."
            )
        return "dealt"

    def devices(self, of_trainer: Sequence[Any]) -> list[Any]:
        """Return a device for each process of the job on this machine, from those that the Trainer was given.

        Pipelines that share a machine take turns: process r of pipeline i gets device i·M + r, modulo their number,
        where M counts the job's processes on this machine.

        Raises:
            ConfigurationError: there are fewer than M, and they cannot be shared as processors can.
        """
        if len(of_trainer) < self.local_world_size and of_trainer[0].type != "cpu":
            raise ConfigurationError(
                f"Pipeline {self.pipeline} has {self.local_world_size} processes on this machine and the Trainer "
                f"{len(of_trainer)} device(s) for them: {', '.join(map(str, of_trainer))}. Give "
                'Trainer(devices="auto"), or make more of them visible.'
            )
        first = self.pipeline * self.local_world_size
        return [of_trainer[(first + rank) % len(of_trainer)] for rank in range(self.local_world_size)]

    def overrides(self, devices: int, num_nodes: int) -> str | None:
        """Return what to tell a user whose Trainer asks for other devices than the job has; None if it asks for the
        same."""
        if (devices, num_nodes) == (self.local_world_size, self.num_nodes):
            return None
        return (
            f"This is pipeline {self.pipeline} of an elastic run ({PIPELINE} is set), a job of {self.world_size} "
            f"processes on {self.num_nodes} machine{'s' if self.num_nodes > 1 else ''}; that holds instead of the "
            f"Trainer's devices={devices} and num_nodes={num_nodes}."
        )


def from_environment(environment: Mapping[str, str]) -> ElasticJob | None:
    """Return the job that this process belongs to; None if the run is not elastic.

    Raises:
        ConfigurationError: a variable has a value that it cannot have, or is missing.
    """
    if PIPELINE not in environment:
        return None
    pipeline = _number(environment, PIPELINE, "the number of this pipeline, from 0")
    if KEY_FILE in environment and not environment[KEY_FILE]:
        raise ConfigurationError(f"{KEY_FILE} is empty; give the path of worker.key, or unset it.")
    given = [name for name in _BY_LAUNCHER if name in environment]
    policy_file = Path(environment[POLICY_FILE]) if POLICY_FILE in environment else None
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        _refuse_other_launchers(environment, pipeline)
        return ElasticJob(pipeline, 0, 1, 0, 1, 0, "127.0.0.1", 0, policy_file)
    missing = [name for name in _BY_LAUNCHER if name not in given]
    if missing:
        raise ConfigurationError(
            f"{PIPELINE}={pipeline} is set, and so are {', '.join(given)}, but not {', '.join(missing)}: "
            f"{_HOW_TO_START}."
        )
    world_size = _number(environment, "WORLD_SIZE", "how many processes the job has, from 1", least=1)
    rank = _number(environment, "RANK", "the number of this process in its job, from 0")
    local_rank = _number(environment, "LOCAL_RANK", "the number of this process on its machine, from 0")
    local_world_size = (
        _number(environment, "LOCAL_WORLD_SIZE", "how many processes of the job this machine has, from 1", least=1)
        if "LOCAL_WORLD_SIZE" in environment
        else world_size
    )
    if rank >= world_size or local_rank >= local_world_size or world_size % local_world_size:
        raise ConfigurationError(
            f"RANK={rank} of WORLD_SIZE={world_size} and LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE="
            f"{local_world_size} contradict each other: a rank is below its size, and every machine has equally many "
            f"processes. If these variables are left from something else, unset them; {_HOW_TO_START}."
        )
    port = _number(environment, "MASTER_PORT", "the port of rank 0")
    node_rank = _number(environment, "GROUP_RANK", "the number of this machine") if "GROUP_RANK" in environment else 0
    return ElasticJob(
        pipeline,
        rank,
        world_size,
        local_rank,
        local_world_size,
        node_rank,
        environment["MASTER_ADDR"],
        port,
        policy_file,
    )


def require_scheduler(job: ElasticJob, address: str | None) -> None:
    """Check that there is a scheduler; ``address`` is the one that the strategy or the environment names.

    Raises:
        ConfigurationError: neither names a scheduler.
    """
    if address is None:
        raise ConfigurationError(
            f"{PIPELINE}={job.pipeline} is set, so this is a pipeline of an elastic run, but {SCHEDULER} is not: "
            "pipelines meet at a scheduler that runs by itself. Start one with `sdpipe scheduler` and set "
            f"{SCHEDULER}=tcp://ADDRESS:PORT, or use `sdpipe run`; for a run that is not elastic, unset {PIPELINE}."
        )


def _number(environment: Mapping[str, str], name: str, meaning: str, least: int = 0) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise ConfigurationError(f"{name}={text!r} is not allowed; it is {meaning}.")
    return int(text)


def _refuse_other_launchers(environment: Mapping[str, str], pipeline: int) -> None:
    for name, launcher in (("SLURM_NTASKS", "SLURM"), ("OMPI_COMM_WORLD_SIZE", "mpirun"), ("PMI_SIZE", "mpirun")):
        if environment.get(name, "1") != "1":
            raise ConfigurationError(
                f"{PIPELINE}={pipeline} is set and {launcher} started {environment[name]} tasks ({name}), but not RANK "
                "and WORLD_SIZE, which tell the job of a pipeline its ranks. Let one task per machine run `torchrun "
                "--nproc-per-node M SCRIPT`; docs/faults.md has job scripts."
            )
