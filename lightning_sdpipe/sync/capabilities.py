"""Table of what goes together: plain sets of what each method takes, and one sentence for each dimension.

What a method does not take is refused before any process has started, with the dimension's sentence, what the method
takes instead, and the methods that take all of what was asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.exchange.payloads import EightBit, Full, Half, OneBit
from lightning_sdpipe.exchange.payloads.payload import Payload
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.decentralized import Decentralized
from lightning_sdpipe.policies.local_sgd import LocalSGD, NoSync
from lightning_sdpipe.policies.partial_reduce import PartialReduce
from lightning_sdpipe.policies.phd_psgd import PHDPSGD
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.sync.synchronizer import SyncMethod

Dimension = Literal["payloads", "overlaps", "hierarchies", "schedules", "data", "batches", "unlike", "elastic"]

SENTENCES: Mapping[Dimension, str] = {
    "payloads": "how few bits a message may have depends on what its members have in common: sums of gradients and "
    "changes of a common base take all payloads (momenta are sent in place of gradients only), rings 8 bits, groups "
    "and pairs that change 8 bits without feedback, and methods that move tensors in their own way none",
    "overlaps": "models can be averaged beside the next mini-batch, and at a pace of their own where all or fixed "
    "neighbours average after each update; gradients are needed before the step, and meetings and rounds are part of "
    "one",
    "hierarchies": "machines can average first where all of their pipelines add up alike: not in pairs, in rings, in "
    "sums by samples, or in a way of one's own",
    "schedules": "without a flush the stages of a pipeline step one after the other, so that groups of whole pipelines "
    "would wait for the slowest of all in each update, and rounds of pipelines that come and go would have no common "
    "turn",
    "data": "batches are dealt by speed to pipelines that may leave their groups and come back while others train, and "
    "a joint batch is divided among pipelines that take each step together and count gradients by samples",
    "batches": "a pipeline that is lost would take the gradients of several batches with it",
    "unlike": "pipelines that are cut unlike have replicas of sections of the chain, and none of their stages",
    "elastic": "an exchange must go on without members that are lost, and newcomers must get what members have in "
    "common",
}
"""Reasons why a method does not take everything in a dimension."""

WORDS: Mapping[Dimension, Mapping[str, str]] = {
    "payloads": {
        "full": "Full()",
        "half": "Half()",
        "eight_bit": "EightBit()",
        "feedback": "EightBit(feedback=True)",
        "one_bit": "OneBit()",
        "momentum": "OneBit(momentum=…)",
    },
    "overlaps": {"none": "overlap='none'", "step": "overlap='step'", "free": "overlap='free'"},
    "hierarchies": {"flat": "hierarchy='flat'", "hosts": "hierarchy='hosts'"},
    "schedules": {"flush": "schedule='1f1b'", "pipedream": "schedule='pipedream'"},
    "data": {"sharded": "data='sharded' without batch_by_speed", "dealt": "data='dealt'"},
    "batches": {"one": "accumulate_grad_batches=1"},
}
"""Values of the dimensions in the words of users. Payloads of one's own count as ``"feedback"``."""

_FULL, _CHANGING = frozenset({"full"}), frozenset({"full", "half", "eight_bit"})
_RING = _CHANGING | {"feedback"}
_BASES = _RING | {"one_bit"}
_AT_ONCE, _BESIDE = frozenset({"none"}), frozenset({"none", "step"})
_FREELY = _BESIDE | {"free"}
_FLAT, _HOSTS = frozenset({"flat"}), frozenset({"flat", "hosts"})
_FLUSH = frozenset({"flush"})
_SHARDED = frozenset({"sharded"})
_ASKED = _SHARDED | {"dealt"}
_DEALT = _ASKED | {"auto"}
_LIKE: Mapping[Dimension, Set[str]] = {"overlaps": _BESIDE, "hierarchies": _FLAT}


@dataclass(frozen=True)
class Capabilities:
    """What a method takes. By default it takes only what works without its knowledge, so a user's own method names what
    it has been made for.

    Args:
        payloads: of ``"full"``, ``"half"``, ``"eight_bit"``, ``"feedback"`` (8 bits with error feedback or stochastic
            rounding, and payloads of one's own), ``"one_bit"`` and ``"momentum"``.
        overlaps: values of ``Exchange(overlap=...)``.
        hierarchies: values of ``Exchange(hierarchy=...)``.
        schedules: of ``"flush"`` and ``"pipedream"``, with several stages. A policy that announces late takes only the
            first.
        data: of ``"sharded"``, ``"dealt"`` (if users ask for it), ``"auto"`` (by itself) and ``"by_speed"``
            (``batch_by_speed=True``).
        batches: of ``"one"`` and ``"several"`` batches of an update.
        unlike: pipelines that are cut unlike: the smaller sets that hold there, by dimension; None to take none.
        elastic: the same for a job in which pipelines come and go.
    """

    payloads: Set[str] = _FULL
    overlaps: Set[str] = _AT_ONCE
    hierarchies: Set[str] = _FLAT
    schedules: Set[str] = frozenset({"flush", "pipedream"})
    data: Set[str] = _SHARDED
    batches: Set[str] = frozenset({"one", "several"})
    unlike: Mapping[Dimension, Set[str]] | None = None
    elastic: Mapping[Dimension, Set[str]] | None = None


GRADIENTS = Capabilities(
    _BASES | {"momentum"},
    hierarchies=_HOSTS,
    data=_SHARDED | {"by_speed"},
    unlike={"payloads": _FULL, "hierarchies": _FLAT},
    elastic={"payloads": _BASES},
)
EQUALLY = replace(GRADIENTS, elastic={"payloads": _BASES, "data": _SHARDED})
BY_SAMPLES = replace(GRADIENTS, payloads=_FULL, hierarchies=_FLAT, data=_SHARDED)
OUTER = Capabilities(_BASES, _BESIDE, _HOSTS, elastic={"schedules": _FLUSH})
_GROUPS = Capabilities(_CHANGING, _BESIDE, _HOSTS, data=_DEALT, unlike=_LIKE, elastic={})


def of_policy(policy: PolicyConfig) -> Capabilities:
    """Return the row of a policy by which the scheduler decides."""
    match policy:
        case NoSync():
            return Capabilities(data=_DEALT, unlike={}, elastic={})
        case SemiDecentralized():
            return replace(_GROUPS, data=_ASKED) if policy.window == math.inf else _GROUPS
        case PartialReduce():
            return _GROUPS
        case LocalSGD(every):
            overlaps = _FREELY if every == 1 else _BESIDE
            return Capabilities(_BASES, overlaps, _HOSTS, unlike=_LIKE, elastic={"payloads": _FULL})
        case Decentralized("ring", every):
            return Capabilities(_RING, _FREELY if every == 1 else _BESIDE, unlike=_LIKE, elastic={})
        case Decentralized(_, every):  # a newcomer cannot know the number of the average by which pairs meet freely
            overlaps = _FREELY if every == 1 else _BESIDE
            return Capabilities(_CHANGING, overlaps, unlike=_LIKE, elastic={"overlaps": _BESIDE})
        case ADPSGD(asynchronous=True):
            return Capabilities(_CHANGING, _BESIDE, data=_DEALT, elastic={})
        case ADPSGD():
            return replace(_GROUPS, hierarchies=_FLAT, data=_SHARDED)
        case PHDPSGD(within="models"):
            by_machine = policy.groups == "auto" and policy.group_size is None  # which newcomers' are not known
            return replace(_GROUPS, data=_SHARDED, unlike=None, elastic=None if by_machine else {})
        case PHDPSGD():
            return Capabilities()
        case _:
            return replace(_GROUPS, data=_ASKED)


@dataclass(frozen=True)
class Combination:
    """The options of a run that not every method goes with, and ``sync`` as it was given."""

    sync: SyncMethod | PolicyConfig | str
    exchange: Exchange = field(default_factory=Exchange)
    schedule: str = "1f1b"
    num_stages: int = 1
    dealt: bool = False
    batch_by_speed: bool = False
    elastic: bool = False
    accumulate_grad_batches: int = 1
    unlike: Sequence[int] = ()
    """Depths of the pipelines, if these are cut unlike."""


class Refusal(NamedTuple):
    """What was asked and does not go together, the dimension whose sentence says why, and the values of
    ``dimension`` that do."""

    said: str
    why: Dimension
    dimension: Dimension
    takes: Set[str] = frozenset()


def check(method: SyncMethod, asked: Combination) -> None:
    """Refuse a combination that does not go with ``method``.

    Raises:
        ConfigurationError: the combination is not allowed; the message says what was asked, why it is refused, and what
            to do instead.
    """
    for said, why, dimension, takes in refusals(capabilities_of(method), asked):
        values = [words for value, words in WORDS.get(dimension, {}).items() if value in takes]
        use = [" or ".join(values)] if values else []
        if others := alternatives(asked):
            use.append(f"sync={', '.join(others)}")
        raise ConfigurationError(f"{said}: {SENTENCES[why]}. Use {', or '.join(use) or 'one or the other'}.")


def alternatives(asked: Combination) -> list[str]:
    """Return the methods that take all of what was asked, in the words that make them."""
    known: dict[str, Capabilities] = {
        "AllReduce()": _of_rounds(GRADIENTS),
        "SemiDecentralized()": capabilities_of(SemiDecentralized()),
        "PartialReduce()": capabilities_of(PartialReduce()),
        "LocalSGD(every=1)": capabilities_of(LocalSGD(every=1)),
        "LocalSGD(every=8)": capabilities_of(LocalSGD(every=8)),
        "DiLoCo()": OUTER,
        "Decentralized()": capabilities_of(Decentralized()),
        "ADPSGD()": capabilities_of(ADPSGD()),
        "ADPSGD(asynchronous=True)": capabilities_of(ADPSGD(asynchronous=True)),
        "PHDPSGD(within='models', group_size=2)": capabilities_of(PHDPSGD(within="models", group_size=2)),
        "NoSync()": capabilities_of(NoSync()),
    }
    return [words for words, row in known.items() if not any(refusals(row, asked))]


def _of_rounds(row: Capabilities) -> Capabilities:
    """Return the row of a method whose replicas are equal after every round: no member of one may be a turn behind."""
    if row.elastic is None:
        return row
    return replace(row, elastic={"schedules": _FLUSH, "batches": frozenset({"one"}), **row.elastic})


def capabilities_of(method: SyncMethod | PolicyConfig) -> Capabilities:
    """Return the row of ``method``: its attribute ``capabilities``, which a user's own method may have, too."""
    policy = method if isinstance(method, PolicyConfig) else method.policy
    row = of_policy(policy) if method is policy else getattr(method, "capabilities", Capabilities())
    if policy.announces == "late":
        row = replace(row, schedules=row.schedules & _FLUSH)
    elastic: PolicyConfig = getattr(method, "elastic_policy", policy)
    return _of_rounds(row) if elastic.keeps_equal else row


def refusals(row: Capabilities, asked: Combination) -> Iterator[Refusal]:
    """Yield what was asked and is not in the row's sets."""
    exchange, method, job = asked.exchange, f"sync={asked.sync!r}", "in an elastic job (SDPIPE_PIPELINE is set)"
    depths = f"num_stages={list(asked.unlike)} with unlike cuts"
    flushes = "pipedream" if asked.schedule == "pipedream" else "flush"
    several = "one" if asked.accumulate_grad_batches == 1 else "several"
    demands: list[tuple[Dimension, str, str]] = [
        ("payloads", _kind(exchange.payload), f"exchange={exchange}"),
        ("overlaps", exchange.overlap, f"exchange={exchange}"),
        ("hierarchies", exchange.hierarchy, f"exchange={exchange}"),
        ("schedules", flushes, f"schedule={asked.schedule!r} with num_stages={asked.num_stages}"),
        ("batches", several, f"accumulate_grad_batches={asked.accumulate_grad_batches}"),
    ]
    demands += [("data", "dealt", "data='dealt'")] * asked.dealt
    demands += [("data", "by_speed", "batch_by_speed=True")] * asked.batch_by_speed
    for dimension, value, what in demands:
        takes: Set[str] = getattr(row, dimension)
        if value not in takes and not (dimension == "schedules" and asked.num_stages == 1):
            yield Refusal(f"{what} does not go with {method}", dimension, dimension, takes)
    if asked.unlike and row.unlike is None:
        yield Refusal(f"{depths} does not go with {method}", "unlike", "unlike")
    if asked.elastic and row.elastic is None:
        yield Refusal(f"{method} does not work {job}", "elastic", "elastic")
    for dimension, value, what in demands:
        if asked.unlike and value not in (takes := (row.unlike or {}).get(dimension, {value})):
            yield Refusal(f"{what} does not go with {method} and {depths}", "unlike", dimension, takes)
        if asked.elastic and value not in (takes := (row.elastic or {}).get(dimension, {value})):
            why: Dimension = "elastic" if dimension in ("payloads", "overlaps") else dimension
            yield Refusal(f"{what} with {method} does not work {job}", why, dimension, takes)
    if asked.elastic and asked.batch_by_speed and not exchange.is_plain:
        yield Refusal(f"batch_by_speed=True with exchange={exchange} does not work {job}", "data", "data", _SHARDED)


def _kind(payload: Payload) -> str:
    if payload.momentum:
        return "momentum"
    match payload:
        case Full():
            return "full"
        case Half():
            return "half"
        case EightBit(feedback=False, rounding="nearest"):
            return "eight_bit"
        case OneBit():
            return "one_bit"
        case _:
            return "feedback"
