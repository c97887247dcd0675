"""All-reduce as policies: in every iteration, all participating workers of a stage form one group.

With models it is the synchronous baseline, and the limit T = ∞ of the semi-decentralised policy (SDPipe §3.2).
"""

from __future__ import annotations

from lightning_sdpipe.policies.local_sgd import LocalSGDPolicy
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.policies.rounds_of_all import RoundsOfAll


class AllReduceModels(PolicyConfig, frozen=True):
    """All-reduce of models: all are averaged after every step. (:class:`lightning_sdpipe.AllReduce` averages
    gradients.)"""

    registered = "all_reduce"
    in_step = True

    def make_policy(self, num_stages: int, num_pipelines: int) -> LocalSGDPolicy:
        return LocalSGDPolicy(num_stages, num_pipelines, every=1)


class AllPresent(PolicyConfig, frozen=True):
    """Rounds of gradients of all present pipelines: the policy of :class:`lightning_sdpipe.AllReduce` in an elastic
    run. Replicas are equal after each round, so every pipeline is in every round."""

    registered = "all_present"

    @property
    def keeps_equal(self) -> bool:
        return True

    def make_policy(self, num_stages: int, num_pipelines: int) -> RoundsOfAll:
        return RoundsOfAll(num_stages, num_pipelines)
