"""Cost of a placement: seconds of communication for one mini-batch of every pipeline.

The cost has two parts. *Data*: the replicas of a stage average their parameters, each reducing 1/N of them for the
others (DT-FM §3.2, equation 2): ``max_d Σ_d' 2 (α + c_dp / (N β))``; the slowest stage counts. *Pipeline*: three models
differ in how cuts add up (c bytes cross cut t in a mini-batch of m micro-batches):

- ``"dtfm"`` (§3.3, equations 3 and 4): ``Σ_t 2 (α_t + c / β_t)``, as if no two cuts were busy at the same time and all
  pipelines passed each cut together: at each cut, the slowest of the N links counts;
- ``"pipelined"``: ``Σ_t 2 (α_t + c / (m β_t)) + (m − 1) max_t 2 c / (m β_t)``: with a flush, one micro-batch crosses
  all cuts in turn, and the others follow at the pace of the slowest cut; the slowest pipeline counts;
- ``"pipedream"``: ``max_t 2 c / β_t``: without a flush, only the pace counts.

Each is the sum over cuts of the ``step`` share, plus the largest ``period`` share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_sdpipe.errors import ConfigurationError, check_integer

CostModel = Literal["dtfm", "pipelined", "pipedream"]


@dataclass(frozen=True)
class Shares:
    """How a mini-batch passes a pipeline: the ``step`` share of its bytes crosses all cuts in turn, and the ``period``
    share follows at the pace of the slowest; ``computing`` is the share of the computation that the stages do in turn.
    If ``together``, all pipelines pass each cut at the same time."""

    step: float
    period: float
    computing: float
    together: bool = False


def shares(model: CostModel, num_micro_batches: int) -> Shares:
    """Return the shares of a cost model with m micro-batches; see the module's docstring.

    Raises:
        ConfigurationError: the model is unknown, or there is no micro-batch.
    """
    check_integer("num_micro_batches", num_micro_batches, 1, "of a mini-batch")
    one = 1.0 / num_micro_batches
    match model:
        case "dtfm":
            return Shares(1.0, 0.0, one, True)
        case "pipelined":
            return Shares(one, 1.0 - one, one)
        case "pipedream":
            return Shares(0.0, 1.0, 0.0)
    raise ConfigurationError(f"The cost model {model!r} is not known; use one of {', '.join(get_args(CostModel))}.")
