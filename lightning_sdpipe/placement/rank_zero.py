"""Rank 0 must run a last stage: it has the logger and the progress bar, and the loss exists on last stages only. What
that costs, and who could be rank 0 for free."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lightning_sdpipe.placement.arrange import arrange
from lightning_sdpipe.placement.cost import Cost, Stages, Weights, evaluate
from lightning_sdpipe.placement.network import Network


def ending_with(device: int, stages: Stages, weights: Weights) -> tuple[Stages, Cost]:
    """The cheapest placement that was found near ``stages`` in which ``device`` runs a last stage, and its cost.

    Pipelines may be reversed where all stages are alike. Tried are the best order of the stages that ends with the
    device's, and letting the device swap places with each of those that run a last or a first stage.
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
    """Hosts whose first device runs a last stage: with one of them first in the run, the rule about rank 0 costs
    nothing."""
    ends = [*stages[-1], *(stages[0] if weights.even else ())]
    return sorted({network.devices[device].host for device in ends if network.devices[device].index == 0})
