"""The process groups of a run, opened once per process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_sdpipe.mesh import Mesh


class Traffic:
    """Bytes that were sent to other replicas; several threads may add to it."""

    def __init__(self) -> None:
        self.bytes = 0
        self._lock = threading.Lock()

    def add(self, sent: int) -> None:
        with self._lock:
            self.bytes += sent


@dataclass(frozen=True)
class Replicas:
    """The replicas of a stage, as one of them reaches the others: by the rank of each pipeline in a process group."""

    group: dist.ProcessGroup
    ranks: Sequence[int]  # of each pipeline, in ``group``
    stage: int
    pipeline: int  # this worker's
    traffic: Traffic = field(default_factory=Traffic, compare=False, repr=False)

    def name(self, pipeline: int) -> str:
        """Of another one, for messages."""
        return f"pipeline {pipeline} of stage {self.stage}"

    def coalesces(self, device: torch.device) -> bool:
        """Must messages of both directions be begun together (NCCL)?"""
        return isinstance(self.group, dist.ProcessGroup) and self.group._get_backend(device).supports_coalescing

    def stages(self, tensor: torch.Tensor) -> bool:
        """Must ``tensor`` go through the memory of the host?"""
        return tensor.device.type == "cuda" and self.group.name() == "gloo"


@dataclass(frozen=True)
class ProcessGroups:
    """This worker's place in the mesh and its groups: ``pipeline`` holds the stages of its pipeline, ``stage`` the
    replicas of its stage in all pipelines."""

    mesh: Mesh
    rank: int
    pipeline: dist.ProcessGroup
    stage: dist.ProcessGroup
    _side_channels: list[dist.ProcessGroup] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic, compare=False, repr=False)

    @classmethod
    def open(cls, mesh: Mesh, timeout: timedelta | None) -> ProcessGroups:
        """Every rank must call it. ``timeout`` bounds each transfer: a sub-group does not inherit the world's."""
        rank = dist.get_rank()
        stage, pipeline = mesh.locate(rank)
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        rows = [tuple(mesh.pipeline_ranks(i)) for i in range(mesh.num_pipelines)]
        columns = [tuple(mesh.stage_ranks(j)) for j in range(mesh.num_stages)]
        for ranks in (*rows, *columns):
            if ranks not in groups:
                groups[ranks] = dist.new_group(sorted(ranks), timeout=timeout)
        return cls(mesh, rank, groups[rows[pipeline]], groups[columns[stage]])

    def replicas(self, group: dist.ProcessGroup | None = None) -> Replicas:
        """Of this worker's stage, over ``group``, which holds them all: that of the stage if it is None."""
        stage, pipeline = self.mesh.locate(self.rank)
        ranks = self.mesh.stage_ranks(stage)
        in_order = sorted(ranks)
        return Replicas(group or self.stage, [in_order.index(rank) for rank in ranks], stage, pipeline, self.traffic)

    def side_channel(self, timeout: timedelta | None) -> dist.ProcessGroup:
        """A second group of the replicas of this worker's stage, on gloo, for threads beside the training.

        Every rank must call it; it is opened once.
        """
        if not self._side_channels:
            for stage in range(self.mesh.num_stages):
                ranks = sorted(self.mesh.stage_ranks(stage))
                group = dist.new_group(ranks, timeout=timeout, backend="gloo")
                if self.rank in ranks:
                    self._side_channels.append(group)
        return self._side_channels[0]

    @property
    def everybody(self) -> dist.ProcessGroup:
        """All workers of the run."""
        world = dist.group.WORLD
        assert world is not None, "open() has been called, so the world exists"
        return world
