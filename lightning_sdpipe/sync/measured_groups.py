"""PHD-PSGD's groups of pipelines (paper §3.2), by hosts or by measurement: those that together cost least per step.

    Σ over groups of Comp(G) + Comm(G)

The paper leaves Comp open; a step of a group takes as long as its slowest member's mini-batch, and its all-reduce as
long as the model needs over its slowest link. So similar devices that are near each other come together.

The search splits off the slowest pipeline's group in every way, then that of the slowest among the rest, and so on. It
leaves a branch as soon as the rest cannot make up for its cost so far. It starts from the best of a few simple
groupings, improved by exchanging members. Up to about sixteen pipelines it ends with a proof; beyond that, after a
fixed number of steps, so that every machine finds the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_sdpipe.errors import ConfigurationError, refusal
from lightning_sdpipe.placement.network import read_network
from lightning_sdpipe.policies.phd_psgd import PHDPSGD
from lightning_sdpipe.sync.methods import ByPolicy
from lightning_sdpipe.sync.synchronizer import SyncMethod

Groups = tuple[tuple[int, ...], ...]

STEPS = 200_000
"""Groups that are examined before the search is cut short."""


@dataclass(frozen=True)
class Grouping:
    """A grouping with ``seconds`` as its objective; ``optimal`` if no other grouping costs less."""

    groups: Groups
    seconds: float
    optimal: bool


def hosts_as_groups(hosts: Sequence[str]) -> Groups:
    """Return the pipelines of each host, in the order in which hosts first occur; ``hosts`` has each pipeline's."""
    groups: dict[str, list[int]] = {}
    for pipeline, host in enumerate(hosts):
        groups.setdefault(host, []).append(pipeline)
    return tuple(map(tuple, groups.values()))


def cost(groups: Sequence[Sequence[int]], compute: Sequence[float], links: Sequence[Sequence[float]]) -> float:
    """Return Σ Comp + Comm, in seconds; see :func:`generate_groups` for the arguments."""
    return sum(_cost(group, compute, links) for group in groups)


def generate_groups(
    compute: Sequence[float], links: Sequence[Sequence[float]], group_size: int, steps: int = STEPS
) -> Grouping:
    """Return the cheapest groups of ``group_size`` pipelines that were found.

    Args:
        compute: seconds of each pipeline's mini-batch.
        links: n × n, seconds for the model from one pipeline to another, through the slowest of several stages. The
            larger of the two directions counts; the diagonal is ignored.
        group_size: N of the paper.
        steps: steps after which the search is cut short.

    Raises:
        ConfigurationError: the sizes do not fit, or a time is not positive.
    """
    count = len(compute)
    if group_size < 1 or count % group_size or len(links) != count or any(len(row) != count for row in links):
        raise ConfigurationError(
            f"{count} pipelines with a table of {len(links)} × {len(links[0]) if links else 0} links cannot form "
            f"groups of {group_size}; give a link for each two pipelines, and a size that divides their number"
        )
    if not all(seconds > 0 for seconds in compute):
        raise refusal("compute", list(compute), "seconds above 0")
    best = min(
        (_improved(start, compute, links) for start in _starts(compute, links, group_size)),
        key=lambda groups: cost(groups, compute, links),
    )
    search = _Search(compute, links, group_size, best, steps)
    search.divide(sorted(range(count), key=lambda i: (-compute[i], i)), [], 0.0)
    groups = tuple(sorted(tuple(sorted(group)) for group in search.best))
    return Grouping(groups, search.least, search.steps >= 0)


def _cost(group: Sequence[int], compute: Sequence[float], links: Sequence[Sequence[float]]) -> float:
    slowest = max(compute[i] for i in group)
    return slowest + max((max(links[i][j], links[j][i]) for i, j in itertools.combinations(group, 2)), default=0.0)


def _starts(compute: Sequence[float], links: Sequence[Sequence[float]], size: int) -> list[list[list[int]]]:
    """Return groupings to start from: by speed, and nearest first from the slowest and from the first pipeline."""
    by_speed = sorted(range(len(compute)), key=lambda i: (-compute[i], i))
    starts = [[by_speed[k : k + size] for k in range(0, len(by_speed), size)]]
    for order in (by_speed, list(range(len(compute)))):
        rest, groups = list(order), list[list[int]]()
        while rest:
            first = rest[0]
            near = sorted(rest, key=lambda j: (j != first, max(links[first][j], links[j][first]), compute[j], j))
            groups.append(near[:size])
            rest = [i for i in rest if i not in groups[-1]]
        starts.append(groups)
    return starts


def _improved(groups: list[list[int]], compute: Sequence[float], links: Sequence[Sequence[float]]) -> list[list[int]]:
    """Exchange pairs of members until no exchange makes the grouping cheaper."""
    better = True
    while better:
        better = False
        for a, b in itertools.combinations(groups, 2):
            for i, j in itertools.product(range(len(a)), range(len(b))):
                before = _cost(a, compute, links) + _cost(b, compute, links)
                a[i], b[j] = b[j], a[i]
                if _cost(a, compute, links) + _cost(b, compute, links) < before * (1 - 1e-12):
                    better = True
                else:
                    a[i], b[j] = b[j], a[i]
    return groups


class _Search:
    def __init__(
        self,
        compute: Sequence[float],
        links: Sequence[Sequence[float]],
        size: int,
        best: Sequence[Sequence[int]],
        steps: int,
    ) -> None:
        self.compute, self.links, self.size, self.steps = compute, links, size, steps
        self.best: list[list[int]] = [list(group) for group in best]
        self.least = cost(best, compute, links)
        pairs = [max(links[i][j], links[j][i]) for i, j in itertools.combinations(range(len(compute)), 2)]
        self.fastest_link = min(pairs, default=0.0) if size > 1 else 0.0

    def divide(self, rest: list[int], groups: list[list[int]], spent: float) -> None:
        """Try all ways to group ``rest``, slowest first, besides ``groups``, which cost ``spent``."""
        if not rest:
            if spent < self.least * (1 - 1e-12):
                self.best, self.least = list(groups), spent
            return
        first, others = rest[0], rest[1:]
        options = []
        for company in itertools.combinations(others, self.size - 1):
            self.steps -= 1
            if self.steps < 0:
                return
            options.append((_cost((first, *company), self.compute, self.links), company))
        for seconds, company in sorted(options):
            left = [i for i in others if i not in company]
            if spent + seconds + self._bound(left) >= self.least * (1 - 1e-12):
                continue
            self.divide(left, [*groups, [first, *company]], spent + seconds)
            if self.steps < 0:
                return

    def _bound(self, rest: Sequence[int]) -> float:
        """Return a lower bound on the cost of grouping ``rest``, slowest first: its k-th slowest group, from 0, is at
        least as slow as pipeline k × ``size`` of it."""
        return sum(self.compute[i] + self.fastest_link for i in rest[:: self.size])


def with_measured_groups(method: SyncMethod, num_stages: int, placed: bool) -> SyncMethod:
    """Return ``method`` with PHD-PSGD's groups and times from the network file that ``groups`` names, if it names one.

    Stages count as equal parts of the model; a pipeline is as fast as its slowest device, and two pipelines are as near
    as the slowest link between replicas of a stage.

    Raises:
        ConfigurationError: the file cannot be read, or does not fit the run.
    """
    policy = method.policy
    if not isinstance(method, ByPolicy) or not isinstance(policy, PHDPSGD) or not policy.names_a_network:
        return method
    path = str(policy.groups)
    what, network = f"sync=PHDPSGD(groups={path!r})", read_network(Path(path))
    if placed:
        raise ConfigurationError(
            f"{what} takes consecutive devices as a pipeline; leave placement out, or list groups."
        )
    if network.model is None or len(network) % num_stages:
        raise ConfigurationError(
            f"{what}: the file has {len(network)} devices and {'no' if network.model is None else 'a'} model. Measure "
            f"those of the run, a multiple of num_stages={num_stages}: `sdpipe measure -o {path} --model …`."
        )
    rows = [range(first, first + num_stages) for first in range(0, len(network), num_stages)]
    hosts = [",".join(network.devices[rank].host for rank in row) for row in rows]
    sizes = sorted({len(group) for group in hosts_as_groups(hosts)})
    size = policy.group_size or sizes[0]
    if len(rows) % size or (policy.group_size is None and len(sizes) > 1):
        raise ConfigurationError(
            f"{what}: the file's {len(rows)} pipelines, {sizes} on a host, form no groups of group_size="
            f"{policy.group_size}. Give a group_size that divides {len(rows)}."
        )
    seconds = sum(block.seconds for block in network.model.chain) / num_stages
    times = policy.times or tuple(seconds / min(network.devices[rank].speed for rank in row) for row in rows)
    if len(times) != len(rows):
        raise ConfigurationError(f"{what}: times has {len(times)} values, and the file {len(rows)} pipelines.")
    amount, rates = sum(block.parameter_bytes for block in network.model.chain) / num_stages, network.bandwidth()
    slowest = [[min(rates[i][j] for i, j in zip(a, b, strict=True)) for b in rows] for a in rows]
    links = [[amount / rate if rate else math.inf for rate in row] for row in slowest]
    found = generate_groups(times, links, size)
    if found.seconds == math.inf:
        raise ConfigurationError(f"{what}: no groups of {size} were found whose devices all reach each other.")
    rank_zero_info(f"{what}: the groups of its {len(rows)} pipelines are {[list(group) for group in found.groups]}.")
    return ByPolicy(msgspec.structs.replace(policy, groups=found.groups, group_size=None, times=times))


def on_hosts(method: SyncMethod, hosts: Sequence[str]) -> SyncMethod:
    """Return ``method`` for pipelines that run on ``hosts``, in their order. PHD-PSGD's groups are the pipelines of
    each host, unless groups are given."""
    policy = method.policy
    if not (isinstance(method, ByPolicy) and isinstance(policy, PHDPSGD)):
        return method
    if policy.groups != "auto" or policy.group_size is not None:
        return method
    groups = hosts_as_groups(hosts)
    if len(groups) == 1:
        rank_zero_info(
            f"sync=phd_psgd: all {len(hosts)} pipelines run on the same host and form one group, so {policy.within} "
            "are averaged over all of them and no group meets others. For meetings give a group_size, or groups."
        )
    return ByPolicy(msgspec.structs.replace(policy, groups=groups))
