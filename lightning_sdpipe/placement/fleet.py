"""Throughput of pipelines of unlike devices: λ(c), the mini-batches per second of one pipeline with counts c of
devices.

The counts are by class; the devices are in their best order, with the best cut. ``λ(c) = 1 / (T + data)``: T is as in
:mod:`lightning_sdpipe.placement.throughput`, data is the time that the slowest worker takes to average with k − 1
others, ``2 (k − 1) (α + bytes / (k β))`` over the median link. A pipeline of one stage moves the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product
from statistics import median
from typing import TypeAlias

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.placement.heterogeneous import pipeline_cut
from lightning_sdpipe.placement.network import Network
from lightning_sdpipe.placement.planner import ALIKE, PlacementTask, job_of
from lightning_sdpipe.placement.throughput import GROUP, CutJob, PlacementJob, Spans, Sync

Counts: TypeAlias = tuple[int, ...]
"""Counts of devices, by class."""

Order: TypeAlias = tuple[int, ...]
"""Class of the device of each stage of a pipeline."""

EXACT = 2000
"""Largest number of counts for which all are examined."""

MOST_ORDERS, FEW_ORDERS = 120, 6
"""Largest numbers of orders in which the devices of a pipeline are tried: all of five unlike devices, and beyond
:data:`EXACT` counts all of three."""


@dataclass(frozen=True)
class PlacedPipeline:
    """One pipeline: its devices by stage, its cut, and the seconds of a mini-batch without averaging."""

    devices: tuple[int, ...]
    spans: Spans
    seconds: float


class Fleet:
    """The devices of a network by class, for pipelines that train a model.

    Args:
        network: a network with a model.
        asked: the task; its number of stages is ignored.
        micro_batches: micro-batches of a mini-batch, equal for all pipelines.
        deepest: largest number of stages of a pipeline.

    Raises:
        ConfigurationError: the network has no model.
    """

    def __init__(self, network: Network, asked: PlacementTask, micro_batches: int, deepest: int) -> None:
        if network.model is None:
            raise ConfigurationError(
                "The network was measured without a model, and only a model says what pipelines of unlike depths take. "
                "Measure with `--model IMPORT.PATH:NAME`."
            )
        self.network, self.chain = network, network.model.chain
        self.sync: Sync = asked.sync
        self.micro_batches = micro_batches
        self.classes = _classes(network)
        self.counts: Counts = tuple(map(len, self.classes))
        self._asked = asked
        self._deepest = min(deepest, len(self.chain))
        self._common: Spans | None = None
        self._jobs: dict[int, PlacementJob] = {}
        self._rows: dict[tuple[int, ...], PlacedPipeline | None] = {}
        self._best: dict[tuple[Counts, int], tuple[float, Order]] = {}
        self._bounds: dict[Counts, float] = {}
        self._cuts: dict[Spans, CutJob] = {}
        self._alone = 1 / micro_batches if asked.cost != "pipedream" else 0.0  # of the work, that nothing overlaps with
        self._work = sum(block.seconds for block in self.chain)

    def with_cut(self, spans: Spans) -> Fleet:
        """Return the same fleet for pipelines that all have this cut."""
        other = copy(self)
        other._common, other._rows, other._best = spans, {}, {}
        return other

    @property
    def least_depth(self) -> int:
        """Least number of stages of a pipeline."""
        return 1 if self._common is None else len(self._common)

    @property
    def exact(self) -> bool:
        """True if there are few enough counts to examine all."""
        return self.num_states <= EXACT

    @cached_property
    def num_states(self) -> int:
        """Number of counts."""
        return math.prod(count + 1 for count in self.counts)

    @cached_property
    def states(self) -> list[Counts]:
        """All counts but the empty one, small ones first."""
        found = product(*(range(count + 1) for count in self.counts))
        return sorted((counts for counts in found if any(counts)), key=lambda counts: (sum(counts), counts))

    def members(self, num_pipelines: int) -> int:
        """Return how many of ``num_pipelines`` pipelines average together (k)."""
        return num_pipelines if self.sync == "all_reduce" else min(GROUP, num_pipelines)

    # ----------------------------------------------------------- one pipeline

    def rate(self, counts: Counts, members: int) -> float:
        """Return λ of these devices; 0 if the model fits into them in no way."""
        return self._best_order(counts, members)[0]

    def order(self, counts: Counts, members: int, last: int | None = None) -> Order | None:
        """Return the class of each stage's device in the best order, with one of class ``last`` at the end; None if
        the model fits in no such order."""
        if last is None:
            return self._best_order(counts, members)[1] or None
        rated = [(self._rate_of(order, members), order) for order in self.orders(counts, last)]
        rate, order = max(rated, key=lambda entry: entry[0], default=(0.0, ()))
        return order if rate else None

    def bound(self, counts: Counts) -> float:
        """Return an upper bound of λ for all orders and cuts: one micro-batch computes everything in turn, at best on
        the fastest device, and the others follow at the pace of all devices together."""
        if not self.could_hold(counts):
            return 0.0
        if counts not in self._bounds:
            speeds = self._speeds(counts)
            self._bounds[counts] = 1 / (self._work * (self._alone / max(speeds) + (1 - self._alone) / sum(speeds)))
        return self._bounds[counts]

    def could_hold(self, counts: Counts) -> bool:
        """Return whether there are few enough devices, and all of them together can hold the model's states."""
        depth, memories = sum(counts), self._job(1).memories
        if depth > self._deepest or (self._common is not None and depth != len(self._common)):
            return False
        return self._states <= sum(
            memories[members[0]] * k for members, k in zip(self.classes, counts, strict=True) if k
        )

    def most(self) -> float:
        """Return an upper bound of the mini-batches per second of all sets of pipelines.

        A device of speed v adds at most ``v / (1 − 1/m + ρ/m)`` to the rate of its pipeline, where ρ is the sum of the
        speeds there over the largest: so the least ρ counts, of all sets with it that could hold the model. Where there
        are too many sets, ρ = 1.
        """
        least = [math.inf if self.exact else 1.0 for _ in self.classes]
        for counts in self.states if self.exact else ():
            if self.could_hold(counts):
                speeds = self._speeds(counts)
                ratio = sum(speeds) / max(speeds)
                least = [min(one, ratio) if count else one for one, count in zip(least, counts, strict=True)]
        fastest = [self._job(1).speeds[members[0]] for members in self.classes]
        parts = zip(self.counts, fastest, least, strict=True)
        return (
            sum(count * speed / (1 - self._alone + ratio * self._alone) for count, speed, ratio in parts) / self._work
        )

    # ---------------------------------------------------------------- devices

    def row(self, devices: tuple[int, ...]) -> PlacedPipeline | None:
        """Return a pipeline of these devices by stage, with its best cut; None if the model does not fit."""
        if devices not in self._rows:
            self._rows[devices] = self._cut_row(devices)
        return self._rows[devices]

    def _cut_row(self, devices: tuple[int, ...]) -> PlacedPipeline | None:
        job = self._job(len(devices))
        try:
            spans = self._common or pipeline_cut(job, devices)
        except ConfigurationError:
            return None
        if spans not in self._cuts:
            self._cuts[spans] = CutJob(job, spans)
        cut = self._cuts[spans]
        if len(spans) != len(devices) or not all(cut.fits(device, stage) for stage, device in enumerate(devices)):
            return None
        seconds = cut.pipeline_seconds(devices)
        return PlacedPipeline(devices, spans, seconds) if seconds < math.inf else None

    def rate_of(self, row: PlacedPipeline, members: int) -> float:
        """Return the mini-batches per second of one pipeline that averages with others."""
        return 1 / (row.seconds + self._averaging(row, members))

    def together(self, rows: Sequence[PlacedPipeline]) -> float:
        """Return the mini-batches per second of all pipelines."""
        rates = [self.rate_of(row, self.members(len(rows))) for row in rows]
        return len(rates) * min(rates) if self.sync == "all_reduce" else sum(rates)

    def devices(self, order: Sequence[int]) -> tuple[int, ...]:
        """Return a device for each class of ``order``."""
        taken = [iter(members) for members in self.classes]
        return tuple(next(taken[number]) for number in order)

    def class_of(self, device: int) -> int:
        return next(number for number, members in enumerate(self.classes) if device in members)

    def orders(self, counts: Counts, last: int | None = None) -> Iterator[Order]:
        """Yield the orders in which devices are tried; with ``last``, only those that end with a device of that
        class."""
        found = _orders(counts) if last is None else ((*order, last) for order in _orders(_without(counts, last)))
        return islice(found, MOST_ORDERS if self.exact else FEW_ORDERS)

    def _best_order(self, counts: Counts, members: int) -> tuple[float, Order]:
        if (counts, members) not in self._best:
            rated = [(0.0, ())] if not self.could_hold(counts) else [
                (self._rate_of(order, members), order) for order in self.orders(counts)
            ]  # fmt: skip
            self._best[counts, members] = max(rated, key=lambda entry: entry[0])
        rate, order = self._best[counts, members]
        return rate, order if rate else ()

    def _rate_of(self, order: Order, members: int) -> float:
        row = self.row(self.devices(order))
        return 0.0 if row is None else self.rate_of(row, members)

    def _averaging(self, row: PlacedPipeline, members: int) -> float:
        if members < 2:
            return 0.0
        moved = [sum(self.chain[block].parameter_bytes for block in span) / members for span in row.spans]
        links = [self._links[device] for device in row.devices]
        return max(
            2 * (members - 1) * (late + slow * amount) for (late, slow), amount in zip(links, moved, strict=True)
        )

    @cached_property
    def _links(self) -> list[tuple[float, float]]:
        """Seconds, and seconds per byte, of the median link of each device."""
        job, count = self._job(1), len(self.network)
        if count == 1:
            return [(0.0, 0.0)]
        others = [[other for other in range(count) if other != device] for device in range(count)]
        return [
            (median(job.latency[device][b] for b in those), median(job.slowness[device][b] for b in those))
            for device, those in enumerate(others)
        ]

    @cached_property
    def _states(self) -> float:
        """Bytes that the model takes whatever is in flight."""
        return sum(self._job(1).memory([1.0]).fixed)

    def _speeds(self, counts: Counts) -> list[float]:
        """Return the speed of each device, taken from the fastest of its class."""
        speeds = self._job(1).speeds
        return [speeds[members[0]] for members, count in zip(self.classes, counts, strict=True) for _ in range(count)]

    def _job(self, depth: int) -> PlacementJob:
        if depth not in self._jobs:
            asked = replace(self._asked, num_stages=depth, num_micro_batches=self.micro_batches)
            self._jobs[depth] = job_of(self.network, asked)
        return self._jobs[depth]


def _classes(network: Network) -> list[list[int]]:
    """Return classes of devices of one host that have the same memory and about equal speed, the fastest first; large
    memories come first, since the first stage keeps most micro-batches in flight."""

    def kind(device: int) -> tuple[float, float, str]:
        found = network.devices[device]
        return (-(math.inf if found.memory_bytes is None else found.memory_bytes), -found.speed, found.host)

    classes: list[list[int]] = []
    for device in sorted(range(len(network)), key=kind):
        own = network.devices[device]
        for members in classes:
            other = network.devices[members[0]]
            same = (other.host, other.memory_bytes) == (own.host, own.memory_bytes)
            if same and other.speed <= ALIKE * own.speed:
                members.append(device)
                break
        else:
            classes.append([device])
    return classes


def _orders(counts: Counts) -> Iterator[Order]:
    """Yield all orders of these numbers of devices of each class, each once."""
    if not any(counts):
        yield ()
    for number, count in enumerate(counts):
        if count:
            for rest in _orders(_without(counts, number)):
                yield (number, *rest)


def _without(counts: Counts, number: int) -> Counts:
    """Return the counts with one device of that class fewer."""
    return (*counts[:number], counts[number] - 1, *counts[number + 1 :])
