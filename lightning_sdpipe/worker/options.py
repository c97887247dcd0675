"""The strategy's arguments: their names, types and values are checked before anything is built from them, and every
default is resolved in the options of a run, a value that does not change."""

from __future__ import annotations

import difflib
import inspect
import numbers
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
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
from lightning_sdpipe.sync.methods import check, method_for, method_of
from lightning_sdpipe.sync.synchronizer import SyncMethod
from lightning_sdpipe.topology.mesh import Mesh
from lightning_sdpipe.topology.placement_file import Placement, placed_blocks, read_placement
from lightning_sdpipe.worker.launching import elastic_job
from lightning_sdpipe.worker.launching.elastic_job import ElasticJob
from lightning_sdpipe.worker.scheduler_connection import SchedulerAddress, scheduler_log, standing_scheduler

Schedule = Literal["1f1b", "gpipe", "interleaved_1f1b", "zero_bubble", "pipedream"]
LOOPED = ("interleaved_1f1b", "zero_bubble")  # schedules that give a worker several stages
# Examples for options that are easy to get wrong.
_FOR_EXAMPLE = {
    "sync": "AllReduce()",
    "exchange": '"eight_bit", or Exchange(EightBit(), overlap="step")',
    "delays": "Delays(probability=0.1, seconds=0.3)",
    "partition": '"parameters", or [3, 2]: the number of blocks of each stage',
    "num_stages": "2, or [1, 2, 2]: those of each pipeline",
    "blocks": '["model.embeddings", "model.layers.*"]',
    "timeout": "timedelta(minutes=10)",
}
# What to use instead of options under other names, and of those of Lightning's DDPStrategy, which passes further ones
# to torch's DistributedDataParallel.
_INSTEAD = {
    **dict.fromkeys(
        ["ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"],
        "sync= says what is averaged, and when",
    ),
    "bucket_cap_mb": "sync=AllReduce(bucket_mib=...) sets the size of buckets",
    "find_unused_parameters": "parameters without a gradient are allowed",
    "broadcast_buffers": "buffers are averaged over the pipelines before validation and at the end of an epoch",
    **dict.fromkeys(
        [
            *("static_graph", "gradient_as_bucket_view", "mixed_precision", "init_sync", "device_ids", "output_device"),
            *("dim", "process_group", "check_reduction", "delay_all_reduce_named_params", "param_to_hook_all_reduce"),
            *("device_mesh", "skip_all_reduce_unused_params"),
        ],
        "it is one of DistributedDataParallel, which is not used; leave it out",
    ),
    "num_pipelines": "the number of pipelines follows: devices × num_nodes / num_stages. Give num_stages here, and the "
    "other two to the Trainer",
    "batch_size": "the loader's batch_size holds, and is that of one pipeline",
    **dict.fromkeys(["devices", "num_nodes", "precision"], "give it to the Trainer"),
}


@dataclass(frozen=True)
class Options:
    """Options of a run. :class:`~lightning_sdpipe.strategy.SDPipeStrategy` describes each argument; the defaults here
    are what ``None`` stands for there.

    Args:
        method: carries out ``sync``.
        stages_per_worker: 1 where the schedule gives a worker one stage.
        num_stages: stages of the deepest pipeline.
        depths: the number of stages of each pipeline, if it was given for each; else empty.
        cuts: those of the pipelines, if they differ; else empty, and ``partition`` holds for all.
        partition: with the numbers of blocks in place of ``"placed"``.
        in_flight: micro-batches that the schedule keeps in memory, if the partition depends on them.
        run_timeout: the strategy's ``timeout``.
        standing_scheduler: the scheduler that is already running; None if rank 0 starts one.
        scheduler_log: file for a scheduler that rank 0 starts.
        job: the job of an elastic run that this process belongs to; None if the run is not elastic.
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
    partition: Partition = "auto"
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
        """Return the mesh of ``workers`` workers; ``counted`` tells users where that number comes from.

        Raises:
            ConfigurationError: the workers do not make up whole pipelines.
        """
        if not self.depths:
            return Mesh.build(workers, self.num_stages)
        return Mesh.of_depths(workers, self.depths, not self.cuts, counted)

    @property
    def division(self) -> tuple[int, int]:
        """With ``batch_by_speed``: a pipeline's average number of micro-batches, and the number of which each must have
        a multiple."""
        return self.num_micro_batches, self.num_stages if self.schedule in LOOPED else 1

    def on_hosts(self, hosts: Sequence[str]) -> Options:
        """Return these options for pipelines that run on ``hosts``, in their order: a method's groups may depend on
        them.

        Raises:
            ConfigurationError: the method's values do not fit these hosts.
        """
        return replace(self, method=on_hosts(self.method, hosts))


def resolve(given: Mapping[str, Any], job: ElasticJob | None) -> Options:
    """Make the options of a run from the strategy's arguments, whose types and values have been checked.

    Args:
        given: arguments by name; None stands for a default.
        job: the job of an elastic run that this process belongs to, which overrides some of them.

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
        num_stages, data = job.num_stages(given["num_stages"]), job.data(data)
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
    dealt = data == "dealt" and job is None  # in an elastic run they are in any case
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
    check(method, asked)
    if options.batch_by_speed and num_micro_batches == 1:
        raise ConfigurationError(
            "batch_by_speed=True divides micro-batches among the pipelines, and num_micro_batches is 1. Give more, for "
            "example num_micro_batches=8: with few of them, parts cannot follow the speeds."
        )
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


def check_arguments(given: Mapping[str, Any], unknown: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for unknown options, and for types and values not allowed.

    Args:
        given: all options by name.
        unknown: those that are not options.
        hints: the types of ``given``.
    """
    for name in unknown:
        instead = f": {_INSTEAD[name]}." if name in _INSTEAD else nearest(name, given)
        raise ConfigurationError(f"{name} is not an option of SDPipeStrategy{instead}")
    for name, value in given.items():
        _check_type(name, value, hints[name])
    _check_values(given)


def _check_type(name: str, value: Any, hint: Any) -> None:
    if _accepts(hint, value):
        return
    if inspect.isclass(value):
        raise ConfigurationError(f"{name}={value.__name__} is a class; pass an object: {name}={value.__name__}().")
    choices = [choice for each in _alternatives(hint) for choice in _choices(each)]
    if isinstance(value, str) and choices:
        others = "".join(f", or {_described(each)}" for each in _alternatives(hint) if not _choices(each))
        raise ConfigurationError(f"{name}={value!r} is not known; use one of {choices}{others}{_close(value, choices)}")
    example = f", such as {_FOR_EXAMPLE[name]}" if name in _FOR_EXAMPLE else ""
    raise ConfigurationError(f"{name}={value!r} is not allowed: give {_described(hint)}{example}.")


def _check_values(given: Mapping[str, Any]) -> None:
    schedule, stages, micro_batches = given["schedule"], given["num_stages"], given["num_micro_batches"]
    for name in ("stages_per_worker", "num_micro_batches") + (("num_stages",) if isinstance(stages, int) else ()):
        if given[name] is not None and given[name] < 1:
            raise ConfigurationError(f"{name}={given[name]} is not allowed; use 1 or more.")
    if not isinstance(stages, int):
        if not stages or min(stages) < 1:
            raise ConfigurationError(
                f"num_stages={list(stages)} is not allowed; give the stages of each pipeline, 1 or more each."
            )
        stages = max(stages)
    if schedule in LOOPED and (stages < 2 or given["stages_per_worker"] < 2):
        raise ConfigurationError(
            f"schedule={schedule!r} needs num_stages and stages_per_worker of 2 or more; given {stages} and "
            f"{given['stages_per_worker']}."
        )
    if schedule not in LOOPED and given["stages_per_worker"] != 2:
        raise ConfigurationError(
            f"stages_per_worker={given['stages_per_worker']} has no meaning with schedule={schedule!r}, under which a "
            f"worker runs one stage. Leave it out, or use one of {LOOPED}."
        )
    splits = "batch_by_speed=True" if given["batch_by_speed"] else f"num_micro_batches={micro_batches}"
    if schedule == "pipedream" and (given["batch_by_speed"] or (micro_batches or 1) > 1):
        raise ConfigurationError(
            f"{splits} does not go with schedule='pipedream', which does not split mini-batches. Leave it out, or use "
            "schedule='1f1b'."
        )
    if given["on_checkpoint_error"] == "continue" and given["save_distributed_checkpoint"]:
        raise ConfigurationError(
            "on_checkpoint_error='continue' does not go with save_distributed_checkpoint, of which every rank writes a "
            "part. Use 'stop', or leave one of the two out."
        )
    if given["timeout"] <= timedelta(0):
        raise ConfigurationError(f"timeout={given['timeout']} is not allowed; give a time above 0.")


def _accepts(hint: Any, value: Any) -> bool:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return any(_accepts(each, value) for each in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return any(type(choice) is type(value) and choice == value for choice in typing.get_args(hint))
    if hint is Any:
        return True
    if hint in (int, float):
        return isinstance(value, numbers.Integral if hint is int else numbers.Real) and not isinstance(value, bool)
    if typing.get_origin(hint) is Sequence:
        (element,) = typing.get_args(hint)
        return isinstance(value, Sequence) and not isinstance(value, str) and all(_accepts(element, v) for v in value)
    return isinstance(value, hint) and not inspect.isclass(value)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _choices(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def _close(value: str, choices: Iterable[str]) -> str:
    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else "."


def _described(hint: Any) -> str:
    def name(each: Any) -> str:
        if typing.get_origin(each) is typing.Literal:
            return " or ".join(map(repr, typing.get_args(each)))
        if typing.get_origin(each) is Sequence:
            return f"a list of {name(typing.get_args(each)[0]).removeprefix('a ')}"
        return "None" if each is types.NoneType else str(each.__name__)

    return " or ".join(map(name, _alternatives(hint)))
