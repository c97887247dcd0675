"""Lightning's view of the processes of an elastic job."""

from __future__ import annotations

from lightning.fabric.plugins import ClusterEnvironment

from lightning_sdpipe.worker.launching.elastic_job import ElasticJob


class ElasticEnvironment(ClusterEnvironment):
    """What the job's launcher has said, wherever it runs.

    Lightning would look for SLURM first, even if ``sdpipe run`` is what SLURM started, and would refuse a Trainer whose
    devices × num_nodes are not the job's processes.
    """

    def __init__(self, job: ElasticJob) -> None:
        super().__init__()
        self.job = job

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self.job.main_address

    @property
    def main_port(self) -> int:
        return self.job.main_port

    @staticmethod
    def detect() -> bool:
        """False: the strategy makes it, Lightning does not choose it."""
        return False

    def world_size(self) -> int:
        return self.job.world_size

    def set_world_size(self, size: int) -> None:
        """Nothing: the launcher has said it."""

    def global_rank(self) -> int:
        return self.job.rank

    def set_global_rank(self, rank: int) -> None:
        """Nothing: the launcher has said it."""

    def local_rank(self) -> int:
        return self.job.local_rank

    def node_rank(self) -> int:
        return self.job.node_rank
