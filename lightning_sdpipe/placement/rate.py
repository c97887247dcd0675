"""Rate of a layout: the mini-batches per second of its pipelines, which the search maximises.

A pipeline takes ``T = Σ_j (first share of stage j and of the cut after it) + max_j (the rest on stage j)`` for a
mini-batch. With a flush and m micro-batches, the first share is one micro-batch, 1/m of the computation and of the
bytes, and the rest follows at the pace of the busiest stage: a stage computes and transfers in turn, while the
transfers at its two ends overlap. The cost model (:mod:`lightning_sdpipe.placement.cost`) says how transfers add up;
without computation, and with all pipelines averaging together, ``T`` plus averaging is that cost.

Averaging takes a worker ``s = Σ 2 (α + bytes / (k β))`` over the workers of other pipelines that hold a part of what it
holds, with k members in a group. The rate of all-reduce is ``N / (max_i T_i + max s)``. If pipelines average in groups,
each waits only for its group, and the rate is ``Σ_i 1 / (T_i + s_i)``, where ``s_i`` is ``s`` of the pipeline's slowest
worker with (k − 1) of the N − 1 others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np

from lightning_sdpipe.partition.balance import Memory
from lightning_sdpipe.placement.cost import CostModel, shares
from lightning_sdpipe.placement.model import Block
from lightning_sdpipe.placement.network import Network

Sync = Literal["all_reduce", "groups"]
Spans: TypeAlias = tuple[range, ...]
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

GROUP = 4
"""Members of a group; the policy splits larger candidates into groups of this size."""

UNLINKED = 10.0
"""Ratio of a missing link's time to the slowest link's; the missing link counts as a misfit, too."""


@dataclass(frozen=True)
class Layout:
    """Pipelines: the device and the blocks of each stage. Devices may be left out, and pipelines may differ."""

    rows: tuple[tuple[int, ...], ...]
    cuts: tuple[Spans, ...]

    @property
    def depths(self) -> list[int]:
        """Number of stages of each pipeline."""
        return [len(row) for row in self.rows]

    @property
    def alike(self) -> bool:
        """True if all pipelines have one cut."""
        return len(set(self.cuts)) == 1

    @property
    def stages(self) -> list[list[int]]:
        """Devices of each stage, by pipeline; all pipelines must have the same depth."""
        return [list(group) for group in zip(*self.rows, strict=True)]


@dataclass(frozen=True)
class Job:
    """A training job: the model, the devices and the schedule.

    Args:
        network: the network of all devices.
        chain: the model's blocks.
        micro_batches: micro-batches of a mini-batch; None for as many as the deepest pipeline has stages.
        cost: how transfers add up; ``"pipedream"`` for the schedule of that name.
        sync: whether all pipelines average together, or in groups.
        optimizer_state: bytes of optimizer state for each byte of trained parameters.
        last: a device that must run a last stage; None if any may.
    """

    network: Network
    chain: tuple[Block, ...]
    micro_batches: int | None = None
    cost: CostModel = "pipelined"
    sync: Sync = "groups"
    optimizer_state: float = 2.0
    last: int | None = None

    def number(self, depths: Sequence[int]) -> int:
        """Return the number of micro-batches of pipelines of these depths."""
        return self.micro_batches or max(depths)

    @cached_property
    def speeds(self) -> list[float]:
        return [device.speed for device in self.network.devices]

    @cached_property
    def memories(self) -> list[float]:
        """Bytes of memory of each device; infinite where unknown."""
        return [math.inf if d.memory_bytes is None else float(d.memory_bytes) for d in self.network.devices]

    @cached_property
    def crossing(self) -> list[float]:
        """Bytes over the cut after each block except the last, both ways; infinite if its output cannot travel."""
        return [
            math.inf if block.activation_bytes is None else float(block.activation_bytes + block.gradient_bytes)
            for block in self.chain[:-1]
        ]

    def memory(self, available: Sequence[float], micro_batches: int) -> Memory:
        """Return the memory check for a pipeline whose stages have these ``available`` bytes."""
        trained = [
            block.parameter_bytes if block.trained_bytes is None else block.trained_bytes for block in self.chain
        ]
        ahead, flush = range(len(available), 0, -1), self.cost != "pipedream"
        return Memory(
            available,
            [
                block.parameter_bytes + (1 + self.optimizer_state) * amount
                for block, amount in zip(self.chain, trained, strict=True)
            ],
            [block.saved_bytes / micro_batches for block in self.chain],
            [min(micro_batches, depth) if flush else micro_batches * depth for depth in ahead],
            trained,
            [depth if depth > 1 and not flush else 0 for depth in ahead],
        )

    # ------------------------------------------------------------------ arrays

    @cached_property
    def links(self) -> tuple[Array, Array, Array | None]:
        """For each link, both ways: seconds of latency, and seconds per byte; and whether the link is missing, None if
        none is."""
        latency, rate = np.array(self.network.latency()), np.array(self.network.bandwidth())
        missing = (rate == 0.0) & ~np.eye(len(rate), dtype=bool)
        linked = (rate > 0.0) & np.isfinite(latency)
        slowest = UNLINKED * (1 / rate[linked]).max(initial=0.0)
        slow = np.where(linked, 2.0 / np.where(linked, rate, 1.0), 2.0 * slowest)
        late = np.where(linked, 2.0 * latency, 2.0 * UNLINKED * latency[linked].max(initial=0.0))
        for matrix in (late, slow):
            np.fill_diagonal(matrix, 0.0)
        return late, slow, missing if missing.any() else None

    @cached_property
    def computes(self) -> bool:
        """Whether the times of computation are known."""
        return any(block.seconds for block in self.chain)

    def slowness(self, one: int, other: int) -> float:
        """Return the seconds per byte over a link, one way."""
        return float(self.links[1][one, other]) / 2

    @cached_property
    def devices(self) -> tuple[Array, Array]:
        """Speed and memory of each device."""
        return np.array(self.speeds), np.array(self.memories)

    @cached_property
    def totals(self) -> tuple[Array, Array]:
        """Seconds, and bytes of parameters, of all blocks before each cut."""
        seconds = np.cumsum([0.0, *(block.seconds for block in self.chain)])
        return seconds, np.cumsum([0.0, *(float(block.parameter_bytes) for block in self.chain)])


class Shape:
    """The work, bytes and memory of each place in a layout, whatever device is there. Places are ordered by pipeline,
    then by stage."""

    def __init__(self, job: Job, cuts: Sequence[Spans]) -> None:
        self.cuts = tuple(cuts)
        depths = [len(spans) for spans in cuts]
        self.micro_batches = m = job.number(depths)
        self.count = len(depths)
        spans = [span for row in cuts for span in row]
        start = np.array([span.start for span in spans])
        stop = np.array([span.stop for span in spans])
        self.first = np.cumsum([0, *depths[:-1]])
        self.row = np.repeat(np.arange(self.count), depths)
        self.stage = np.arange(len(spans)) - self.first[self.row]
        self.is_last = np.append(self.row[1:] != self.row[:-1], True)
        self.following = np.arange(len(spans)) + ~self.is_last
        seconds, held = job.totals
        self.preceding = np.arange(len(spans)) - 1  # before a first stage is a last one, which sends nothing
        self.work = seconds[stop] - seconds[start]
        crossing = np.array([*job.crossing, 0.0])
        self.crossing = np.where(self.is_last, 0.0, crossing[stop - 1]) / 2  # one way
        self.needed = np.concatenate([self._needed(job, row, m) for row in cuts])
        other = self.row[:, None] != self.row
        overlap = np.minimum(held[stop][:, None], held[stop]) - np.maximum(held[start][:, None], held[start])
        shared = other & (np.minimum(stop[:, None], stop) > np.maximum(start[:, None], start))
        self.one, self.other = np.nonzero(shared)
        """Pairs of places in different pipelines that hold a common part of the model."""
        self.first_pair = np.searchsorted(self.one, np.arange(len(spans)))
        members = self.count if job.sync == "all_reduce" else min(GROUP, self.count)
        often = (members - 1) / max(self.count - 1, 1)
        self.often, self.share = often, often * overlap[self.one, self.other] / members
        self.even = len({*zip(self.work.tolist(), (stop - start).tolist(), strict=True)}) == 1
        self.sends_alike = len({*(held[stop] - held[start])}) == 1 and len({*self.crossing[~self.is_last]}) <= 1

    @staticmethod
    def _needed(job: Job, spans: Spans, m: int) -> list[float]:
        memory = job.memory([1.0] * len(spans), m)
        return [memory.needed(stage, span.start, span.stop) for stage, span in enumerate(spans)]


@dataclass(frozen=True)
class Times:
    """Seconds of layouts of one shape; the first axis numbers the layouts.

    ``pipelines``: a mini-batch of each pipeline, without averaging; ``links``: the transfer after each place;
    ``computing``: the computation there; ``averaging``: each worker's averaging. ``seconds`` is 1 / rate, the mean time
    between mini-batches of all pipelines; ``smooth`` is the same with power means in place of maxima. ``misfits``
    counts workers that do not fit, and missing links.
    """

    pipelines: Array
    links: Array
    computing: Array
    averaging: Array
    seconds: Array
    smooth: Array
    misfits: Array


def times(job: Job, shape: Shape, devices: Array, power: int = 0) -> Times:
    """Return the seconds of layouts, given their ``devices`` (layouts × places), with power means of 2^``power``. These
    use only products and square roots, so that every machine finds the same."""
    (late, slow, missing), (speeds, memories) = job.links, job.devices
    rule, below = shares(job.cost, shape.micro_batches), devices[:, shape.following]
    computing = shape.work / speeds[devices]
    transfer = shape.crossing * slow[devices, below]
    links = rule.step * transfer + late[devices, below] if rule.step else 0.0 * transfer
    after = rule.period * transfer
    busy = (1 - rule.computing) * computing + np.maximum(after, after[:, shape.preceding])
    first = rule.computing * computing + (0.0 if rule.together else links)
    pipelines = np.add.reduceat(first, shape.first, axis=1) + np.maximum.reduceat(busy, shape.first, axis=1)
    averaging = np.zeros(devices.shape)
    if shape.count > 1:
        one, other = devices[:, shape.one], devices[:, shape.other]
        exchanges = shape.often * late[one, other] + shape.share * slow[one, other]
        averaging = np.add.reduceat(exchanges, shape.first_pair, axis=1)
    slowest = np.maximum.reduceat(averaging, shape.first, axis=1)

    def together(power: int) -> Array:
        shared = _of_slowest(links, shape, power) if rule.together else 0.0
        if job.sync == "all_reduce":
            return np.asarray(shared + _largest(pipelines.T, power) + _largest(averaging.T, power)) / shape.count
        with np.errstate(divide="ignore"):
            return np.asarray(1 / (1 / (np.transpose(pipelines + slowest) + shared)).sum(axis=0))

    seconds = together(0)
    smooth = seconds
    if power:
        smooth = together(power) + SHARE * (busy.mean(axis=1) + averaging.sum(axis=1) / shape.count) / shape.count
    misfits = (shape.needed > memories[devices]).sum(axis=1)
    if missing is not None:
        misfits += missing[devices, below].sum(axis=1)
        if shape.count > 1:
            misfits += missing[one, other].sum(axis=1)
    if job.last is not None:
        misfits += ~(devices[:, shape.is_last] == job.last).any(axis=1)
    return Times(pipelines, links + after, computing, averaging, seconds, smooth, misfits)


SHARE = 0.03
"""Weight in ``smooth`` of the mean over all workers, beside the slowest ones."""


def _of_slowest(links: Array, shape: Shape, power: int) -> Array:
    padded = np.zeros((shape.count, int(shape.stage.max()) + 1, len(links)))
    padded[shape.row, shape.stage] = links.T
    return np.asarray(_largest(padded, power).sum(axis=0))


def _largest(values: Array, power: int) -> Array:
    """Return the largest of ``values`` along the first axis or, with ``power``, their power mean."""
    top = values.max(axis=0)
    if not power:
        return np.asarray(top)
    scaled = values / np.where(top > 0.0, top, 1.0)
    for _ in range(power):
        scaled = scaled * scaled
    mean = scaled.mean(axis=0)
    for _ in range(power):
        mean = np.sqrt(mean)
    return np.asarray(top * mean)
