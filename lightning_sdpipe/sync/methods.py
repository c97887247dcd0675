"""Synchronisation methods that a user chooses from: values, checked when they are made.

Methods that average models are the values of a policy; :func:`method_of` gives each policy, also a user's own, the
worker's half that carries its decisions out.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Literal

from lightning_utilities.core.rank_zero import rank_zero_debug

from lightning_sdpipe.errors import ConfigurationError, check_choices, check_number
from lightning_sdpipe.exchange.moving import Mover
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.all_reduce import AllPresent
from lightning_sdpipe.policies.built_in import METHODS as BY_POLICY
from lightning_sdpipe.policies.capabilities import BY_SAMPLES, EQUALLY, GRADIENTS
from lightning_sdpipe.policies.decentralized import Decentralized
from lightning_sdpipe.policies.local_sgd import LocalSGD, NoSync
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.sync.background_averaging import AsynchronousPairs, FreeAveraging
from lightning_sdpipe.sync.capabilities import SENTENCES, Capabilities, Combination, capabilities_of, refusals
from lightning_sdpipe.sync.diloco import DiLoCo
from lightning_sdpipe.sync.gradient_averaging import GradientAveraging
from lightning_sdpipe.sync.model_averaging import ModelAveraging
from lightning_sdpipe.sync.mover_choice import Begin, mover_among_all, mover_among_groups, mover_in_a_ring
from lightning_sdpipe.sync.present_averaging import PresentAveraging
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

    registered: ClassVar[str] = "all_reduce"
    forms: ClassVar[tuple[Mapping[str, Any], ...]] = ({}, {"weights": "samples"})
    bucket_mib: float = 25.0
    weights: Literal["samples", "equal"] | None = None

    def __post_init__(self) -> None:
        check_number("bucket_mib", self.bucket_mib, "MiB above 0", above=0)
        check_choices(self)

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
        size = int(self.bucket_mib * 2**20)
        if replica.peers is not None:
            by_samples = self.weights == "samples" or (self.weights is None and replica.exchange.is_plain)
            return PresentAveraging(replica, replica.peers, size, by_samples)
        return GradientAveraging(replica, size, self.weights == "samples")


@dataclass(frozen=True)
class ByPolicy:
    """A method whose groups the scheduler decides by ``policy``, with the worker's half that carries them out."""

    policy: PolicyConfig

    @property
    def capabilities(self) -> Capabilities:
        return self.policy.capabilities

    def build(self, replica: Replica) -> Synchronizer:
        module, _, name = self.policy.half.partition(":")
        half: Synchronizer = getattr(import_module(module), name)(replica, self.policy)
        return half


def alone(replica: Replica, policy: NoSync) -> Synchronizer:
    """Return the half that never synchronises."""
    return Synchronizer(replica)


def among_all(replica: Replica, policy: LocalSGD) -> Synchronizer:
    """Return the half that averages models with all replicas."""
    return _averaging(replica, policy.every, *mover_among_all(replica))


def in_a_ring(replica: Replica, policy: Decentralized) -> Synchronizer:
    """Return the half that averages models with two neighbours."""
    return _averaging(replica, policy.every, *mover_in_a_ring(replica))


def in_pairs(replica: Replica, policy: Decentralized) -> Synchronizer:
    """Return the half that averages models with a partner, which depends on the number of the round."""
    return _averaging(replica, policy.every, mover_among_groups(replica), None)


def asynchronously(replica: Replica, policy: ADPSGD) -> Synchronizer:
    """Return the half that averages models with a neighbour that goes on training."""
    return AsynchronousPairs(replica)


def _averaging(replica: Replica, every: int, mover: Mover, begin: Begin | None) -> Synchronizer:
    if replica.exchange.overlap == "free":
        return FreeAveraging(replica, mover, begin)
    return ModelAveraging(replica, every, mover, begin)


METHODS: tuple[Any, ...] = (AllReduce, *BY_POLICY, DiLoCo)
"""All methods, in the order in which they are offered."""


def examples() -> list[Any]:
    """Return an example of each form of each method, from which the tables of the documentation and tests are made."""
    return [kind(**values) for kind in METHODS for values in kind.forms]


def check(method: SyncMethod, asked: Combination) -> None:
    """Refuse a combination that does not go with ``method``.

    Raises:
        ConfigurationError: the combination is not allowed; the message says what was asked, why it is refused, and what
            to do instead.
    """
    for refused in refusals(capabilities_of(method), asked):
        use = [" or ".join(refused.words)] if refused.words else []
        if others := alternatives(asked):
            use.append(f"sync={', '.join(others)}")
        instead = ", or ".join(use) or "one or the other"
        raise ConfigurationError(f"{refused.said}: {SENTENCES[refused.why]}. Use {instead}.")


def alternatives(asked: Combination) -> list[str]:
    """Return the methods that take all of what was asked, as Python expressions."""
    found: dict[type, str] = {}
    for each in examples():
        if not any(refusals(capabilities_of(each), asked)):
            found.setdefault(type(each), in_words(each))
    return [*found.values()]


def in_words(method: SyncMethod | PolicyConfig) -> str:
    """Return the Python expression that makes ``method``, such as ``LocalSGD(every=8)``."""
    parameters = inspect.signature(type(method)).parameters.values()
    given = {each.name: getattr(method, each.name) for each in parameters}
    off = [f"{each.name}={given[each.name]!r}" for each in parameters if given[each.name] != each.default]
    return f"{type(method).__name__}({', '.join(off)})"


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

    In an elastic run ``LocalSGD`` with a payload is carried out as ``DiLoCo`` with ``lr=1, momentum=0``, which computes
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
