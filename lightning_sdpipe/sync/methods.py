"""The synchronisation methods that a user chooses from: values, checked when they are made.

Those that average models are the values of a policy; :func:`method_of` gives each the worker's half that carries its
decisions out, any policy of the user's own included.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import msgspec
from lightning_utilities.core.rank_zero import rank_zero_debug, rank_zero_info

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.moving import Mover
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.admission import AdmissionRule
from lightning_sdpipe.policies.decentralized import Decentralized, with_neighbours
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.local_sgd import LocalSGD, NoSync
from lightning_sdpipe.policies.pairing import random_pair, shift_one
from lightning_sdpipe.policies.partial_reduce import PartialReduce
from lightning_sdpipe.policies.phd_psgd import PHDPSGD
from lightning_sdpipe.policies.policy import PolicyConfig, check_integer
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.sync.asynchronous_pairs import AsynchronousPairs
from lightning_sdpipe.sync.background_averaging import BackgroundAveraging
from lightning_sdpipe.sync.gradient_averaging import GradientAveraging
from lightning_sdpipe.sync.hybrid_groups import HybridGroups
from lightning_sdpipe.sync.model_averaging import LateAveraging, ModelAveraging
from lightning_sdpipe.sync.mover_choice import (
    ASYNCHRONOUS_PAIRS,
    CHANGING_GROUPS,
    CHANGING_PAIRS,
    EVERYBODY,
    EVERYBODY_NOW_AND_THEN,
    FREE_PAIRS,
    GRADIENTS,
    MEETINGS,
    RING,
    Begin,
    ExchangeSupport,
    check,
    mover_among_all,
    mover_among_groups,
    mover_in_a_ring,
)
from lightning_sdpipe.sync.stale_synchronous import StaleSynchronous
from lightning_sdpipe.sync.synchronizer import Replica, Synchronizer, SyncMethod
from lightning_sdpipe.topology.group_generator import hosts_as_groups


@dataclass(frozen=True)
class AllReduce:
    """Gradients are averaged over all replicas before every step, as DistributedDataParallel does it.

    They travel in flat buckets of about ``bucket_mib`` MiB, or a quarter of the model if that is less and more than one
    MiB, each as soon as the backward has filled it.
    """

    bucket_mib: float = 25.0

    def __post_init__(self) -> None:
        if not self.bucket_mib > 0:
            raise ConfigurationError(f"bucket_mib={self.bucket_mib} is not allowed; give MiB above 0.")

    @property
    def policy(self) -> PolicyConfig:
        return NoSync()  # everybody meets everybody: there is nothing to decide

    @property
    def takes(self) -> ExchangeSupport:
        return GRADIENTS

    def build(self, replica: Replica) -> Synchronizer:
        return GradientAveraging(replica, int(self.bucket_mib * 2**20))


@dataclass(frozen=True)
class ParameterServer(AdmissionRule):
    """Each pipeline pushes its updates to a parameter server and pulls the parameters with those of others.

    What the optimizer changed in ``every`` updates is pushed, so that any optimizer will do: its state stays with the
    pipeline. The other values say which pushes count, and how much, and who may go on when:
    :mod:`lightning_sdpipe.policies.admission`.

    ==========================  ===================================================================
    BSP                         the defaults
    SSP                         ``staleness=s``
    ASP                         ``staleness=None``
    HETE                        ``staleness=None, weights="inverse_staleness"``
    b backup workers            ``quorum=N - b``
    Eager-Reduce                ``quorum=⌈N/2⌉, late="carry"``
    ==========================  ===================================================================
    """

    every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("every", self.every, 1, "updates")

    @property
    def policy(self) -> PolicyConfig:
        return NoSync()  # the parameter servers keep the clocks

    def build(self, replica: Replica) -> Synchronizer:
        return StaleSynchronous(replica, self, self.every)


@dataclass(frozen=True)
class HetPipe:
    """HetPipe (Park et al. 2020): each pipeline is a virtual worker of a parameter server.

    Every ``sync_every`` updates, its clock, it pushes the sum of its updates and pulls the parameters with everybody's.
    No pipeline works more than ``staleness`` clocks ahead of another; M, the number of stages, if it is None.
    ``combine="mean"`` divides updates by the number of pipelines, so that a learning rate chosen for averaged gradients
    fits; ``"sum"`` is what HetPipe does.
    """

    staleness: int | None = None
    sync_every: int = 10
    combine: Literal["sum", "mean"] = "sum"

    def __post_init__(self) -> None:
        check_integer("sync_every", self.sync_every, 1, "updates")
        self.server(1)

    def server(self, num_stages: int) -> ParameterServer:
        """The parameter server that this is."""
        staleness = num_stages if self.staleness is None else self.staleness
        return ParameterServer(staleness=staleness, combine=self.combine, every=self.sync_every)

    @property
    def policy(self) -> PolicyConfig:
        return self.server(1).policy

    def build(self, replica: Replica) -> Synchronizer:
        return self.server(replica.groups.mesh.num_stages).build(replica)


@dataclass(frozen=True)
class ByPolicy:
    """What the scheduler decides by ``policy``, and the worker's half that carries it out."""

    policy: PolicyConfig

    @property
    def takes(self) -> ExchangeSupport | None:
        """What it can do with an exchange."""
        match self.policy:
            case PHDPSGD(within="models"):
                return CHANGING_GROUPS
            case NoSync() | PHDPSGD(sharded=False):
                return None
            case PHDPSGD():
                return MEETINGS
            case LocalSGD(every):
                return EVERYBODY if every == 1 else EVERYBODY_NOW_AND_THEN
            case Decentralized(peers, every):
                takes = RING if peers == "ring" else FREE_PAIRS
                return takes if every == 1 else replace(takes, free=EVERYBODY_NOW_AND_THEN.free)
            case ADPSGD(asynchronous=True):
                return ASYNCHRONOUS_PAIRS
            case ADPSGD():
                return CHANGING_PAIRS
            case _:
                return CHANGING_GROUPS

    def build(self, replica: Replica) -> Synchronizer:
        match self.policy:
            case NoSync():
                return Synchronizer(replica)
            case LocalSGD(every):
                return _averaging(replica, every, *mover_among_all(replica), lambda everybody: everybody)
            case Decentralized("ring", every):
                return _averaging(
                    replica,
                    every,
                    *mover_in_a_ring(replica),
                    partial(with_neighbours, num_pipelines=len(replica.ranks)),
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
    if replica.exchange.overlap == "free":
        return BackgroundAveraging(replica, mover, meet, begin)
    return ModelAveraging(replica, every, mover, begin)


def _pair(peers: Decentralized, pipeline: int, everybody: Group) -> Group:
    """Whom a pipeline averages with in the round that is the sequence of ``everybody``."""
    size, number = len(everybody.members), everybody.sequence
    if peers.peers == "shift_one":
        partner = shift_one(pipeline, size, number)
    else:
        partner = random_pair(pipeline, size, number, peers.seed)
    together = [worker for worker in everybody.members if worker.pipeline in (pipeline, partner)]
    return msgspec.structs.replace(everybody, members=tuple(together), weights=(1 / len(together),) * len(together))


def refuse_exchange(sync: object, method: SyncMethod, exchange: Exchange) -> None:
    """Raises ConfigurationError if ``method`` cannot move its tensors so. A method of the user's own says what it can
    do with an exchange as ``takes``, a :class:`~lightning_sdpipe.sync.mover_choice.ExchangeSupport`."""
    check(sync, exchange, getattr(method, "takes", None))


def refuse_without_flush(method: SyncMethod, num_stages: int) -> None:
    """For ``schedule="pipedream"``: stages that step one after the other cannot wait for each other at every step.

    Raises:
        ConfigurationError: the policy groups pipelines whose stages have all stepped.
    """
    if method.policy.announces == "late" and num_stages > 1:
        raise ConfigurationError(
            f"{type(method.policy).__name__} groups pipelines all of whose stages have stepped, and with "
            f"schedule='pipedream' {num_stages} stages step one after the other: each would wait for the slowest in "
            "every update, at a third of the speed of AllReduce (simulated, and in 16 processes). Use a schedule with "
            "a flush, or SemiDecentralized."
        )


def refuse_in_step(sync: object, method: SyncMethod) -> None:
    """Raises ConfigurationError if pipelines that ``method`` synchronises cannot train batches by their speed."""
    if isinstance(method.policy, PHDPSGD) and method.policy.within == "gradients":
        raise ConfigurationError(
            f"data='dealt' does not go with sync={sync!r}: the pipelines of a group average gradients, so they train "
            "equally many batches. Use data='sharded', or SemiDecentralized or PartialReduce."
        )
    if _keeps_step(method, method.policy):
        raise ConfigurationError(
            f"data='dealt' does not go with sync={sync!r}, whose pipelines cannot leave and come back while others "
            "train. Use data='sharded', or a method whose pipelines run at their own speed: SemiDecentralized, "
            "PartialReduce, NoSync, or ADPSGD(asynchronous=True)."
        )


def on_hosts(method: SyncMethod, hosts: Sequence[str]) -> SyncMethod:
    """``method`` for pipelines that run on these ``hosts``, by number: PHD-PSGD's groups are those of a host where it
    was not told any, and who is near is who shares a host.

    Raises:
        ConfigurationError: hosts have different numbers of pipelines, and meetings are sharded.
    """
    policy = method.policy
    if isinstance(policy, SemiDecentralized) and policy.seating == "near":
        return ByPolicy(msgspec.structs.replace(policy, seating=hosts_as_groups(hosts)))
    if not isinstance(policy, PHDPSGD) or policy.groups != "auto" or policy.group_size is not None:
        return method
    groups = hosts_as_groups(hosts)
    if policy.sharded and policy.within == "gradients" and len({len(group) for group in groups}) > 1:
        raise ConfigurationError(
            f"sync=phd_psgd makes a group of the pipelines of each host, which are {[list(group) for group in groups]} "
            "here, and sharded meetings need groups of one size. Give sharded=False, a group_size, or groups."
        )
    if len(groups) == 1:
        rank_zero_info(
            f"sync=phd_psgd: all {len(hosts)} pipelines run on the same host and form one group, so {policy.within} "
            "are averaged over all of them and nobody meets others. For meetings give a group_size, or groups."
        )
    return ByPolicy(msgspec.structs.replace(policy, groups=groups))


def refuse_to_divide(sync: object, schedule: str, num_micro_batches: int) -> None:
    """Raises ConfigurationError if ``batch_by_speed=True`` has nothing to divide, or nobody to divide it among."""
    if not isinstance(sync, AllReduce):
        raise ConfigurationError(
            f"batch_by_speed=True does not go with sync={sync!r}, whose pipelines take no step together. Use "
            "sync=AllReduce(); with SemiDecentralized, PartialReduce, NoSync and ADPSGD(asynchronous=True), "
            "data='dealt' makes an epoch as fast as all pipelines together."
        )
    if schedule == "pipedream":
        raise ConfigurationError(
            "batch_by_speed=True does not go with schedule='pipedream', which does not split mini-batches. Use "
            "schedule='1f1b'."
        )
    if num_micro_batches == 1:
        raise ConfigurationError(
            "batch_by_speed=True divides micro-batches among the pipelines, and num_micro_batches is 1. Give more, for "
            "example num_micro_batches=8: with few of them, parts cannot follow the speeds."
        )


def deals(data: Literal["auto", "dealt", "sharded"], method: SyncMethod, num_pipelines: int, held: str | None) -> bool:
    """Do batches go to the pipelines by their speed, if the loader allows it?

    Args:
        data: the strategy's option.
        method: of synchronisation.
        num_pipelines: N.
        held: what the scheduler decides by, as JSON; a standing one may hold another policy than the method's.
    """
    if data != "auto":
        return data == "dealt"
    own = registry.name_of(method.policy)
    held_name = own if held is None else json.loads(held)["type"]
    policy = method.policy if held is None or own != held_name else registry.from_json(held)
    if num_pipelines == 1:
        reason = "there is one pipeline"
    elif own != held_name:
        reason = f"the scheduler decides by {held_name}, which may hold pipelines in step"
    elif _keeps_step(method, policy):
        reason = "those of this method cannot leave and come back while others train"
    elif isinstance(policy, SemiDecentralized) and policy.window == math.inf:
        reason = "all of them take every step together"
    elif not isinstance(policy, NoSync | SemiDecentralized | PartialReduce | ADPSGD):
        reason = "a policy of one's own may hold them in step; data='dealt' says that it does not"
    else:
        return True
    rank_zero_debug(f"Each pipeline trains its own shard: {reason}.")
    return False


def _keeps_step(method: SyncMethod, policy: PolicyConfig) -> bool:
    if isinstance(policy, ADPSGD):
        return not policy.asynchronous
    return not isinstance(method, ByPolicy) or isinstance(policy, LocalSGD | Decentralized | PHDPSGD)


def method_of(sync: SyncMethod | PolicyConfig | str) -> SyncMethod:
    """How ``sync`` is carried out: a method, the values of a policy, or the import path of a user's own.

    Raises:
        ConfigurationError: it is none of these, the scheduler's process could not make the policy, or workers cannot
            carry it out.
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
