"""The map between ranks and the mesh of stages and pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate

from lightning_sdpipe.errors import ConfigurationError


@dataclass(frozen=True)
class Mesh:
    """The ranks of M stages × N pipelines (SDPipe §3: worker (j, i) runs stage j of pipeline i).

    ``ranks[i][j]`` is the global rank of stage ``j`` of pipeline ``i``. Rank 0 must hold a last stage: Lightning
    gives rank 0 the logger and the progress bar, and the loss exists on last stages only.

    Unless the pipelines are ``alike``, each has its own depth and cut, and stages with the same number are not
    replicas.
    """

    ranks: tuple[tuple[int, ...], ...]
    alike: bool = True

    def __post_init__(self) -> None:
        flat = sorted(rank for row in self.ranks for rank in row)
        if flat != list(range(len(flat))) or not all(self.ranks) or (self.alike and len(set(self.depths)) != 1):
            raise ConfigurationError(
                f"A mesh names every rank once, in rows of one length; given {self.ranks}. "
                "Give one row per pipeline with the rank of each stage."
            )
        if all(row[-1] != 0 for row in self.ranks):
            raise ConfigurationError(
                f"Rank 0 must hold the last stage of a pipeline (it owns the logger); given {self.ranks}. "
                "Put rank 0 at the end of one row."
            )

    @classmethod
    def build(cls, world_size: int, num_stages: int) -> Mesh:
        """Build a mesh in which consecutive ranks form a pipeline, its last stage on the lowest rank."""
        if num_stages < 1 or world_size % num_stages:
            allowed = [m for m in range(1, world_size + 1) if world_size % m == 0]
            raise ConfigurationError(
                f"{world_size} worker{'s' * (world_size > 1)} cannot form pipelines of num_stages={num_stages} stages: "
                f"num_stages must divide the number of workers. Use num_stages from {allowed}, or a multiple of "
                f"{num_stages} workers (devices × num_nodes)."
            )
        return cls(rows_of([num_stages] * (world_size // num_stages)))

    @classmethod
    def of_depths(
        cls, world_size: int, depths: Sequence[int], alike: bool, counted: str = "devices × num_nodes are"
    ) -> Mesh:
        """Build a mesh as :meth:`build` does, for pipelines of these ``depths``. ``counted`` tells people where the
        number of workers comes from."""
        if sum(depths) != world_size:
            raise ConfigurationError(
                f"num_stages={list(depths)} are {sum(depths)} workers, and {counted} {world_size}. "
                "Change one of them: each stage of each pipeline is a worker."
            )
        return cls(rows_of(depths), alike)

    @property
    def depths(self) -> tuple[int, ...]:
        """Number of stages of each pipeline."""
        return tuple(map(len, self.ranks))

    @property
    def num_stages(self) -> int:
        """Number of stages of a pipeline; of the deepest one, where they differ."""
        return max(self.depths)

    def depth(self, pipeline: int) -> int:
        """Return the number of stages of ``pipeline``."""
        return len(self.pipeline_ranks(pipeline))

    @property
    def num_pipelines(self) -> int:
        return len(self.ranks)

    @property
    def pipelines(self) -> Sequence[int]:
        """Numbers of the pipelines of ``ranks``."""
        return range(len(self.ranks))

    def locate(self, rank: int) -> tuple[int, int]:
        """Return ``(stage, pipeline)`` of a global rank."""
        return next((row.index(rank), pipeline) for pipeline, row in enumerate(self.ranks) if rank in row)

    def rank(self, stage: int, pipeline: int) -> int:
        return self.ranks[pipeline][stage]

    def stage_ranks(self, stage: int) -> Sequence[int]:
        """Return the ranks of the replicas of one stage, by pipeline."""
        assert self.alike, "the stages of pipelines that are cut unlike are no replicas"
        return [row[stage] for row in self.ranks]

    @property
    def last_ranks(self) -> Sequence[int]:
        """Ranks of the last stages, by pipeline."""
        return [row[-1] for row in self.ranks]

    def is_last(self, rank: int) -> bool:
        """Return whether ``rank`` has the last stage of its pipeline."""
        return rank in self.last_ranks

    def pipeline_ranks(self, pipeline: int) -> Sequence[int]:
        """Return the ranks of one pipeline, by stage."""
        return self.ranks[pipeline]


def rows_of(depths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of pipelines of these depths, by stage: consecutive ranks form one, its last stage first."""
    ends = accumulate(depths)
    return tuple(tuple(range(end - 1, end - depth - 1, -1)) for end, depth in zip(ends, depths, strict=True))


@dataclass(frozen=True)
class OnePipeline(Mesh):
    """The mesh as a pipeline of an elastic run sees it. Its world has ranks of its own; other pipelines are in other
    worlds."""

    _: KW_ONLY
    number: int = 0
    """Number of this pipeline; it may be above N, if more came than were planned."""
    counted: int = 1
    """The number N of pipelines by which an epoch is counted, however many train."""

    @classmethod
    def of(cls, num_stages: int, number: int, counted: int) -> OnePipeline:
        """Build the mesh; rank 0 has the last stage, as in other meshes."""
        return cls((tuple(range(num_stages - 1, -1, -1)),), True, number=number, counted=counted)

    @property
    def num_pipelines(self) -> int:
        return self.counted

    @property
    def pipelines(self) -> Sequence[int]:
        return (self.number,)

    def locate(self, rank: int) -> tuple[int, int]:
        return self.ranks[0].index(rank), self.number

    def rank(self, stage: int, pipeline: int) -> int:
        return self.pipeline_ranks(pipeline)[stage]

    def pipeline_ranks(self, pipeline: int) -> Sequence[int]:
        assert pipeline == self.number, "other pipelines are in other worlds"
        return self.ranks[0]
