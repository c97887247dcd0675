"""All-reduce of models as a policy: in every iteration, all active workers of a stage form one group."""

from __future__ import annotations

from lightning_sdpipe.policies.local_sgd import LocalSGDPolicy
from lightning_sdpipe.policies.policy import PolicyConfig


class AllReduceModels(PolicyConfig, frozen=True):
    """Models of all are averaged after every step. (:class:`lightning_sdpipe.AllReduce` averages gradients.)"""

    def make_policy(self, num_stages: int, num_pipelines: int) -> AllReducePolicy:
        return AllReducePolicy(num_stages, num_pipelines)


class AllReducePolicy(LocalSGDPolicy):
    """The synchronous baseline, and the limit T = ∞ of the semi-decentralised policy (SDPipe §3.2)."""

    def __init__(self, num_stages: int, num_pipelines: int) -> None:
        super().__init__(num_stages, num_pipelines, every=1)
