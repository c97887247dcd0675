"""Cost of a placement: seconds of communication for one mini-batch of every pipeline.

The cost has two parts. *Data*: the replicas of a stage average their parameters, each managing 1/N of them for the
others (DT-FM §3.2, equation 2): ``max_d Σ_d' 2 (α + c_dp / (N β))``, and the slowest stage counts. *Pipeline*: three
models differ in how cuts add up (c is of a whole mini-batch, of m micro-batches):

- ``"dtfm"`` (§3.3, equations 3 and 4): ``Σ_t 2 (α_t + c / β_t)``, as if no two cuts were ever busy at the same time,
  and all pipelines passed each cut together: over a cut, the slowest of the N links counts;
- ``"pipelined"``: ``Σ_t 2 (α_t + c / (m β_t)) + (m − 1) max_t 2 c / (m β_t)``: with a flush, a micro-batch crosses
  all cuts in turn, and the others follow at the pace of the slowest; the slowest pipeline counts;
- ``"pipedream"``: ``max_t 2 c / β_t``: without a flush only the pace counts.

All three are sums over cuts of ``step``, plus the largest ``period``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal, TypeAlias, cast, get_args

import numpy as np

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.placement.model import Block
from lightning_sdpipe.placement.network import Matrix, Network

CostModel = Literal["dtfm", "pipelined", "pipedream"]

Stages: TypeAlias = list[list[int]]
"""A placement: ``stages[j][i]`` is the device that runs stage j of pipeline i."""


@dataclass(frozen=True)
class Shares:
    """How a mini-batch passes a pipeline: the ``step`` share of its bytes takes all cuts in turn, and the ``period``
    share follows at the pace of the slowest; ``computing`` is the share of the computing that is done in turn. All
    pipelines may pass each cut ``together``."""

    step: float
    period: float
    computing: float
    together: bool = False


def shares(model: CostModel, num_micro_batches: int) -> Shares:
    """Return the shares of a cost model with m micro-batches; see the module's docstring.

    Raises:
        ConfigurationError: the model is unknown, or there is no micro-batch.
    """
    if num_micro_batches < 1:
        raise ConfigurationError(f"num_micro_batches={num_micro_batches} must be 1 or more.")
    one = 1.0 / num_micro_batches
    match model:
        case "dtfm":
            return Shares(1.0, 0.0, one, True)
        case "pipelined":
            return Shares(one, 1.0 - one, one)
        case "pipedream":
            return Shares(0.0, 1.0, 0.0)
    raise ConfigurationError(f"The cost model {model!r} is not known; use one of {', '.join(get_args(CostModel))}.")


@dataclass(frozen=True)
class Weights:
    """The cost of each link in each place, in seconds. Matrices are symmetric, n × n, and shared where stages or cuts
    are alike.

    ``exchange[j][a][b]``: two replicas of stage j exchange their shares. ``step[t][a][b]`` and ``period[t][a][b]``: a
    and b are on either side of cut t, which all pipelines may pass ``together``.
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
        model: see the module's docstring.
        num_micro_batches: m; used by ``"pipelined"`` only.

    Raises:
        ConfigurationError: the model is unknown, or there is no micro-batch.
    """
    rule = shares(model, num_micro_batches)
    latency, bandwidth = np.array(network.latency()), np.array(network.bandwidth())

    @cache
    def links(amount: float, late: bool) -> Matrix:
        """Return seconds to send an amount of bytes over each link and get as many back, with or without latency."""
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
    """Return the cost of a placement; infinite where it needs a link that does not exist.

    Args:
        stages: the devices of each stage, by pipeline.
        weights: weights of M stages.
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
