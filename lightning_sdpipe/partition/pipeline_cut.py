"""The user's choice of how to cut a model, before its blocks are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_sdpipe.errors import ConfigurationError, check_number


@dataclass(frozen=True)
class Balanced:
    """A cut that makes the slowest stage fastest, by measured times.

    Args:
        speeds: relative speed of each stage's device; all equal by default. 0.5 gets about half the work. If you give
            ``num_stages`` for each pipeline, give a list for each here, too.
        bandwidth: bytes per second between neighbouring stages, in either direction.
        memory: bytes that training may use on each stage's device, or lists as for ``speeds``; None: no check. This
            counts parameters, gradients, the optimizer's state, and what the micro-batches in flight keep.
        optimizer_state: bytes of optimizer state for each byte of trained parameters: 2 for Adam, 1 with momentum, 0
            for plain SGD.
    """

    speeds: Sequence[float] | Sequence[Sequence[float]] | None = None
    bandwidth: float = 1e9
    memory: Sequence[float] | Sequence[Sequence[float]] | None = None
    optimizer_state: float = 2.0

    def __post_init__(self) -> None:
        check_number("bandwidth", self.bandwidth, "bytes per second above 0", above=0)
        allowed = "bytes for each byte of parameters, from 0"
        check_number("optimizer_state", self.optimizer_state, allowed, least=0)


@dataclass(frozen=True)
class InFlight:
    """Upper bounds of what each stage keeps under a schedule: micro-batches whose backward is yet to come, and copies
    of the stage's weights."""

    micro_batches: Sequence[int]
    copies: Sequence[int]


Partition = Literal["auto", "uniform", "parameters", "balanced"] | Balanced | Sequence[int]


@dataclass(frozen=True)
class PipelineCut:
    """How to cut a pipeline: the number of stages, the partition, and what its schedule keeps, which :class:`Balanced`
    with ``memory`` needs. ``pipeline`` is its number; None if all are cut the same way."""

    num_stages: int
    partition: Partition = "auto"
    in_flight: InFlight | None = None
    pipeline: int | None = None

    @contextmanager
    def named(self) -> Iterator[None]:
        """Add the pipeline's number to the message of a ConfigurationError raised within the context."""
        try:
            yield
        except ConfigurationError as error:
            if self.pipeline is None:
                raise
            raise ConfigurationError(f"pipeline {self.pipeline}: {error}") from error


def cuts_of(
    depths: Sequence[int], partition: Partition | Sequence[Sequence[int]], in_flight: Callable[[int], InFlight]
) -> list[PipelineCut]:
    """Return how to cut each pipeline when they differ in their number of stages.

    Args:
        depths: the number of stages of each pipeline.
        partition: a name for all of them, or a list for each.
        in_flight: returns what the schedule keeps for a number of stages.

    Raises:
        ConfigurationError: the cut of a pipeline is missing or invalid.
    """
    cuts = []
    if not isinstance(partition, (str, Balanced)):
        _check_lists("partition", partition, depths, "[[26], [13, 13]]")
    for pipeline, depth in enumerate(depths):
        own: Any = partition
        if isinstance(partition, Balanced):
            values: dict[str, Any] = {}
            for name, example in (("speeds", "[[1], [0.5, 0.5]]"), ("memory", "[[48e9], [24e9, 24e9]]")):
                if (given := getattr(partition, name)) is not None:
                    _check_lists(name, given, depths, example)
                    values[name] = list(given[pipeline])
            own = replace(partition, **values)
        elif not isinstance(partition, str):
            own = list(own[pipeline])
        keeps = in_flight(depth) if isinstance(own, Balanced) and own.memory is not None else None
        cut = PipelineCut(depth, own, keeps, pipeline)
        if isinstance(own, list) and len(own) != depth:
            with cut.named():
                raise ConfigurationError(
                    f"partition={own} names {len(own)} stages, and num_stages is {depth} there. Give {depth} numbers."
                )
        check_partition(cut)
        cuts.append(cut)
    return cuts


def _check_lists(name: str, given: Sequence[Any], depths: Sequence[int], example: str) -> None:
    if not all(isinstance(own, Sequence) for own in given) or len(given) != len(depths):
        raise ConfigurationError(
            f"{name}={list(given)} does not go with num_stages={list(depths)}, which are {len(depths)} pipelines: give "
            f"one list per pipeline, as in {example}."
        )


def is_measured(partition: Partition) -> bool:
    """Return whether this partition needs a batch, to measure times."""
    return partition == "balanced" or isinstance(partition, Balanced)


def check_partition(of: PipelineCut) -> None:
    """Raise ConfigurationError if no model can be cut this way."""
    num_stages, partition = of.num_stages, of.partition
    with of.named():
        if isinstance(partition, str) and partition not in ("auto", "uniform", "parameters", "balanced"):
            raise ConfigurationError(
                f"partition={partition!r} is not known. Use 'auto', 'uniform', 'parameters', 'balanced', Balanced(...) "
                "or a list of block counts."
            )
        for name, value in (("speeds", "one speed"), ("memory", "the bytes of one device")):
            given = getattr(partition, name) if isinstance(partition, Balanced) else None
            if given and len(given) != num_stages:
                raise ConfigurationError(
                    f"Balanced({name}={list(given)}) names {len(given)} devices for num_stages={num_stages}. Give "
                    f"{value} for each stage."
                )


def refuse_lists(partition: object) -> None:
    """Raise ConfigurationError if ``partition`` has a list for each pipeline, while one number of stages was given."""
    given = [partition.speeds, partition.memory] if isinstance(partition, Balanced) else [partition]
    for values in given:
        listed = values if isinstance(values, Sequence) and not isinstance(values, str) else ()
        if any(isinstance(value, Sequence) for value in listed):
            raise ConfigurationError(
                f"partition={partition!r} has a list for each pipeline. Give the number of stages of each as well, "
                "as in num_stages=[1, 2]."
            )


def in_flight(schedule: str, num_stages: int, num_micro_batches: int) -> InFlight:
    """Return the most that each of M stages keeps when a mini-batch is m micro-batches.

    Stage j has up to M − j micro-batches whose backward is yet to come with ``"1f1b"``, all m with ``"gpipe"``, and
    M − j whole mini-batches with ``"pipedream"``, which also keeps the weights of each, except on the last stage.

    Raises:
        ConfigurationError: the needs of this schedule are not known.
    """
    ahead = range(num_stages, 0, -1)
    match schedule:
        case "1f1b":
            return InFlight([min(num_micro_batches, depth) for depth in ahead], [0] * num_stages)
        case "gpipe":
            return InFlight([num_micro_batches] * num_stages, [0] * num_stages)
        case "pipedream":
            copies = [depth if depth > 1 else 0 for depth in ahead]
            return InFlight([num_micro_batches * depth for depth in ahead], copies)
    raise ConfigurationError(
        f"Balanced(memory=...) does not know what schedule={schedule!r} keeps in memory. Use 1f1b, gpipe or pipedream, "
        "or leave memory out."
    )
