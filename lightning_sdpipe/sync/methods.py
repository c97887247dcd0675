"""Synchronisation methods that a user chooses from: values, checked when they are made.

Methods that average models are the values of a policy; :func:`method_of` gives each policy, also a user's own, the
worker's half that carries its decisions out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec
from lightning_utilities.core.rank_zero import rank_zero_debug

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.moving import Mover
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.all_reduce import AllPresent
from lightning_sdpipe.policies.decentralized import Decentralized, PresentPeers, with_neighbours
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.local_sgd import LocalSGD, NoSync
from lightning_sdpipe.policies.pairing import random_pair, shift_one
from lightning_sdpipe.policies.phd_psgd import PHDPSGD
from lightning_sdpipe.policies.policy import PolicyConfig, refusal
from lightning_sdpipe.sync.background_averaging import AsynchronousPairs, BackgroundAveraging, FreeAveraging
from lightning_sdpipe.sync.capabilities import (
    BY_SAMPLES,
    EQUALLY,
    GRADIENTS,
    SENTENCES,
    Capabilities,
    Combination,
    capabilities_of,
    of_policy,
)
from lightning_sdpipe.sync.diloco import DiLoCo
from lightning_sdpipe.sync.gradient_averaging import GradientAveraging, PresentAveraging
from lightning_sdpipe.sync.hybrid_groups import HybridGroups
from lightning_sdpipe.sync.model_averaging import LateAveraging, ModelAveraging
from lightning_sdpipe.sync.mover_choice import Begin, mover_among_all, mover_among_groups, mover_in_a_ring
from lightning_sdpipe.sync.synchronizer import Replica, Synchronizer, SyncMethod


@dataclass(frozen=True)
class AllReduce:
    """All-reduce: gradients are averaged over all replicas before every step, as in DistributedDataParallel.

    They travel in flat buckets of about ``bucket_mib`` MiB, or a quarter of the model if that is less and more than one
    MiB, each as soon as the backward has filled it.

    ``weights`` gives the weight of each pipeline's gradient: the ``"samples"`` of its mini-batch (or the count of the
    module's ``weigh_batch``), or ``"equal"`` for all, as with DistributedDataParallel. The default is equal weights,
    but samples in elastic runs in which gradients travel in full.
    """

    bucket_mib: float = 25.0
    weights: Literal["samples", "equal"] | None = None

    def __post_init__(self) -> None:
        if not self.bucket_mib > 0:
            raise ConfigurationError(f"bucket_mib={self.bucket_mib} is not allowed; give MiB above 0.")
        if self.weights not in ("samples", "equal", None):
            raise refusal("weights", self.weights, '"samples", "equal", or None')

    @property
    def policy(self) -> PolicyConfig:
        return NoSync()  # all meet, so there is nothing to decide

    @property
    def elastic_policy(self) -> PolicyConfig:
        """Policy for pipelines that come and go: the scheduler says which are in a round."""
        return AllPresent()

    @property
    def capabilities(self) -> Capabilities:
        return {None: GRADIENTS, "equal": EQUALLY, "samples": BY_SAMPLES}[self.weights]

    def build(self, replica: Replica) -> Synchronizer:
        size, rounds = int(self.bucket_mib * 2**20), replica.rounds
        if rounds is not None:
            by_samples = self.weights == "samples" or (self.weights is None and replica.exchange.is_plain)
            return PresentAveraging(replica, rounds, size, by_samples)
        return GradientAveraging(replica, size, self.weights == "samples")


@dataclass(frozen=True)
class ByPolicy:
    """A method whose groups the scheduler decides by ``policy``, with the worker's half that carries them out."""

    policy: PolicyConfig

    @property
    def elastic_policy(self) -> PolicyConfig:
        """Policy for pipelines that come and go."""
        match self.policy:
            case Decentralized(peers, every, seed):
                return PresentPeers(peers, every, seed)
            case _:
                return self.policy

    @property
    def capabilities(self) -> Capabilities:
        return of_policy(self.policy)

    def build(self, replica: Replica) -> Synchronizer:
        match self.policy:
            case NoSync():
                return Synchronizer(replica)
            case LocalSGD(every):
                return _averaging(replica, every, *mover_among_all(replica), lambda all_replicas: all_replicas)
            case Decentralized("ring", every):
                return _averaging(
                    replica, every, *mover_in_a_ring(replica), partial(with_neighbours, num_pipelines=replica.count)
                )
            case Decentralized() as pairs:
                return _averaging(
                    replica, pairs.every, mover_among_groups(replica), None, partial(_pair, pairs, replica.pipeline)
                )
            case ADPSGD(asynchronous=True):
                return AsynchronousPairs(replica)
            case PHDPSGD(within="gradients"):
                return HybridGroups(replica, self.policy)
            case _:
                return ModelAveraging(replica) if self.policy.announces == "early" else LateAveraging(replica)


def _averaging(
    replica: Replica, every: int, mover: Mover, begin: Begin | None, meet: Callable[[Group], Group]
) -> Synchronizer:
    if replica.exchange.overlap == "free" and replica.mover is not None:
        return FreeAveraging(replica, mover)
    if replica.exchange.overlap == "free":
        return BackgroundAveraging(replica, mover, meet, begin)
    return ModelAveraging(replica, every, mover, begin)


def _pair(peers: Decentralized, pipeline: int, all_replicas: Group) -> Group:
    """Return the members that a pipeline averages with; the sequence of ``all_replicas`` is the number of the round."""
    size, number = len(all_replicas.members), all_replicas.sequence
    if peers.peers == "shift_one":
        partner = shift_one(pipeline, size, number)
    else:
        partner = random_pair(pipeline, size, number, peers.seed)
    together = [worker for worker in all_replicas.members if worker.pipeline in (pipeline, partner)]
    return msgspec.structs.replace(all_replicas, members=tuple(together), weights=(1 / len(together),) * len(together))


def deals(data: Literal["auto", "dealt", "sharded"], method: SyncMethod, num_pipelines: int, held: str | None) -> bool:
    """Return whether batches go to the pipelines by their speed, if the loader allows it.

    Args:
        data: the strategy's option.
        method: the synchronisation method.
        num_pipelines: N.
        held: the scheduler's policy as JSON; a standing scheduler may hold another policy than the method's.
    """
    if data != "auto":
        return data == "dealt"
    own = registry.name_of(method.policy)
    held_name = own if held is None else json.loads(held)["type"]
    if held is not None and own == held_name and isinstance(method, ByPolicy):
        method = ByPolicy(registry.from_json(held))
    row = capabilities_of(method)
    if num_pipelines == 1:
        reason = "there is one pipeline"
    elif own != held_name:
        reason = f"the scheduler decides by {held_name}, which may hold pipelines in step"
    elif "auto" not in row.data:
        reason = SENTENCES["data"]
    else:
        return True
    rank_zero_debug(f"Each pipeline trains its own shard: {reason}.")
    return False


def method_of(sync: SyncMethod | PolicyConfig | str) -> SyncMethod:
    """Return the method for ``sync``: a method, the values of a policy, or the import path of a user's own.

    Raises:
        ConfigurationError: ``sync`` is none of these, the scheduler's process could not make the policy, or workers
            cannot carry it out.
    """
    if isinstance(sync, str) and ":" in sync:
        sync = registry.make(sync, {})
    if isinstance(sync, PolicyConfig):
        registry.check(sync)
        return ByPolicy(sync)
    if not isinstance(sync, SyncMethod):
        raise ConfigurationError(
            f"sync={sync!r} is no synchronisation method; use one of lightning_sdpipe.sync, such as "
            "SemiDecentralized(), or a policy of your own, as in sync=RoundRobin() or "
            'sync="my_package.policies:RoundRobin".'
        )
    return sync


def method_for(asked: Combination) -> SyncMethod:
    """Return the method that carries ``asked.sync`` out with the other options.

    In an elastic job ``LocalSGD`` with a payload is carried out as ``DiLoCo`` with ``lr=1, momentum=0``, which computes
    the same: its base is the common model that messages are differences from, and newcomers get it.

    Raises:
        ConfigurationError: as :func:`method_of` does.
    """
    method, exchange = method_of(asked.sync), asked.exchange
    match method:
        case ByPolicy(LocalSGD(every)) if asked.elastic and not (
            exchange.is_full or exchange.overlap == "free" or asked.unlike
        ):
            return DiLoCo(every, lr=1.0, momentum=0.0)
        case _:
            return method
