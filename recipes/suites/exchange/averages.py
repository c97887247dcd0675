"""Duration of averages among workers on one machine, and over links that are really slow, with hosts as network
namespaces. Nothing is trained. Full precision is gloo's all-reduce.

The ablations (BAGUA, table 5) are averages of eight workers on two hosts with and without a hierarchy, and of a model
in one flat buffer or tensor by tensor.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count, islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.moving import GroupMean, Mover, finish
from lightning_sdpipe.exchange.payloads import EightBit, Full, Half, OneBit, Payload
from lightning_sdpipe.exchange.references import CommonReference, OwnReference
from lightning_sdpipe.exchange.ring_mean import RingCopies, RingMean
from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.policies.decentralized import as_ring
from lightning_sdpipe.policies.pairing import shift_one
from lightning_sdpipe.topology.groups import Replicas
from recipes.harness.namespaces import INTERFACE, NotAllowed, hosts
from recipes.harness.processes import run_on_hosts, run_processes
from recipes.suites.grid import Goal, Ratios, Row, in_turn, ratios, versus

WORKERS, HOSTS = 4, 2
PORT, SECONDS = 29631, 600.0
FULL = "full"
SLOW_LINKS: Mapping[str, Mapping[str, float]] = {
    "100mbit": {"eight_bit": 3.5, "one_bit": 15, "half": 1.85, "pair8": 5.5, "ring8": 2.6},
    "1gbit": {"eight_bit": 2.4},
}
ABLATIONS: Mapping[str, tuple[str, str, str, float | None]] = {
    "ablation/hierarchy": ("ms", "flat", "by_hosts", 3.6),
    "ablation/hierarchy/ring": ("ms", "ring", "by_hosts", None),
    "ablation/fusion": ("ms", "one_by_one", "flat", 2.0),
    "bytes/hierarchy": ("host_sends_bytes", "flat", "by_hosts", 3.9),
}
"""By the ratio's key: its column, its two cases (first over second), and its goal. For the bytes that leave a host, the
ratio is 4 by arithmetic, less the packets' overhead."""

Average = Callable[[int], object]


def measure_group_mean(
    *, members: int, mebibytes: int, calls: int, repeats: int, seed: int
) -> tuple[list[Row], Ratios]:
    """Compare the time of averaging in a group with gloo's own all-reduce, among all workers on a machine. Over
    loopback, this is processor time; on a link, both send the same number of bytes.

    Args:
        members: members of the group, one process each.
        mebibytes: size of the model, in float32.
        calls: calls in one timing.
        repeats: timings of each.
        seed: seed of the models.
    """
    rows = _slowest(run_processes(members, _group_mean, members, mebibytes, calls, repeats, seed))
    meaning = f"time to average {mebibytes} MiB in a group of {members} over that of gloo's all-reduce"
    return rows, ratios(rows, {f"exchange/group{members}": versus(meaning, "ms", "group mean", "all_reduce", 1.2)})


def _group_mean(rank: int, members: int, mebibytes: int, calls: int, repeats: int, seed: int) -> list[Row]:
    model = torch.randn(mebibytes * 2**18, generator=torch.Generator().manual_seed(seed + rank))
    mover = GroupMean(_replicas(rank))
    cases: dict[str, Average] = {
        "group mean": lambda number: _average(mover, [model], number),
        "all_reduce": lambda _: dist.all_reduce(model.div_(members)),
    }
    return _timed(cases, repeats, calls)


def measure_slow_links(
    *, elements: Mapping[str, int], rates_mbit: Mapping[str, float], repeats: int, seed: int
) -> tuple[list[Row], Ratios]:
    """Compare the time of an average of four hosts in full precision with that of each other exchange.

    Args:
        elements: elements of the tensor, float32, by the name of a rate.
        rates_mbit: rates of each host's link, by name.
        repeats: timings of each case.
        seed: seed of the models.

    Returns:
        Rows and ratios; none, after printing why, if namespaces cannot be made.
    """
    rows: list[Row] = []
    goals: dict[str, Goal] = {}
    for name, rate in rates_mbit.items():
        own = _on_slow_hosts(WORKERS, 1, rate, _among_four, elements[name], repeats, seed)
        rows += [row | {"link": name, "elements": elements[name]} for row in own]
        for what in dict.fromkeys(row["what"] for row in own if row["what"] != FULL):
            meaning = f"speed of an average of {WORKERS}, {elements[name]} float32: {what} over gloo's all-reduce"
            value = SLOW_LINKS.get(name, {}).get(what)
            goals[f"{what}/full/{name}"] = versus(meaning, "ms", FULL, what, value, link=name)
    return rows, ratios(rows, goals)


def _among_four(rank: int, elements: int, repeats: int, seed: int) -> list[Row]:
    replicas = _replicas(rank)
    common = torch.randn(elements, generator=torch.Generator().manual_seed(seed))
    model = common + 1e-3 * torch.randn(elements, generator=torch.Generator().manual_seed(seed + 1 + rank))
    copies, pairs = RingCopies(EightBit(), rank), EncodedMean(replicas, OwnReference(EightBit()))
    in_a_ring = RingMean(replicas, copies)
    copies.begin([common])
    partner = shift_one(rank, WORKERS, 0)
    assert partner is not None
    two = sorted((rank, partner))

    def among_all(payload: Payload) -> Average:
        mover = EncodedMean(replicas, CommonReference(payload, rank))
        return lambda number: _average(mover, [model], number)

    def around(number: int) -> None:
        finish(in_a_ring.start([model], as_ring(_group(range(WORKERS), number))))

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
    """Compare the times of averages, and the bytes that leave a host.

    Args:
        elements: elements of a model, float32.
        tensors: number of tensors of the model.
        rate_mbit: rate of each host's link.
        repeats: timings of each case.
        seed: seed of the models.

    Returns:
        Rows and ratios; none, after printing why, if namespaces cannot be made.
    """
    rows = _on_slow_hosts(HOSTS, WORKERS, rate_mbit, _among_two_hosts, elements, tensors, repeats, seed)
    shape = f"{HOSTS * WORKERS} workers on {HOSTS} hosts, {elements} float32 (one_by_one: in {tensors} tensors)"
    goals = {
        key: versus(f"{column} of an average, {shape}: {{one}} over {{other}}", column, one, other, value)
        for key, (column, one, other, value) in ABLATIONS.items()
    }
    return rows, ratios(rows, goals)


def _among_two_hosts(rank: int, elements: int, tensors: int, repeats: int, seed: int) -> list[Row]:
    replicas, workers = _replicas(rank), dist.get_world_size()
    machines = [str(pipeline // WORKERS) for pipeline in range(workers)]
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
        "ring": lambda _: dist.all_reduce(values.div_(workers)),
    }
    return _timed(cases, repeats)


def _on_slow_hosts(count: int, each: int, rate: float, work: Callable[..., list[Row]], *arguments: object) -> list[Row]:
    try:
        with hosts(count, rate) as names:
            places = [name for name in names for _ in range(each)]
            return _slowest(run_on_hosts(places, PORT, work, *arguments, timeout=SECONDS))
    except NotAllowed as reason:
        print(f"No slow links: {reason}", file=sys.stderr)
        return []


def _slowest(by_rank: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the rows of the first rank, with the time of the slowest."""
    return [rows[0] | {"ms": max(row["ms"] for row in rows)} for rows in zip(*by_rank, strict=True)]


def _replicas(rank: int) -> Replicas:
    world = dist.group.WORLD
    assert world is not None
    return Replicas(world, range(dist.get_world_size()), 0, rank)


def _group(pipelines: Sequence[int], number: int) -> Group:
    members = tuple(Worker(0, pipeline) for pipeline in pipelines)
    return Group(members, (1 / len(members),) * len(members), number, "timed")


def _average(mover: Mover, model: Sequence[Tensor], number: int) -> None:
    finish(mover.start(model, _group(range(dist.get_world_size()), number)))


def _timed(cases: Mapping[str, Average], repeats: int, calls: int = 1) -> list[Row]:
    """Time the cases in rotated order, once more than asked: the first time does not count, since connections are made
    and pairs exchange in full. Each call has its own number."""
    rows: list[Row] = []
    numbers = count()
    for repeat, case in in_turn([*cases], repeats + 1):
        dist.barrier()
        before, start = _sent(), time.perf_counter()
        for number in islice(numbers, calls):
            cases[case](number)
        took = time.perf_counter() - start
        dist.barrier()
        sent = _sent() - before
        rows.append({"what": case, "repeat": repeat, "ms": 1e3 * took / calls, "host_sends_bytes": sent})
    return [row for row in rows if row["repeat"]]


def _sent() -> int:
    """Return the bytes that have left this host if it is a namespace, else 0."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, columns = line.partition(":")
        if name.strip() == INTERFACE:
            return int(columns.split()[8])
    return 0
