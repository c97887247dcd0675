"""Cost of averaging in a group beside gloo's own all-reduce, among all workers of a machine: over loopback, so it is
the processors that it costs. On a link, both send the same number of bytes."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist

from lightning_sdpipe.exchange.moving import GroupMean, finish
from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.topology.groups import Replicas
from recipes.suites.processes import run_processes
from recipes.suites.ratios import Ratios, Row, ratio, rotated

Timing = dict[str, float]  # seconds of a call, by what was called


def measure(*, members: int, mebibytes: int, calls: int, repeats: int, seed: int) -> tuple[list[Row], Ratios]:
    """Medians of both, and their ratio.

    Args:
        members: of the group, one process each.
        mebibytes: of the model, float32.
        calls: of one timing.
        repeats: timings of each.
        seed: of the models.
    """
    by_rank = run_processes(members, _compare, members, mebibytes, calls, repeats, seed)
    slowest = [{name: max(t[name] for t in timings) for name in timings[0]} for timings in zip(*by_rank, strict=True)]
    rows: list[Row] = [
        {"what": name, "members": members, "MiB": mebibytes, "ms": 1e3 * median(timing[name] for timing in slowest)}
        for name in slowest[0]
    ]
    key = f"exchange/group{members}"
    meaning = f"time to average {mebibytes} MiB in a group of {members} over that of gloo's all-reduce"
    return rows, {key: ratio([timing["group mean"] / timing["all_reduce"] for timing in slowest], 1.2, meaning)}


def _compare(rank: int, members: int, mebibytes: int, calls: int, repeats: int, seed: int) -> list[Timing]:
    model = torch.randn(mebibytes * 2**18, generator=torch.Generator().manual_seed(seed + rank))
    world = dist.group.WORLD
    assert world is not None
    mover = GroupMean(Replicas(world, range(members), 0, rank))
    workers = tuple(Worker(0, pipeline) for pipeline in range(members))

    def group_mean(sequence: int) -> None:
        finish(mover.start([model], Group(workers, (1 / members,) * members, sequence, "timed")))

    def all_reduce(_: int) -> None:
        model.div_(members)
        dist.all_reduce(model)

    work = {"group mean": group_mean, "all_reduce": all_reduce}
    timings: list[Timing] = []
    for repeat in range(-1, repeats):  # the first does not count: connections are made
        timing = {}
        for name in rotated(list(work), repeat):
            dist.barrier()
            start = time.perf_counter()
            for call in range(calls):
                work[name]((repeat + 1) * calls + call)
            timing[name] = (time.perf_counter() - start) / calls
        timings.append(timing)
    return timings[1:]
