"""The process groups of a run, opened once per process."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from lightning_sdpipe.mesh import Mesh


@dataclass(frozen=True)
class ProcessGroups:
    """This worker's place in the mesh and its groups: ``pipeline`` holds the stages of its pipeline, ``stage`` the
    replicas of its stage in all pipelines."""

    mesh: Mesh
    rank: int
    pipeline: dist.ProcessGroup
    stage: dist.ProcessGroup

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
