"""Duration of averages: among the workers of one machine, and on links that are really slow, each host a namespace of
the network. Nothing is trained. Full precision is gloo's all-reduce.

Ablations (BAGUA, table 5) are averages of eight workers on two hosts with and without a hierarchy, and of a model in
one flat buffer or tensor by tensor.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.moving import GroupMean, Mover, finish
from lightning_sdpipe.exchange.payloads import EightBit, Full, Half, OneBit, Payload
from lightning_sdpipe.exchange.references import CommonReference, OwnReference
from lightning_sdpipe.exchange.ring_mean import RingMean
from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.policies.decentralized import with_neighbours
from lightning_sdpipe.policies.pairing import ring, shift_one
from lightning_sdpipe.topology.groups import Replicas
from recipes.harness.namespaces import INTERFACE, NotAllowed, hosts
from recipes.harness.processes import run_on_hosts, run_processes
from recipes.suites.grid import Ratios, Row, ratio, rotated

WORKERS, HOSTS = 4, 2
PORT, SECONDS = 29631, 600.0
FULL = "full"
SLOW_LINKS: Mapping[str, Mapping[str, float]] = {
    "100mbit": {"eight_bit": 3.5, "one_bit": 15, "half": 1.85, "pair8": 5.5, "ring8": 2.6},
    "1gbit": {"eight_bit": 2.4},
}
ABLATIONS: Mapping[str, tuple[str, str, float | None]] = {
    "ablation/hierarchy": ("flat", "by_hosts", 3.6),
    "ablation/hierarchy/ring": ("ring", "by_hosts", None),
    "ablation/fusion": ("one_by_one", "flat", 2.0),
}
"""Each key is the time of the first case over that of the second."""
BYTES_GOAL = 3.9
"""Of the bytes that leave a host: 4 by arithmetic, less what packets are made of."""

Average = Callable[[int], object]
Seen = dict[str, list[tuple[float, int]]]  # seconds, and bytes that left the host, of each repeat


def measure_group_mean(
    *, members: int, mebibytes: int, calls: int, repeats: int, seed: int
) -> tuple[list[Row], Ratios]:
    """Return the cost of averaging in a group beside gloo's own all-reduce, among all workers of a machine: over
    loopback, so it is the processors that it costs. On a link, both send the same number of bytes.

    Args:
        members: of the group, one process each.
        mebibytes: of the model, float32.
        calls: of one timing.
        repeats: timings of each.
        seed: of the models.
    """
    seconds = _slowest(run_processes(members, _group_mean, members, mebibytes, calls, repeats, seed))
    rows: list[Row] = [
        {"what": name, "members": members, "MiB": mebibytes, "ms": 1e3 * median(times) / calls}
        for name, times in seconds.items()
    ]
    meaning = f"time to average {mebibytes} MiB in a group of {members} over that of gloo's all-reduce"
    values = [a / b for a, b in zip(seconds["group mean"], seconds["all_reduce"], strict=True)]
    return rows, {f"exchange/group{members}": ratio(values, 1.2, meaning)}


def _group_mean(rank: int, members: int, mebibytes: int, calls: int, repeats: int, seed: int) -> Seen:
    model = torch.randn(mebibytes * 2**18, generator=torch.Generator().manual_seed(seed + rank))
    mover = GroupMean(_replicas(rank))
    cases: dict[str, Average] = {
        "group mean": lambda number: _averages(mover, model, range(number * calls, (number + 1) * calls)),
        "all_reduce": lambda _: [dist.all_reduce(model.div_(members)) for _ in range(calls)],
    }
    return _timed(cases, repeats)


def _averages(mover: Mover, model: Tensor, numbers: Iterable[int]) -> None:
    for number in numbers:
        _average(mover, [model], number)


def measure_slow_links(
    *, elements: Mapping[str, int], rates_mbit: Mapping[str, float], repeats: int, seed: int
) -> tuple[list[Row], Ratios]:
    """Return the seconds of an average of four hosts, full precision over each.

    Args:
        elements: of the tensor, float32, by the name of a rate.
        rates_mbit: of each host's link, by name.
        repeats: timings of each case.
        seed: of the models.

    Returns:
        Nothing, with a word about why, where namespaces cannot be made.
    """
    rows: list[Row] = []
    found: Ratios = {}
    for name, rate in rates_mbit.items():
        seconds, _ = _on_slow_hosts(WORKERS, 1, rate, _among_four, elements[name], repeats, seed)
        for what, times in seconds.items():
            rows.append({"what": what, "link": name, "elements": elements[name], "ms": 1e3 * median(times)})
            if what != FULL:
                values = [full / own for full, own in zip(seconds[FULL], times, strict=True)]
                meaning = f"speed of an average of {WORKERS}, {elements[name]} float32: {what} over gloo's all-reduce"
                found[f"{what}/full/{name}"] = ratio(values, SLOW_LINKS.get(name, {}).get(what), meaning)
    return rows, found


def _among_four(rank: int, elements: int, repeats: int, seed: int) -> Seen:
    replicas = _replicas(rank)
    common = torch.randn(elements, generator=torch.Generator().manual_seed(seed))
    model = common + 1e-3 * torch.randn(elements, generator=torch.Generator().manual_seed(seed + 1 + rank))
    in_a_ring, pairs = RingMean(replicas, EightBit()), EncodedMean(replicas, OwnReference(EightBit()))
    in_a_ring.begin([common], ring(rank, WORKERS))
    partner = shift_one(rank, WORKERS, 0)
    assert partner is not None
    two = sorted((rank, partner))

    def among_all(payload: Payload) -> Average:
        mover = EncodedMean(replicas, CommonReference(payload, rank))
        return lambda number: _average(mover, [model], number)

    def around(number: int) -> None:
        finish(in_a_ring.start([model], with_neighbours(_group(range(WORKERS), number), WORKERS)))

    cases: dict[str, Average] = {
        FULL: lambda _: dist.all_reduce(model.div_(WORKERS)),
        "half": among_all(Half()),
        "eight_bit": among_all(EightBit()),
        "one_bit": among_all(OneBit()),
        "pair8": lambda number: finish(pairs.start([model], _group(two, number))),
        "ring8": around,
    }
    return _timed(cases, repeats)


def measure_ablations(
    *, elements: int, tensors: int, rate_mbit: float, repeats: int, seed: int
) -> tuple[list[Row], Ratios]:
    """Return the seconds of an average, and bytes that leave a host.

    Args:
        elements: of a model, float32.
        tensors: that it is made of.
        rate_mbit: of each host's link.
        repeats: timings of each case.
        seed: of the models.

    Returns:
        Nothing, with a word about why, where namespaces cannot be made.
    """
    seconds, sent = _on_slow_hosts(HOSTS, WORKERS, rate_mbit, _among_two_hosts, elements, tensors, repeats, seed)
    if not seconds:
        return [], {}
    rows: list[Row] = [
        {"what": case, "link_mbit": rate_mbit, "elements": elements, "ms": 1e3 * median(seconds[case])}
        | {"host_sends_bytes": int(median(sent[case]))}
        for case in seconds
    ]
    shape = f"{HOSTS * WORKERS} workers on {HOSTS} hosts, {elements} float32 (one_by_one: in {tensors} tensors)"
    found: Ratios = {}
    for key, (one, other, goal) in ABLATIONS.items():
        values = [a / b for a, b in zip(seconds[one], seconds[other], strict=True)]
        found[key] = ratio(values, goal, f"time of an average, {shape}: {one} over {other}")
    values = [a / b for a, b in zip(sent["flat"], sent["by_hosts"], strict=True)]
    found["bytes/hierarchy"] = ratio(values, BYTES_GOAL, f"bytes that leave a host, {shape}: flat over by_hosts")
    return rows, found


def _among_two_hosts(rank: int, elements: int, tensors: int, repeats: int, seed: int) -> Seen:
    replicas, count = _replicas(rank), dist.get_world_size()
    machines = [str(pipeline // WORKERS) for pipeline in range(count)]
    flat = EncodedMean(replicas, CommonReference(Full(), rank))
    by_hosts = EncodedMean(replicas, CommonReference(Full(), rank), machines)
    values = torch.randn(elements, generator=torch.Generator().manual_seed(seed + rank))
    model = values.tensor_split(tensors)

    def one_by_one(number: int) -> None:
        for place, tensor in enumerate(model):
            _average(flat, [tensor], number * tensors + place)

    cases: dict[str, Average] = {
        "flat": lambda number: _average(flat, [values], number * tensors),  # as a bucket holds a model's parameters
        "by_hosts": lambda number: _average(by_hosts, [values], number * tensors),
        "one_by_one": one_by_one,
        "ring": lambda _: dist.all_reduce(values.div_(count)),
    }
    return _timed(cases, repeats)


def _on_slow_hosts(
    count: int, each: int, rate: float, work: Callable[..., Seen], *arguments: object
) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """Return the seconds of the slowest worker, and the bytes that left the first one's host, by case and repeat."""
    try:
        with hosts(count, rate) as names:
            places = [name for name in names for _ in range(each)]
            by_rank = run_on_hosts(places, PORT, work, *arguments, timeout=SECONDS)
    except NotAllowed as reason:
        print(f"No slow links: {reason}", file=sys.stderr)
        return {}, {}
    return _slowest(by_rank), {case: [sent for _, sent in seen] for case, seen in by_rank[0].items()}


def _slowest(by_rank: Sequence[Seen]) -> dict[str, list[float]]:
    return {
        case: [max(seconds for seconds, _ in each) for each in zip(*(seen[case] for seen in by_rank), strict=True)]
        for case in by_rank[0]
    }


def _replicas(rank: int) -> Replicas:
    world = dist.group.WORLD
    assert world is not None
    return Replicas(world, range(dist.get_world_size()), 0, rank)


def _group(pipelines: Sequence[int], number: int) -> Group:
    members = tuple(Worker(0, pipeline) for pipeline in pipelines)
    return Group(members, (1 / len(members),) * len(members), number, "timed")


def _average(mover: Mover, model: Sequence[Tensor], number: int) -> None:
    finish(mover.start(model, _group(range(dist.get_world_size()), number)))


def _timed(cases: Mapping[str, Average], repeats: int) -> Seen:
    """Time the cases in rotated order, once more than asked: the first does not count, since connections are made, and
    pairs exchange in full. Each call has a number of its own."""
    seen: Seen = {case: [] for case in cases}
    for repeat in range(repeats + 1):
        for position, case in enumerate(rotated([*cases], repeat)):
            dist.barrier()
            before, start = _sent(), time.perf_counter()
            cases[case](repeat * len(cases) + position)
            took = time.perf_counter() - start
            dist.barrier()
            if repeat:
                seen[case].append((took, _sent() - before))
    return seen


def _sent() -> int:
    """Return the bytes that have left this host, if it is a namespace."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, columns = line.partition(":")
        if name.strip() == INTERFACE:
            return int(columns.split()[8])
    return 0
