"""Throughput of a placement on devices of unlike speed.

A stage is busy for its blocks, divided by the speed of its device, and for the transfers over the cuts at both its
ends; nothing is assumed to overlap, as in :mod:`lightning_sdpipe.partition.balance`. With a flush, a mini-batch of m
micro-batches takes one of them through all stages and cuts, and then m − 1 at the pace of the busiest stage. Without a
flush (PipeDream) only that pace counts: the rate of pipeline i is ``λ_i = 1 / max_j (work_j / v_ij + cross_ij)``.

All-reduce makes every pipeline as slow as the slowest, and then averages: N / (max_i T_i + data). With averaging in
groups a pipeline waits for its own group only: Σ_i 1 / (T_i + group).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from lightning_sdpipe.partition.balance import Memory
from lightning_sdpipe.placement.cost import CostModel, Stages, Weights, weights
from lightning_sdpipe.placement.model import Block, traffic_of
from lightning_sdpipe.placement.network import Matrix, Network

Sync = Literal["all_reduce", "groups"]
Spans = tuple[range, ...]

GROUP = 4
"""Members of a group that averages, where no groups were simulated: the size into which large candidates are split."""


@dataclass(frozen=True)
class PlacementJob:
    """A training job: the model, the devices and the schedule.

    Args:
        network: a network of M × N devices.
        chain: the model's blocks.
        num_stages: M.
        num_micro_batches: m.
        flush: False for PipeDream's schedule.
        sync: whether all pipelines average together, or in groups.
        in_flight: largest number of micro-batches whose backward each stage still has to run.
        copies: copies of the weights of each stage, for PipeDream.
        optimizer_state: bytes of its state for each byte of trained parameters.
        last: a device that has to run the last stage; None if any may.
    """

    network: Network
    chain: tuple[Block, ...]
    num_stages: int
    num_micro_batches: int
    flush: bool
    sync: Sync
    in_flight: Sequence[int]
    copies: Sequence[int]
    optimizer_state: float
    last: int | None = None

    @property
    def num_pipelines(self) -> int:
        return len(self.network) // self.num_stages

    @cached_property
    def speeds(self) -> list[float]:
        return [device.speed for device in self.network.devices]

    @cached_property
    def memories(self) -> list[float]:
        """Bytes of memory of each device; infinite where unknown."""
        return [math.inf if d.memory_bytes is None else float(d.memory_bytes) for d in self.network.devices]

    @cached_property
    def latency(self) -> Matrix:
        return self.network.latency()

    @cached_property
    def slowness(self) -> Matrix:
        """Seconds per byte; infinite where there is no link."""
        return [[1 / rate if rate else math.inf for rate in row] for row in self.network.bandwidth()]

    def memory(self, available: Sequence[float]) -> Memory:
        """Return the memory check for devices with these bytes, one for each stage."""
        trained = [
            block.parameter_bytes if block.trained_bytes is None else block.trained_bytes for block in self.chain
        ]
        states = [(1 + self.optimizer_state) * amount for amount in trained]
        return Memory(
            available,
            [block.parameter_bytes + state for block, state in zip(self.chain, states, strict=True)],
            [block.saved_bytes / self.num_micro_batches for block in self.chain],
            self.in_flight,
            trained,
            self.copies,
        )


class CutJob:
    """A job with a cut: the times of its devices in every place."""

    def __init__(self, job: PlacementJob, spans: Sequence[range]) -> None:
        self.job, self.spans = job, tuple(spans)
        self.traffic = traffic_of(job.chain, spans)
        self.work = [sum(job.chain[block].seconds for block in span) for span in spans]
        needs = job.memory([1.0] * job.num_stages)
        self._needed = [needs.needed(stage, span.start, span.stop) for stage, span in enumerate(spans)]
        self._members = _members(job)

    def weights(self, model: CostModel) -> Weights:
        """Return the costs of links, without computing."""
        job = self.job
        return weights(job.network, job.num_pipelines, self.traffic, model, job.num_micro_batches)

    def fits(self, device: int, stage: int) -> bool:
        """Return whether this device may run this stage."""
        if device == self.job.last and stage < self.job.num_stages - 1:
            return False
        return self._needed[stage] <= self.job.memories[device]

    def pipeline_seconds(self, devices: Sequence[int]) -> float:
        """Return the seconds of a mini-batch of a pipeline with these devices as its stages, without averaging."""
        return self.pipeline(devices)[0]

    def pipeline(self, devices: Sequence[int]) -> tuple[float, float]:
        """Return the seconds of a mini-batch, and the mean time for which stages are busy."""
        job, busiest, once, busy, before = self.job, 0.0, 0.0, 0.0, 0.0
        for stage, device in enumerate(devices):
            compute, after = self.work[stage] / job.speeds[device], 0.0
            if stage < len(devices) - 1:
                follower = devices[stage + 1]
                after = 2 * self.traffic.cut_bytes[stage] * job.slowness[device][follower]
                once += 2 * job.latency[device][follower] + after / job.num_micro_batches
            once += compute / job.num_micro_batches
            busiest = max(busiest, before + compute + after)
            busy += before + compute + after
            before = after
        seconds = once + busiest * (1 - 1 / job.num_micro_batches) if job.flush else busiest
        return seconds, busy / len(devices)

    def group_seconds(self, stage: int, group: Sequence[int]) -> float:
        """Return the mean seconds of averaging in one stage: of all replicas, or of a group of them."""
        spent = self._spent(stage, group, self._members)
        if self._members == len(group):
            return max(spent)
        return sum(spent) / len(group) * (self._members - 1) / (len(group) - 1)

    def averaging_seconds(self, stage: int, group: Sequence[int]) -> float:
        """Return the seconds of averaging of this group's slowest member."""
        return max(self._spent(stage, group, len(group)))

    def _spent(self, stage: int, group: Sequence[int], shares: int) -> list[float]:
        """Return what each member spends on exchanging a share of the stage's parameters with each other member."""
        latency, slowness, amount = self.job.latency, self.job.slowness, self.traffic.stage_bytes[stage] / shares
        return [sum(2 * (latency[a][b] + amount * slowness[a][b]) for b in group if b != a) for a in group]

    def seconds(self, stages: Stages) -> float:
        """Return the mean seconds for one mini-batch of every pipeline; infinite if a device may not run its stage."""
        if not all(self.fits(device, stage) for stage, group in enumerate(stages) for device in group):
            return math.inf
        times = [self.pipeline_seconds(devices) for devices in zip(*stages, strict=True)]
        data = max(self.group_seconds(stage, group) for stage, group in enumerate(stages))
        return combined(times, data, self.job.sync)


def averaging_seconds_per_byte(job: PlacementJob, group: Sequence[int]) -> float:
    """Return the seconds that each byte of parameters adds to averaging among these replicas of a stage, for the
    slowest of them."""
    others = max(len(group) - 1, 1)
    shared = 2 * (_members(job) - 1) / _members(job) / others
    return shared * max(sum(job.slowness[a][b] for b in group if b != a) for a in group)


def _members(job: PlacementJob) -> int:
    """Return the number of members of a group that averages."""
    return job.num_pipelines if job.sync == "all_reduce" else min(GROUP, job.num_pipelines)


def combined(times: Sequence[float], data: float, sync: Sync) -> float:
    """Return N over the mini-batches per second of N pipelines.

    Args:
        times: seconds for a mini-batch of each pipeline.
        data: seconds for averaging.
        sync: whether pipelines wait for all others, or for their groups.
    """
    if sync == "all_reduce":
        return max(times) + data
    rate = sum(1 / (time + data) if time + data else math.inf for time in times)
    return len(times) / rate if rate else math.inf
