"""Capabilities of the synchronisation methods: a row for each, and the one check that reads them.

Every cell is None, where the two go together, or an :class:`~lightning_sdpipe.sync.incompatible.Incompatible`. A
combination that does not go together is refused before any process has started, with the reason and with an
alternative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

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
from lightning_sdpipe.sync import incompatible as because
from lightning_sdpipe.sync.incompatible import Incompatible
from lightning_sdpipe.sync.synchronizer import SyncMethod

Needs = Literal["momentum", "half", "eight_bit", "feedback", "differences", "few_bits"]
"""Demands of a payload on a method: that it sends gradients, takes 16 or 8 bits, has a common reference to feed errors
back to, or one that messages are differences from, of so few bits."""


def _own_way(*values: str) -> Callable[[], dict[str, Incompatible]]:
    return lambda: dict.fromkeys(values, because.OWN_WAY)


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of a method. None means that it allows something, and so does a value that is missing from a
    mapping. By default it allows only what works without its knowledge, so a user's own method names what it has been
    made for.

    Args:
        payloads: demands of a payload that the method refuses.
        overlaps: values of ``Exchange(overlap=...)``.
        hierarchies: values of ``Exchange(hierarchy=...)``.
        schedules: schedules with more than one stage. ``"pipedream"`` is always refused for a policy that announces
            late.
        deals: ``data="dealt"``.
        deals_by_itself: whether ``data="auto"`` deals, where ``deals`` allows it; the reason goes to the log.
        divides: ``batch_by_speed=True``.
        elastic: a job in which pipelines come and go.
        elastic_payloads: demands of a payload that the method refuses in such a job.
        elastic_divides: ``batch_by_speed=True`` in such a job.
        elastic_overlaps: values of ``Exchange(overlap=...)`` that the method refuses in such a job.
        elastic_schedules: schedules in such a job. A policy that keeps replicas equal always refuses ``"pipedream"``.
        elastic_accumulates: ``accumulate_grad_batches`` above 1 in such a job, which such a policy always refuses.
        ragged: pipelines of unlike depths or cuts.
        ragged_exchange: exchanges other than ``Exchange()`` there; else only ``overlap="free"`` and
            ``hierarchy="hosts"`` are refused.
    """

    payloads: Mapping[str, Incompatible] = field(default_factory=_own_way(*get_args(Needs)))
    overlaps: Mapping[str, Incompatible] = field(default_factory=_own_way("step", "free"))
    hierarchies: Mapping[str, Incompatible] = field(default_factory=_own_way("hosts"))
    schedules: Mapping[str, Incompatible] = field(default_factory=dict)
    deals: Incompatible | None = because.STAYS
    deals_by_itself: Incompatible | None = None
    divides: Incompatible | None = because.ALONE
    elastic: Incompatible | None = because.WAITS
    elastic_payloads: Mapping[str, Incompatible] = field(
        default_factory=lambda: dict.fromkeys(get_args(Needs), because.NEWCOMERS)
    )
    elastic_divides: Incompatible | None = None
    elastic_overlaps: Mapping[str, Incompatible] = field(default_factory=dict)
    elastic_schedules: Mapping[str, Incompatible] = field(default_factory=dict)
    elastic_accumulates: Incompatible | None = None
    ragged: Incompatible | None = because.ONE_CUT
    ragged_exchange: Incompatible | None = None


_UNLIKE = {"free": because.UNLIKE_FREELY, "hosts": because.UNLIKE_HOSTS}
_COMMON = {"momentum": because.MOMENTA}
_SEVERAL = _COMMON | {"feedback": because.FEEDBACK, "differences": because.DIFFERENCES}

GRADIENTS = Capabilities(
    {},
    {"step": because.OLDER, "free": because.BEFORE_STEP},
    {},
    divides=None,
    elastic=None,
    elastic_payloads={"momentum": because.MEAN_MOMENTUM},
    ragged=None,
    ragged_exchange=because.UNLIKE_GRADIENTS,
)
EQUALLY = replace(GRADIENTS, elastic_divides=because.BY_SHARES)
BY_SAMPLES = replace(
    GRADIENTS,
    payloads=dict.fromkeys(get_args(Needs), because.WEIGHED),
    hierarchies={"hosts": because.WEIGHED},
    divides=because.DIVIDED,
)
OUTER = Capabilities(
    _COMMON,
    {"free": because.ROUNDS},
    {},
    elastic=None,
    elastic_payloads={},
    elastic_schedules={"pipedream": because.A_TURN_LATER},
)
WHOLE = replace(OUTER, hierarchies={"hosts": because.HALF_A_HOST})
_EVERYBODY = Capabilities(_COMMON, {}, {}, elastic=None, ragged=None)
_RING = Capabilities(
    _COMMON | {"few_bits": because.FEW_BITS},
    {},
    {"hosts": because.ADDS_NOTHING},
    elastic=None,
    elastic_payloads={},
    ragged=None,
)
_NEIGHBOURS = replace(
    _RING, payloads=_SEVERAL, hierarchies={"hosts": because.PAIRS}, elastic_overlaps={"free": because.PAIRS_BY_NUMBER}
)
_GROUPS = Capabilities(
    _SEVERAL, {"free": because.CHANGES}, {}, deals=None, elastic=None, elastic_payloads={}, ragged=None
)
_FREE_PAIRS = Capabilities(
    _SEVERAL, {"free": because.NO_WAIT}, {"hosts": because.PAIRS}, deals=None, elastic=None, elastic_payloads={}
)
_MEETINGS = Capabilities(
    dict.fromkeys(get_args(Needs), because.EQUAL_MEMBERS),
    {"step": because.MEET_LATER, "free": because.MEET_FREELY},
    {"hosts": because.OWN_HIERARCHY},
    deals=because.EQUALLY_MANY,
    elastic=because.HELD_UP,
)


def of_policy(policy: PolicyConfig) -> Capabilities:
    """Return the row of a policy by which the scheduler decides."""
    match policy:
        case NoSync():
            return Capabilities(deals=None, elastic=None, ragged=None)
        case SemiDecentralized():
            return replace(_GROUPS, deals_by_itself=because.TOGETHER if policy.window == math.inf else None)
        case PartialReduce():
            return _GROUPS
        case LocalSGD(every):
            return _EVERYBODY if every == 1 else replace(_EVERYBODY, overlaps={"free": because.EVERY})
        case Decentralized(peers, every):
            row = _RING if peers == "ring" else _NEIGHBOURS
            return row if every == 1 else replace(row, overlaps={"free": because.EVERY})
        case ADPSGD(asynchronous=True):
            return _FREE_PAIRS
        case ADPSGD():
            return replace(_GROUPS, hierarchies={"hosts": because.PAIRS}, deals=because.STAYS)
        case PHDPSGD(within="models"):
            by_machine = because.BY_MACHINE if policy.groups == "auto" and policy.group_size is None else None
            return replace(_GROUPS, deals=because.STAYS, ragged=because.ONE_CUT, elastic=by_machine)
        case PHDPSGD():
            return _MEETINGS
        case _:
            return replace(_GROUPS, deals_by_itself=because.UNKNOWN)


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


def check(method: SyncMethod, asked: Combination) -> None:
    """Refuse a combination that does not go with ``method``.

    Raises:
        ConfigurationError: the combination is not allowed; the message says what was asked, why it is refused, and what
            to do instead.
    """
    for said, cell in cells(capabilities_of(method), asked):
        if cell is not None:
            raise ConfigurationError(f"{said}: {cell.why}. {cell.instead}.")


def capabilities_of(method: SyncMethod) -> Capabilities:
    """Return the row of ``method``: its attribute ``capabilities``, which a user's own method may have, too."""
    row: Capabilities = getattr(method, "capabilities", Capabilities())
    late = {"pipedream": because.LATE} if method.policy.announces == "late" else {}
    row = replace(row, schedules={**late, **row.schedules})
    elastic: PolicyConfig = getattr(method, "elastic_policy", method.policy)
    if not elastic.keeps_equal:
        return row
    accumulates = row.elastic_accumulates or because.SEVERAL_BATCHES
    schedules = {"pipedream": because.NO_TURN, **row.elastic_schedules}
    return replace(row, elastic_schedules=schedules, elastic_accumulates=accumulates)


def cells(row: Capabilities, asked: Combination) -> Iterator[tuple[str, Incompatible | None]]:
    """Yield what was asked, and the cell of the row that answers it."""
    exchange, elastic = asked.exchange, f"sync={asked.sync!r} does not work in an elastic job (SDPIPE_PIPELINE is set)"

    def with_method(asks: str) -> str:
        return f"{asks} does not go with sync={asked.sync!r}"

    for need in _needs(exchange.payload):
        yield with_method(f"exchange={exchange}"), row.payloads.get(need)
    yield with_method(f"exchange={exchange}"), row.overlaps.get(exchange.overlap)
    yield with_method(f"exchange={exchange}"), row.hierarchies.get(exchange.hierarchy)
    if asked.unlike:
        yield with_method(f"num_stages={list(asked.unlike)} with unlike cuts"), row.ragged
        with_unlike = f"exchange={exchange} does not go with num_stages={list(asked.unlike)} with unlike cuts"
        if exchange != Exchange():
            yield with_unlike, row.ragged_exchange
        yield with_unlike, _UNLIKE.get(exchange.overlap) or _UNLIKE.get(exchange.hierarchy)
    if asked.num_stages > 1:
        said = f"schedule={asked.schedule!r} with num_stages={asked.num_stages}"
        yield with_method(said), row.schedules.get(asked.schedule)
    if asked.dealt:
        yield with_method("data='dealt'"), row.deals
    if asked.batch_by_speed:
        yield with_method("batch_by_speed=True"), row.divides
    if asked.elastic:
        yield elastic, row.elastic
        for need in _needs(exchange.payload):
            yield f"exchange={exchange} with {elastic}", row.elastic_payloads.get(need)
        yield f"exchange={exchange} with {elastic}", row.elastic_overlaps.get(exchange.overlap)
        yield f"schedule={asked.schedule!r} with {elastic}", row.elastic_schedules.get(asked.schedule)
        if asked.accumulate_grad_batches > 1:
            said = f"accumulate_grad_batches={asked.accumulate_grad_batches} with {elastic}"
            yield said, row.elastic_accumulates
        if asked.batch_by_speed:
            yield f"batch_by_speed=True with {elastic}", row.elastic_divides
            yield f"batch_by_speed=True with {elastic}", None if exchange.is_plain else because.SHARES_IN_FULL


def _needs(payload: Payload) -> Iterator[Needs]:
    if payload.momentum:
        yield "momentum"
    match payload:
        case Full():
            pass
        case Half():
            yield "half"
        case EightBit():
            yield "eight_bit"
            if payload.feedback or payload.rounding != "nearest":
                yield "feedback"
        case _:
            yield "differences"
            if isinstance(payload, OneBit):
                yield "few_bits"
