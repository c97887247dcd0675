"""Ablations of exchanges (BAGUA, table 5): averages of eight workers on two hosts with and without a
hierarchy, and of a model in one flat buffer or tensor by tensor. Links are really slow; nothing is trained."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.moving import finish
from lightning_sdpipe.exchange.payloads import Full
from lightning_sdpipe.exchange.references import CommonReference
from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.topology.groups import Replicas
from recipes.suites.namespaces import INTERFACE, NotAllowed, hosts
from recipes.suites.processes import run_on_hosts
from recipes.suites.ratios import Ratios, Row, ratio, rotated

HOSTS = 2
WORKERS = 8  # as many on each host
PORT = 29633
SECONDS = 600.0
COMPARED: Mapping[str, tuple[str, str, float | None]] = {
    "ablation/hierarchy": ("flat", "by_hosts", 3.6),
    "ablation/hierarchy/ring": ("ring", "by_hosts", None),
    "ablation/fusion": ("one_by_one", "flat", 2.0),
}
"""Each key is the time of the first case over that of the second."""
BYTES_GOAL = 3.9
"""Of the bytes that leave a host: 4 by arithmetic, less what packets are made of."""


def measure(*, elements: int, tensors: int, rate_mbit: float, repeats: int, seed: int) -> tuple[list[Row], Ratios]:
    """Seconds of an average, and bytes that leave a host.

    Args:
        elements: of a model, float32.
        tensors: that it is made of.
        rate_mbit: of each host's link.
        repeats: timings of each case.
        seed: of the models.

    Returns:
        Nothing, with a word about why, where namespaces cannot be made.
    """
    try:
        with hosts(HOSTS, rate_mbit) as names:
            places = [name for name in names for _ in range(WORKERS // HOSTS)]
            by_rank = run_on_hosts(places, PORT, _work, elements, tensors, repeats, seed, timeout=SECONDS)
    except NotAllowed as reason:
        print(f"No slow links: {reason}", file=sys.stderr)
        return [], {}
    seconds = {case: [max(times) for times in zip(*(seen[case][0] for seen in by_rank), strict=True)] for case in CASES}
    sent = {case: by_rank[0][case][1] for case in CASES}
    rows: list[Row] = [
        {"what": case, "link_mbit": rate_mbit, "elements": elements, "ms": 1e3 * median(seconds[case])}
        | {"host_sends_bytes": int(median(sent[case]))}
        for case in CASES
    ]
    shape = f"{WORKERS} workers on {HOSTS} hosts, {elements} float32 (one_by_one: in {tensors} tensors)"
    found: Ratios = {}
    for key, (one, other, goal) in COMPARED.items():
        values = [a / b for a, b in zip(seconds[one], seconds[other], strict=True)]
        found[key] = ratio(values, goal, f"time of an average, {shape}: {one} over {other}")
    values = [a / b for a, b in zip(sent["flat"], sent["by_hosts"], strict=True)]
    found["bytes/hierarchy"] = ratio(values, BYTES_GOAL, f"bytes that leave a host, {shape}: flat over by_hosts")
    return rows, found


CASES = ("flat", "by_hosts", "one_by_one", "ring")
Seen = dict[str, tuple[list[float], list[int]]]


def _work(rank: int, elements: int, tensors: int, repeats: int, seed: int) -> Seen:
    world = dist.group.WORLD
    assert world is not None
    replicas = Replicas(world, range(WORKERS), 0, rank)
    workers = tuple(Worker(0, pipeline) for pipeline in range(WORKERS))
    machines = [str(pipeline // (WORKERS // HOSTS)) for pipeline in range(WORKERS)]
    flat = EncodedMean(replicas, CommonReference(Full(), rank))
    by_hosts = EncodedMean(replicas, CommonReference(Full(), rank), machines)
    values = torch.randn(elements, generator=torch.Generator().manual_seed(seed + rank))
    model = values.tensor_split(tensors)

    def average(mover: EncodedMean, moved: Sequence[Tensor], number: int) -> None:
        finish(mover.start(moved, Group(workers, (1 / WORKERS,) * WORKERS, number, "timed")))

    def one_by_one(number: int) -> None:
        for place, tensor in enumerate(model):
            average(flat, [tensor], number * tensors + place)

    cases: dict[str, Callable[[int], None]] = {
        "flat": lambda number: average(flat, [values], number * tensors),  # as a bucket holds a model's parameters
        "by_hosts": lambda number: average(by_hosts, [values], number * tensors),
        "one_by_one": one_by_one,
        "ring": lambda _: dist.all_reduce(values.div_(WORKERS)),
    }
    seen: Seen = {case: ([], []) for case in CASES}
    for repeat in range(-1, repeats):  # the first does not count: connections are made
        for position, case in enumerate(rotated(CASES, repeat + 1)):
            dist.barrier()
            before, start = _sent(), time.perf_counter()
            cases[case]((repeat + 1) * len(CASES) + position)
            took = time.perf_counter() - start
            dist.barrier()
            if repeat >= 0:
                seen[case][0].append(took)
                seen[case][1].append(_sent() - before)
    return seen


def _sent() -> int:
    """Bytes that have left this host."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, columns = line.partition(":")
        if name.strip() == INTERFACE:
            return int(columns.split()[8])
    raise OSError(f"/proc/self/net/dev does not list {INTERFACE}")
