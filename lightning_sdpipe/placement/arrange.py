"""The best arrangement of given groups: their order as stages, and the device that follows each device.

Rank 0 must run a last stage: it has the logger and the progress bar, and the loss exists on last stages only. The
module also computes the cost of that rule, and the hosts for which it is free.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from itertools import pairwise

from lightning_sdpipe.placement.cost import Cost, Stages, Weights, evaluate
from lightning_sdpipe.placement.matching import bottleneck, shortest_path
from lightning_sdpipe.placement.network import Matrix, Network

ROUNDING = 1e-9
PACES = 8
"""How often the largest period is lowered."""


def arrange(
    groups: Sequence[Sequence[int]], weights: Weights, limit: float = math.inf, last: int | None = None
) -> Iterator[Stages | None]:
    """Arrange the groups of a placement anew. They keep their members; where stages are not all alike, they keep their
    places too.

    Without periods (``"dtfm"``) and with even stages the outcome is DT-FM's equations 3 and 4, exactly, up to
    :data:`~lightning_sdpipe.placement.matching.EXACT_PATH` stages. With periods, the largest is then lowered as long as
    that pays.

    Args:
        groups: the groups of M stages.
        weights: the weights of M stages.
        limit: largest period of the links that may be used at first.
        last: a device whose group has to be the last stage; by default any group may be.

    Yields:
        arrangements, and None in between, so that a caller that is short of time can stop.
    """
    costs: Sequence[Matrix] = weights.step
    if limit == math.inf:  # the slowest of all cuts counts for both, but which is unknown; all periods are lowered then
        costs = [_sum(step, period) for step, period in zip(weights.step, weights.period, strict=True)]
    found = yield from _linked(groups, costs, weights, limit * (1 + ROUNDING), last)
    least = math.inf
    for _ in range(PACES):
        if found is None:
            return
        yield found
        total = evaluate(found, weights).total
        pace = _pace(found, weights)
        if total >= least or pace == 0.0:
            return
        if least < math.inf:
            pace = math.nextafter(pace, 0.0)
        least = total
        found = yield from _linked(found, weights.step, weights, pace, last)


def _linked(
    groups: Sequence[Sequence[int]], costs: Sequence[Matrix], weights: Weights, limit: float, last: int | None
) -> Generator[None, None, Stages | None]:
    """Return the arrangement with the least sum over cuts of the largest cost, among links of a period up to
    ``limit``; None if there is none."""
    size = len(groups)
    if size == 1:
        return [list(groups[0])]
    if not weights.even:
        stages = [list(groups[0])]
        for group, cost, period in zip(groups[1:], costs, weights.period, strict=True):
            least, follower = bottleneck(_between(stages[-1], group, cost, period, limit))
            if least == math.inf:
                return None
            stages.append([group[position] for position in follower])
            yield None
        return stages
    lengths = [[math.inf] * size for _ in range(size)]
    for a in range(size):
        for b in range(a):
            lengths[a][b], _ = bottleneck(_between(groups[a], groups[b], costs[0], weights.period[0], limit))
            lengths[b][a] = lengths[a][b]
        yield None
    end = next((number for number, group in enumerate(groups) if last in group), None)
    length, order = shortest_path(lengths, end)
    if length == math.inf:
        return None
    yield None
    stages = [list(groups[order[0]])]
    for following in order[1:]:
        group = groups[following]
        _, follower = bottleneck(_between(stages[-1], group, costs[0], weights.period[0], limit))
        stages.append([group[position] for position in follower])
    return stages


def _between(above: Sequence[int], below: Sequence[int], cost: Matrix, period: Matrix, limit: float) -> Matrix:
    if limit == math.inf:
        return [[cost[a][b] for b in below] for a in above]
    return [[cost[a][b] if period[a][b] <= limit else math.inf for b in below] for a in above]


def _pace(stages: Stages, weights: Weights) -> float:
    """Return the largest period of a link in use."""
    return max(
        (
            period[a][b]
            for (above, below), period in zip(pairwise(stages), weights.period, strict=True)
            for a, b in zip(above, below, strict=True)
        ),
        default=0.0,
    )


def _sum(first: Matrix, second: Matrix) -> Matrix:
    return [[a + b for a, b in zip(row, other, strict=True)] for row, other in zip(first, second, strict=True)]


def ending_with(device: int, stages: Stages, weights: Weights) -> tuple[Stages, Cost]:
    """Return the cheapest placement that was found near ``stages`` in which ``device`` runs a last stage, and its
    cost.

    Pipelines may be reversed where all stages are alike. The best order of the stages that ends with the device's stage
    is tried, and swaps of the device with each device that runs a last or a first stage.
    """
    best, cost = stages, Cost(math.inf, math.inf)
    for candidate in _candidates(device, stages, weights):
        found = evaluate(candidate, weights)
        if found.total < cost.total:
            best, cost = candidate, found
    return best, cost


def _candidates(device: int, stages: Stages, weights: Weights) -> Iterator[Stages]:
    if device in stages[-1]:
        yield stages
    if weights.even:
        if device in stages[0]:
            yield stages[::-1]
        yield from (found for found in arrange(stages, weights, last=device) if found is not None)
    for other in (*stages[-1], *(stages[0] if weights.even else ())):
        swapped = [[{device: other, other: device}.get(member, member) for member in group] for group in stages]
        yield swapped if device in swapped[-1] else swapped[::-1]
        yield from (found for found in arrange(swapped, weights, last=device) if found is not None)


def free_hosts(stages: Stages, weights: Weights, network: Network) -> list[str]:
    """Return hosts whose first device runs a last stage: with one of them first in the run, the rule about rank 0
    costs nothing."""
    ends = [*stages[-1], *(stages[0] if weights.even else ())]
    return sorted({network.devices[device].host for device in ends if network.devices[device].index == 0})
