"""DT-FM's cost of a placement (§3.2, equations 2 to 4), link by link, as its genetic search needs it.

Without computation, and if all pipelines average together, it equals the package's own objective
(:mod:`lightning_sdpipe.placement.rate`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import cast

import numpy as np

from lightning_sdpipe.placement.cost import CostModel, shares
from lightning_sdpipe.placement.model import Block
from lightning_sdpipe.placement.network import Matrix, Network


@dataclass(frozen=True)
class Weights:
    """The cost of each link in each place, in seconds. Matrices are symmetric, n × n, and the same object for stages or
    cuts that are alike.

    ``exchange[j][a][b]``: replicas a and b of stage j exchange their shares. ``step[t][a][b]`` and ``period[t][a][b]``:
    a and b are on either side of cut t, which all pipelines may pass ``together``.
    """

    exchange: tuple[Matrix, ...]
    step: tuple[Matrix, ...]
    period: tuple[Matrix, ...]
    together: bool = False

    @property
    def even(self) -> bool:
        """True if all stages are alike, so that a placement may be reversed."""
        return all(
            len({id(matrix) for matrix in matrices}) <= 1 for matrices in (self.exchange, self.step, self.period)
        )

    @property
    def num_stages(self) -> int:
        return len(self.exchange)


@dataclass(frozen=True)
class Cost:
    """Seconds for one mini-batch of every pipeline, by purpose."""

    data: float
    pipeline: float

    @property
    def total(self) -> float:
        return self.data + self.pipeline


def weights(
    network: Network,
    num_pipelines: int,
    stages: Sequence[Block],
    model: CostModel = "pipelined",
    num_micro_batches: int = 1,
) -> Weights:
    """Return the cost of each link of ``network``.

    Args:
        network: a network of at least M × N devices.
        num_pipelines: N.
        stages: what the M stages send, each as a block.
        model: how cuts add up; see :mod:`lightning_sdpipe.placement.cost`.
        num_micro_batches: m; used by ``"pipelined"`` only.

    Raises:
        ConfigurationError: the model is unknown, or there is no micro-batch.
    """
    rule = shares(model, num_micro_batches)
    latency, bandwidth = np.array(network.latency()), np.array(network.bandwidth())

    @cache
    def links(amount: float, late: bool) -> Matrix:
        """Return the seconds to send ``amount`` bytes over each link and get as many back, with latency if ``late``."""
        linked = bandwidth > 0.0
        delays = np.where(linked, latency, math.inf) if late else 0.0
        seconds = np.where(linked, 2.0 * (delays + amount / np.where(linked, bandwidth, 1.0)), math.inf)
        np.fill_diagonal(seconds, 0.0)
        return cast("Matrix", seconds.tolist())

    cuts = [((stage.activation_bytes or 0) + stage.gradient_bytes) / 2 for stage in stages[:-1]]
    exchange = tuple(links(stage.parameter_bytes / num_pipelines, True) for stage in stages)
    step = tuple(links(rule.step * amount, rule.step > 0) for amount in cuts)
    period = tuple(links(rule.period * amount, False) for amount in cuts)
    return Weights(exchange, step, period, rule.together)


def evaluate(stages: Sequence[Sequence[int]], weights: Weights) -> Cost:
    """Return the cost of a placement; infinite if it needs a missing link.

    Args:
        stages: the devices of each stage, by pipeline.
        weights: costs of the links for M stages.
    """
    data = max(group_cost(group, matrix) for group, matrix in zip(stages, weights.exchange, strict=True))
    between = list(enumerate(pairwise(stages)))
    steps = [[weights.step[t][a][b] for a, b in zip(*pair, strict=True)] for t, pair in between]
    periods = [[weights.period[t][a][b] for a, b in zip(*pair, strict=True)] for t, pair in between]
    if weights.together or not steps:
        return Cost(data, sum(map(max, steps)))
    passed = zip(zip(*steps, strict=True), zip(*periods, strict=True), strict=True)  # by pipeline
    return Cost(data, max(sum(step) + max(period) for step, period in passed))


def group_cost(group: Sequence[int], exchange: Matrix) -> float:
    """Return the seconds until the slowest member has exchanged its shares with all others (DT-FM, equation 2)."""
    return max(sum(exchange[a][b] for b in group if b != a) for a in group)
