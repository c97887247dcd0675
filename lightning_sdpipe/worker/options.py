"""The options of a run as a value: the strategy's arguments, checked, with every default resolved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from lightning_sdpipe import sync
from lightning_sdpipe.errors import ConfigurationError, nearest
from lightning_sdpipe.exchange import payloads
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.heterogeneity.delays import Delays
from lightning_sdpipe.heterogeneity.injector import Heterogeneity
from lightning_sdpipe.partition.pipeline_cut import Balanced, InFlight, Partition, PipelineCut, cuts_of, refuse_lists
from lightning_sdpipe.partition.pipeline_cut import in_flight as in_flight_of
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.sync import capabilities
from lightning_sdpipe.sync.measured_groups import on_hosts, with_measured_groups
from lightning_sdpipe.sync.methods import method_for, method_of
from lightning_sdpipe.sync.synchronizer import SyncMethod
from lightning_sdpipe.topology.mesh import Mesh
from lightning_sdpipe.topology.placement_file import Placement, placed_blocks, read_placement
from lightning_sdpipe.worker.launching import elastic_job
from lightning_sdpipe.worker.launching.elastic_job import ElasticJob
from lightning_sdpipe.worker.scheduler_connection import SchedulerAddress, scheduler_log, standing_scheduler

Schedule = Literal["1f1b", "gpipe", "interleaved_1f1b", "zero_bubble", "pipedream"]
LOOPED = ("interleaved_1f1b", "zero_bubble")  # schedules that give a worker several stages


@dataclass(frozen=True)
class Options:
    """Options of a run. :class:`~lightning_sdpipe.strategy.SDPipeStrategy` describes each argument; the defaults here
    are what ``None`` stands for there.

    Args:
        method: carries out ``sync``.
        stages_per_worker: 1 where the schedule gives a worker one stage.
        num_stages: stages of the deepest pipeline.
        depths: the number of stages of each pipeline, if it was given for each; else empty.
        cuts: those of the pipelines, if they are unlike; else empty, and ``partition`` holds for all.
        partition: with the numbers of blocks in place of ``"placed"``.
        in_flight: micro-batches that the schedule keeps in memory, if the partition depends on them.
        run_timeout: the strategy's ``timeout``.
        standing_scheduler: the scheduler that runs already; None if rank 0 starts one.
        scheduler_log: file for a scheduler that rank 0 starts.
        job: the elastic job that this process belongs to; None if the run is not elastic.
    """

    num_stages: int = 1
    depths: tuple[int, ...] = ()
    cuts: tuple[PipelineCut, ...] = ()
    sync: SyncMethod | PolicyConfig | str = field(default_factory=sync.SemiDecentralized)
    method: SyncMethod = field(default_factory=lambda: method_of(sync.SemiDecentralized()))
    exchange: Exchange = field(default_factory=Exchange)
    schedule: str = "1f1b"
    stages_per_worker: int = 1
    num_micro_batches: int = 1
    partition: Partition = "uniform"
    in_flight: InFlight | None = None
    blocks: Sequence[str] | None = None
    placement: Placement | None = None
    data: Literal["auto", "dealt", "sharded"] = "auto"
    batch_by_speed: bool = False
    delays: Heterogeneity = field(default_factory=Delays)
    variance_correction: bool = False
    dynamic_shapes: bool = False
    save_distributed_checkpoint: bool | Literal["async"] = False
    gather_module: bool | None = None
    on_nonfinite: Literal["stop", "continue"] = "stop"
    on_checkpoint_error: Literal["stop", "continue"] = "stop"
    run_timeout: timedelta = timedelta(minutes=30)
    start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen"
    standing_scheduler: SchedulerAddress | None = None
    scheduler_log: Path | None = None
    job: ElasticJob | None = None

    @property
    def total_stages(self) -> int:
        """Stages of a pipeline, of all its workers together."""
        return self.num_stages * self.stages_per_worker

    @property
    def all_cuts(self) -> Sequence[PipelineCut]:
        """Cut of each pipeline, or the one that all have."""
        return self.cuts or (PipelineCut(self.total_stages, self.partition, self.in_flight),)

    def mesh(self, workers: int, counted: str = "devices × num_nodes are") -> Mesh:
        """Return the mesh of so many workers; ``counted`` says to people where that number comes from.

        Raises:
            ConfigurationError: the workers do not make up whole pipelines.
        """
        if not self.depths:
            return Mesh.build(workers, self.num_stages)
        return Mesh.of_depths(workers, self.depths, not self.cuts, counted)

    @property
    def division(self) -> tuple[int, int]:
        """With ``batch_by_speed``: micro-batches of a pipeline on average, and the number whose multiple it needs."""
        return self.num_micro_batches, self.num_stages if self.schedule in LOOPED else 1

    def on_hosts(self, hosts: Sequence[str]) -> Options:
        """Return these options for pipelines that run on ``hosts``, by number: a method's groups may depend on them.

        Raises:
            ConfigurationError: the method's values do not fit these hosts.
        """
        return replace(self, method=on_hosts(self.method, hosts))


def resolve(given: Mapping[str, Any], job: ElasticJob | None) -> Options:
    """Make the options of a run from the strategy's arguments, whose types and values have been checked.

    Args:
        given: arguments by name; None stands for a default.
        job: the elastic job that this process belongs to, which overrides some of them.

    Raises:
        ConfigurationError: some of them do not go together, or a file or a scheduler that they name is missing.
    """
    if isinstance(given["sync"], str) and ":" not in given["sync"]:
        given = {**given, "sync": _named("sync", given["sync"], sync.NAMES)}
    if isinstance(given["exchange"], str):
        given = {**given, "exchange": Exchange(_named("exchange", given["exchange"], payloads.NAMES))}
    num_stages, data = given["num_stages"], given["data"]
    depths: tuple[int, ...] = ()
    if not isinstance(num_stages, int):
        depths = tuple(num_stages)
        num_stages = max(depths)
    if job is not None:
        job.check_depths(depths)
        num_stages, data = num_stages if depths else job.num_stages(num_stages), job.data(data)
    schedule, partition = given["schedule"], given["partition"]
    num_micro_batches = 1 if schedule == "pipedream" else given["num_micro_batches"] or num_stages
    placement = None if given["placement"] is None else read_placement(given["placement"])
    partition = placed_blocks(placement, bool(depths)) if partition == "placed" else partition
    cuts: list[PipelineCut] = []
    if depths:
        cuts = cuts_of(depths, partition, lambda depth: in_flight_of(schedule, depth, num_micro_batches))
        if all(replace(cut, pipeline=0) == cuts[0] for cut in cuts):  # as if one number and one cut had been given
            partition, cuts = cuts[0].partition, []
    else:
        refuse_lists(partition)
    in_flight = None
    if not cuts and isinstance(partition, Balanced) and partition.memory is not None:
        in_flight = in_flight_of(schedule, num_stages, num_micro_batches)
    as_given = {each.name: given[each.name] for each in fields(Options) if given.get(each.name) is not None}
    options = Options(
        **as_given
        | {
            "num_stages": num_stages,
            "depths": depths,
            "cuts": tuple(cuts),
            "data": data,
            "stages_per_worker": given["stages_per_worker"] if schedule in LOOPED else 1,
            "num_micro_batches": num_micro_batches,
            "placement": placement,
            "partition": partition,
            "in_flight": in_flight,
            "on_checkpoint_error": given["on_checkpoint_error"] or ("stop" if job is None else "continue"),
            "run_timeout": given["timeout"],
            "job": job,
        }
    )
    dealt = data == "dealt" and job is None  # in an elastic job they are in any case
    asked = capabilities.Combination(
        options.sync,
        options.exchange,
        schedule,
        num_stages,
        dealt,
        options.batch_by_speed,
        elastic=job is not None,
        unlike=depths if cuts else (),
    )
    method = with_measured_groups(method_for(asked), num_stages, placement is not None)
    capabilities.check(method, asked)
    if options.batch_by_speed:
        _check_division(schedule, num_micro_batches)
    standing = standing_scheduler(given["scheduler"], given["scheduler_key_file"])
    if cuts:
        _check_unlike(options)
    if job is not None:
        elastic_job.require_scheduler(job, None if standing is None else standing.address)
    log = scheduler_log(given["log_dir"], standing)
    return replace(options, method=method, standing_scheduler=standing, scheduler_log=log)


def _named(option: str, name: str, kinds: Mapping[str, type]) -> Any:
    """Return the object of that name, with its defaults.

    Raises:
        ConfigurationError: the name is unknown, or the object has an argument without a default.
    """
    if name not in kinds:
        raise ConfigurationError(f"{option}={name!r} is not known{nearest(name, kinds)}")
    kind = kinds[name]
    if needed := [each.name for each in signature(kind).parameters.values() if each.default is each.empty]:
        given = ", ".join(f"{argument}=…" for argument in needed)
        raise ConfigurationError(
            f"{option}={name!r} needs {', '.join(needed)}: give {option}={kind.__name__}({given})."
        )
    return kind()


def _check_unlike(options: Options) -> None:
    """Raise ConfigurationError for options that need pipelines of one depth and cut, whatever the method."""
    if options.schedule not in ("1f1b", "gpipe"):
        raise ConfigurationError(
            f"schedule={options.schedule!r} needs pipelines of one depth and cut, and those of "
            f"num_stages={list(options.depths)} are unlike: use '1f1b' or 'gpipe'."
        )


def _check_division(schedule: str, num_micro_batches: int) -> None:
    """Raise ConfigurationError if ``batch_by_speed=True`` has no micro-batches to divide."""
    if schedule == "pipedream":
        raise ConfigurationError(
            "batch_by_speed=True does not go with schedule='pipedream', which does not split mini-batches. Use "
            "schedule='1f1b'."
        )
    if num_micro_batches == 1:
        raise ConfigurationError(
            "batch_by_speed=True divides micro-batches among the pipelines, and num_micro_batches is 1. Give more, for "
            "example num_micro_batches=8: with few of them, parts cannot follow the speeds."
        )
