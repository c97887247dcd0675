"""Cost of a placement: seconds of communication for one mini-batch of every pipeline.

The cost has two parts. *Data*: the replicas of a stage average their parameters, each managing 1/N of them for the
others (DT-FM §3.2, equation 2): ``max_d Σ_d' 2 (α + c_dp / (N β))``, and the slowest stage counts. *Pipeline*: over a
cut, the slowest of the N links counts. Three models differ in how cuts add up (c is of a whole mini-batch, of m
micro-batches):

- ``"dtfm"`` (§3.3, equations 3 and 4): ``Σ_t 2 (α_t + c / β_t)``, as if no two cuts were ever busy at the same time;
- ``"pipelined"``: ``Σ_t 2 (α_t + c / (m β_t)) + (m − 1) max_t 2 c / (m β_t)``: with a flush, a micro-batch crosses
  all cuts in turn, and the others follow at the pace of the slowest;
- ``"pipedream"``: ``max_t 2 c / β_t``: without a flush only the pace counts.

All three are the sum over cuts of the largest ``step`` of their links, plus the largest ``period`` of any link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.placement.model import StageTraffic
from lightning_sdpipe.placement.network import Matrix, Network

CostModel = Literal["dtfm", "pipelined", "pipedream"]

Stages: TypeAlias = list[list[int]]
"""A placement: ``stages[j][i]`` is the device that runs stage j of pipeline i."""


@dataclass(frozen=True)
class Weights:
    """The cost of each link in each place, in seconds. Matrices are symmetric, n × n, and shared where stages or cuts
    are alike.

    ``exchange[j][a][b]``: two replicas of stage j exchange their shares. ``step[t][a][b]`` and ``period[t][a][b]``: a
    and b are on either side of cut t.
    """

    exchange: tuple[Matrix, ...]
    step: tuple[Matrix, ...]
    period: tuple[Matrix, ...]

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
    traffic: StageTraffic,
    model: CostModel = "pipelined",
    num_micro_batches: int = 1,
) -> Weights:
    """Return the cost of each link of ``network``.

    Args:
        network: a network of at least M × N devices.
        num_pipelines: N.
        traffic: the traffic of the M stages.
        model: see the module's docstring.
        num_micro_batches: m; used by ``"pipelined"`` only.

    Raises:
        ConfigurationError: the model is unknown, or there is no micro-batch.
    """
    if model not in get_args(CostModel):
        raise ConfigurationError(f"The cost model {model!r} is not known; use one of {', '.join(get_args(CostModel))}.")
    if num_micro_batches < 1:
        raise ConfigurationError(f"num_micro_batches={num_micro_batches} must be 1 or more.")
    links = _Links(network)
    exchange = tuple(links(amount / num_pipelines, True) for amount in traffic.stage_bytes)
    share = {"dtfm": 1.0, "pipelined": 1.0 / num_micro_batches, "pipedream": 0.0}[model]  # that passes in single file
    step = tuple(links(share * amount, share > 0) for amount in traffic.cut_bytes)
    rest = 0.0 if model == "dtfm" else 1.0 - share
    period = tuple(links(rest * amount, False) for amount in traffic.cut_bytes)
    return Weights(exchange, step, period)


class _Links:
    """Seconds to send an amount of bytes over each link and get as many back, with or without latency."""

    def __init__(self, network: Network) -> None:
        self._latency, self._bandwidth = network.latency(), network.bandwidth()
        self._made: dict[tuple[float, bool], Matrix] = {}

    def __call__(self, amount: float, late: bool) -> Matrix:
        if (amount, late) not in self._made:
            self._made[amount, late] = [
                [
                    0.0 if a == b else 2.0 * ((alpha if late else 0.0) + amount / beta) if beta else math.inf
                    for b, (alpha, beta) in enumerate(zip(alphas, betas, strict=True))
                ]
                for a, (alphas, betas) in enumerate(zip(self._latency, self._bandwidth, strict=True))
            ]
        return self._made[amount, late]


def evaluate(stages: Sequence[Sequence[int]], weights: Weights) -> Cost:
    """Return the cost of a placement; infinite where it needs a link that does not exist.

    Args:
        stages: the devices of each stage, by pipeline.
        weights: weights of M stages.
    """
    data = max(group_cost(group, matrix) for group, matrix in zip(stages, weights.exchange, strict=True))
    steps, period = 0.0, 0.0
    for (above, below), step, pace in zip(pairwise(stages), weights.step, weights.period, strict=True):
        steps += max(step[a][b] for a, b in zip(above, below, strict=True))
        period = max(period, *(pace[a][b] for a, b in zip(above, below, strict=True)))
    return Cost(data, steps + period)


def group_cost(group: Sequence[int], exchange: Matrix) -> float:
    """Return the seconds until the slowest member has exchanged its shares with all others (DT-FM, equation 2)."""
    return max(sum(exchange[a][b] for b in group if b != a) for a in group)


def least_loads(weights: Weights, num_pipelines: int) -> list[float]:
    """Return what each device spends at least on exchanging with its group, whichever N − 1 others are in it."""
    matrices = {id(matrix): matrix for matrix in weights.exchange}.values()
    least = [math.inf] * len(weights.exchange[0])
    for matrix in matrices:
        for device, row in enumerate(matrix):
            others = sorted(row[:device] + row[device + 1 :])
            least[device] = min(least[device], sum(others[: num_pipelines - 1]))
    return least


def lower_bound(weights: Weights, num_pipelines: int) -> float:
    """Return a lower bound of the cost of all placements: every device exchanges with N − 1 others at least at the
    cost of the nearest ones, and no cut is cheaper than the cheapest link."""
    cuts = [_least(step) for step in weights.step]
    paces = [_least(period) for period in weights.period]
    return max(least_loads(weights, num_pipelines)) + sum(cuts) + max(paces, default=0.0)


def _least(matrix: Matrix) -> float:
    return min(value for a, row in enumerate(matrix) for b, value in enumerate(row) if a != b)


def default_order(num_stages: int, num_pipelines: int) -> Stages:
    """Return the placement of device i as rank i: consecutive ranks form a pipeline, its last stage first."""
    return [[i * num_stages + num_stages - 1 - j for i in range(num_pipelines)] for j in range(num_stages)]
