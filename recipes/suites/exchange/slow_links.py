"""Duration of averages on links that are really slow: each worker on a host of its own, as far as the network is
concerned. Full precision is gloo's all-reduce."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from statistics import median

import torch
import torch.distributed as dist

from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.moving import Mover, finish
from lightning_sdpipe.exchange.payloads import EightBit, Half, OneBit, Payload
from lightning_sdpipe.exchange.references import CommonReference, OwnReference
from lightning_sdpipe.exchange.ring_mean import RingMean
from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.policies.decentralized import with_neighbours
from lightning_sdpipe.policies.pairing import ring, shift_one
from lightning_sdpipe.topology.groups import Replicas
from recipes.suites.namespaces import NotAllowed, hosts
from recipes.suites.processes import run_on_hosts
from recipes.suites.ratios import Ratios, Row, ratio, rotated

WORKERS = 4
PORT = 29631
SECONDS = 600.0
FULL = "full"
GOALS: Mapping[str, Mapping[str, float]] = {
    "100mbit": {"eight_bit": 3.5, "one_bit": 15, "half": 1.85, "pair8": 5.5, "ring8": 2.6},
    "1gbit": {"eight_bit": 2.4},
}


def measure(
    *, elements: Mapping[str, int], rates_mbit: Mapping[str, float], repeats: int, seed: int
) -> tuple[list[Row], Ratios]:
    """Seconds of an average, full precision over each.

    Args:
        elements: of the tensor, float32, by the name of a rate.
        rates_mbit: of each host's link, by name.
        repeats: timings of each.
        seed: of the models.

    Returns:
        Nothing, with a word about why, where namespaces cannot be made.
    """
    rows: list[Row] = []
    found: Ratios = {}
    for name, rate in rates_mbit.items():
        try:
            timings = _timed(elements[name], rate, repeats, seed)
        except NotAllowed as reason:
            print(f"No slow links: {reason}", file=sys.stderr)
            return [], {}
        for what, seconds in timings.items():
            rows.append({"what": what, "link": name, "elements": elements[name], "ms": 1e3 * median(seconds)})
            if what != FULL:
                values = [full / own for full, own in zip(timings[FULL], seconds, strict=True)]
                meaning = f"speed of an average of {WORKERS}, {elements[name]} float32: {what} over gloo's all-reduce"
                found[f"{what}/full/{name}"] = ratio(values, GOALS.get(name, {}).get(what), meaning)
    return rows, found


def _timed(elements: int, rate: float, repeats: int, seed: int) -> dict[str, list[float]]:
    """Seconds of each repeat, of the slowest worker."""
    with hosts(WORKERS, rate) as names:
        by_rank = run_on_hosts(names, PORT, _work, elements, repeats, seed, timeout=SECONDS)
    return {what: [max(times) for times in zip(*(t[what] for t in by_rank), strict=True)] for what in by_rank[0]}


def _work(rank: int, elements: int, repeats: int, seed: int) -> dict[str, list[float]]:
    """Exchange as one worker of the group; return the seconds of each repeat."""
    world = dist.group.WORLD
    assert world is not None
    replicas = Replicas(world, range(WORKERS), 0, rank)
    common = torch.randn(elements, generator=torch.Generator().manual_seed(seed))
    model = common + 1e-3 * torch.randn(elements, generator=torch.Generator().manual_seed(seed + 1 + rank))
    in_a_ring = RingMean(replicas, EightBit())
    in_a_ring.begin([common], ring(rank, WORKERS))
    pairs = EncodedMean(replicas, OwnReference(EightBit()))
    workers = tuple(Worker(0, pipeline) for pipeline in range(WORKERS))

    def group(number: int) -> Group:
        return Group(workers, (1 / WORKERS,) * WORKERS, number, "timed")

    def among_all(payload: Payload) -> Callable[[int], None]:
        mover: Mover = EncodedMean(replicas, CommonReference(payload, rank))
        return lambda number: _finish(mover, model, group(number))

    def all_reduce(_: int) -> None:
        dist.all_reduce(model.div_(WORKERS))

    def pair(number: int) -> None:
        partner = shift_one(rank, WORKERS, 0)
        two = tuple(worker for worker in workers if worker.pipeline in (rank, partner))
        _finish(pairs, model, Group(two, (0.5, 0.5), number, "timed"))

    cases: dict[str, Callable[[int], None]] = {
        FULL: all_reduce,
        "half": among_all(Half()),
        "eight_bit": among_all(EightBit()),
        "one_bit": among_all(OneBit()),
        "pair8": pair,
        "ring8": lambda number: _finish(in_a_ring, model, with_neighbours(group(number), WORKERS)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(-1, repeats):  # the first does not count: connections are made, and pairs exchange in full
        for position, name in enumerate(rotated(list(cases), repeat + 1)):
            dist.barrier()
            start = time.perf_counter()
            cases[name]((repeat + 1) * len(cases) + position)
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - start)
    dist.barrier()
    return seconds


def _finish(mover: Mover, model: torch.Tensor, group: Group) -> None:
    finish(mover.start([model], group))
