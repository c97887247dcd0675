"""All-reduce as a policy: in every iteration, all active workers of a stage form one group."""

from __future__ import annotations

from lightning_sdpipe.scheduler.local_sgd import LocalSGDPolicy


class AllReducePolicy(LocalSGDPolicy):
    """The synchronous baseline, and the limit T = ∞ of the semi-decentralised policy (SDPipe §3.2)."""

    def __init__(self, num_stages: int, num_pipelines: int) -> None:
        super().__init__(num_stages, num_pipelines, every=1)
