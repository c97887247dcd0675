"""Real workers: two pipelines of two stages, each a process with its own loader, dealt by a scheduler's process."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_sdpipe.data.dealt import DealtBatches
from lightning_sdpipe.dealing.leases import Segment
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.scheduler.server.process import SchedulerProcess
from lightning_sdpipe.topology.mesh import Mesh
from tests.scheduler.live_scheduler import OrdinaryClient
from tests.workers import run_workers

PIPELINES, SAMPLES, BATCH = 2, 161, 4
SECONDS = (0.004, 0.04)
"""That a batch takes on each pipeline."""


def train(rank: int) -> list[list[tuple[int, int, list[int]]]]:
    """Epoch, position and samples of what this worker has trained, by segment."""
    mesh = Mesh.build(2 * PIPELINES, 2)
    stage, pipeline = mesh.locate(rank)
    scheduler = SchedulerProcess.embedded(NoSync(), 2, PIPELINES) if rank == 0 else None
    where = [(scheduler.address, scheduler.credentials) if scheduler else None]
    dist.broadcast_object_list(where)
    address, keys = where[0]
    client = OrdinaryClient(address, Worker(stage, pipeline), 1, credentials=keys)
    client.join()
    dataset = TensorDataset(torch.arange(SAMPLES))
    sampler = DistributedSampler(dataset, PIPELINES, pipeline)
    workers = 1 if rank == 0 else 0  # stages may load differently
    dealt = DealtBatches(DataLoader(dataset, BATCH, sampler=sampler, num_workers=workers), PIPELINES, client.lease)
    trained: list[list[tuple[int, int, list[int]]]] = []
    try:
        for epoch in range(2):
            sampler.set_epoch(epoch)
            length = len(dealt.shards)
            for start, stop in ((0, 5), (5, length)):
                dealt.begin(Segment(3, epoch, start, stop), seed=1)
                trained.append([])
                while True:
                    batch = dealt.take()
                    if batch is not None:
                        time.sleep(SECONDS[pipeline])
                        trained[-1].append((epoch, batch.position, batch.data[0].tolist()))
                        client.trained(len(trained[-1]))
                    elif not dealt.wait():
                        break
                dist.barrier()  # the pause
    finally:
        client.close()
        dist.barrier()
        if scheduler is not None:
            scheduler.close()
    return trained


@pytest.mark.distributed
def test_processes_train_each_batch_once_and_stages_the_same() -> None:
    mesh = Mesh.build(2 * PIPELINES, 2)
    by_rank = run_workers(2 * PIPELINES, train)
    for pipeline in range(PIPELINES):
        first, second = (by_rank[rank] for rank in mesh.pipeline_ranks(pipeline))
        assert first == second
    of = [by_rank[mesh.rank(0, pipeline)] for pipeline in range(PIPELINES)]
    everything = sorted(batch for mine in of for segment in mine for batch in segment)
    expected = []
    for epoch in range(2):
        for home in range(PIPELINES):
            sampler = DistributedSampler(range(SAMPLES), PIPELINES, home)  # type: ignore[arg-type]
            sampler.set_epoch(epoch)
            indices = list(sampler)
            expected += [
                (epoch, n * PIPELINES + home, indices[n * BATCH : (n + 1) * BATCH])
                for n in range(-(-len(indices) // BATCH))
            ]
    assert everything == sorted(expected)
    for number in (1, 3):  # once their speeds are known
        assert len(of[0][number]) > 1.5 * len(of[1][number])
    for number in (0, 2):
        assert all(position < 5 * PIPELINES for mine in of for _, position, _ in mine[number])
