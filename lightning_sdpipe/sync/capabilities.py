"""Capabilities of the synchronisation methods: a row for each, and the one check that reads them.

Every cell is None, where the two go together, or an :class:`Incompatible`. A combination that does not go together is
refused before any process has started, with the reason and with an alternative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.exchange.payloads import EightBit, Full, Half, OneBit, TopK
from lightning_sdpipe.exchange.payloads.payload import Payload
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.decentralized import Decentralized
from lightning_sdpipe.policies.local_sgd import LocalSGD, NoSync
from lightning_sdpipe.policies.partial_reduce import PartialReduce
from lightning_sdpipe.policies.phd_psgd import PHDPSGD
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.sync.synchronizer import SyncMethod

Needs = Literal["momentum", "half", "eight_bit", "feedback", "differences", "few_bits"]
"""Demands of a payload on a method: that it sends gradients, takes 16 or 8 bits, has a common reference to feed errors
back to, or one that messages are differences from, of so few bits."""


@dataclass(frozen=True)
class Incompatible:
    """The reason why two things do not go together, as half a sentence, and what to do ``instead``, as a sentence."""

    why: str
    instead: str


_OWN_WAY = Incompatible(
    "it moves tensors in its own way, or none",
    "Leave exchange out, or use a method that averages, such as SemiDecentralized(), LocalSGD(every=8) or AllReduce()",
)
_MOMENTA = Incompatible("momenta take the place of gradients", "Use sync=AllReduce(), or momentum=0")
_FEEDBACK = Incompatible(
    "its members have no common reference to feed errors back to, and keep what a message left out themselves",
    "Use feedback=False, rounding='nearest'",
)
_DIFFERENCES = Incompatible(
    "its members have no common reference that so few bits could be differences from",
    "Use EightBit() or Half(), or LocalSGD, DiLoCo or AllReduce, whose members have one",
)
_FEW_BITS = Incompatible(
    "what so few bits leave out made models of a ring grow apart",
    "Use EightBit() or Half(), or LocalSGD, DiLoCo or AllReduce",
)
_OLDER = Incompatible(
    "gradients travel while the backward goes on anyway, and a mean that came one step later would be of an older "
    "model",
    "Leave overlap out, or average models with LocalSGD(every=1), which takes overlap='step'",
)
_BEFORE_STEP = Incompatible(
    "gradients are needed before the step", "Average models with LocalSGD(every=1), which takes overlap='free'"
)
_CHANGES = Incompatible(
    "its groups change with every update",
    "Use overlap='step'; LocalSGD(every=1) and Decentralized() can average freely",
)
_NO_WAIT = Incompatible("neighbours are not waited for in any case", "Use overlap='step', which hides the transfer too")
_ROUNDS = Incompatible(
    "rounds are common to all workers", "Use overlap='step', or delay= to hide more updates behind them"
)
_EVERY = Incompatible("a thread that averages at its own pace has no use for every=", "Use overlap='step', or every=1")
_MEET_LATER = Incompatible(
    "a meeting is part of a step", "To hide meetings behind the next step use PHDPSGD(asynchronous=True)"
)
_MEET_FREELY = Incompatible("a meeting is part of a step", "To let no pipeline wait use PHDPSGD(asynchronous=True)")
_PAIRS = Incompatible(
    "a pair exchanges one message each way, of which a hierarchy saves nothing", "Use hierarchy='flat'"
)
_ADDS_NOTHING = Incompatible(
    "a ring adds up nothing that a machine could add up first", "Use hierarchy='flat', or LocalSGD(every=1)"
)
_HALF_A_HOST = Incompatible(
    "a round by quorum may have one pipeline of a machine and not the others", "Use hierarchy='flat', or quorum=None"
)
_OWN_HIERARCHY = Incompatible(
    "its groups are a hierarchy", "Use hierarchy='flat', and a group for each host, as without group_size"
)
_LATE = Incompatible(
    "it groups pipelines all of whose stages have stepped, and without a flush stages step one after the other: each "
    "would wait for the slowest in every update, at a third of the speed of AllReduce (simulated, and in 16 processes)",
    "Use a schedule with a flush, or SemiDecentralized",
)
_STAYS = Incompatible(
    "its pipelines cannot leave and come back while others train",
    "Use data='sharded', or a method whose pipelines run at their own speed: SemiDecentralized, PartialReduce, NoSync, "
    "or ADPSGD(asynchronous=True)",
)
_EQUALLY_MANY = Incompatible(
    "the pipelines of a group average gradients, so they train equally many batches",
    "Use data='sharded', or SemiDecentralized or PartialReduce",
)
_UNKNOWN = Incompatible("a policy of one's own may hold them in step", "Use data='dealt', which says that it does not")
_TOGETHER = Incompatible("all of them take every step together", "Use a finite window, or data='dealt'")
_ALONE = Incompatible(
    "its pipelines take no step together",
    "Use sync=AllReduce(); with SemiDecentralized, PartialReduce, NoSync and ADPSGD(asynchronous=True), data='dealt' "
    "makes an epoch as fast as all pipelines together",
)
_WAITS = Incompatible(
    "its exchanges would wait for all pipelines, or for ones that may be gone",
    "Use SemiDecentralized(), PartialReduce(), LocalSGD(every=...), DiLoCo(), ADPSGD(), AllReduce() or NoSync()",
)
_HELD_UP = Incompatible(
    "the pipelines of a group average gradients, and none could take a step without one that may be gone",
    "Use PHDPSGD(within='models'), which averages their models after each step instead",
)
_UNPLACED = Incompatible(
    "seating='near' asks on which machine each pipeline runs, and that of later ones is not known",
    "List the pipelines that are near each other, as in seating=[[0, 1], [2, 3]]",
)
_MEAN_MOMENTUM = Incompatible(
    "messages add to the mean momentum of all rounds before, which newcomers lack",
    "Use momentum=0, which sends gradients with error feedback",
)
_WEIGHED = Incompatible(
    "gradients that count by samples are added up in full, on the way from each pipeline to all",
    "Use AllReduce(weights='equal'), or leave exchange out",
)
_DIVIDED = Incompatible(
    "batch_by_speed weighs gradients by samples already", "Use AllReduce(weights='equal'), or leave weights out"
)
_NEWCOMERS = Incompatible(
    "its members need a common model, which newcomers lack",
    "Use SemiDecentralized() or PartialReduce(), or send in full",
)

_ONE_CUT = Incompatible(
    "it needs pipelines of one depth and cut",
    "Use SemiDecentralized(), PartialReduce(), LocalSGD(every=...), ADPSGD(), Decentralized(), AllReduce(), NoSync(), "
    "or one number of stages, and one partition, for all pipelines",
)
_UNLIKE_FREELY = Incompatible(
    "a thread that averages at its own pace knows the replicas of a stage only", "Use overlap='step'"
)
_UNLIKE_HOSTS = Incompatible("machines are told apart among the replicas of a stage only", "Use hierarchy='flat'")
_UNLIKE_GRADIENTS = Incompatible("gradients of sections are averaged in full, in flat groups", "Leave exchange out")


def _own_way(*values: str) -> Callable[[], dict[str, Incompatible]]:
    return lambda: dict.fromkeys(values, _OWN_WAY)


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
        elastic_payloads: demands of a payload that are refused in such a job.
        ragged: pipelines of unlike depths or cuts.
        ragged_exchange: exchanges other than ``Exchange()`` there; else only ``overlap="free"`` and
            ``hierarchy="hosts"`` are refused.
    """

    payloads: Mapping[str, Incompatible] = field(default_factory=_own_way(*get_args(Needs)))
    overlaps: Mapping[str, Incompatible] = field(default_factory=_own_way("step", "free"))
    hierarchies: Mapping[str, Incompatible] = field(default_factory=_own_way("hosts"))
    schedules: Mapping[str, Incompatible] = field(default_factory=dict)
    deals: Incompatible | None = _STAYS
    deals_by_itself: Incompatible | None = None
    divides: Incompatible | None = _ALONE
    elastic: Incompatible | None = _WAITS
    elastic_payloads: Mapping[str, Incompatible] = field(
        default_factory=lambda: dict.fromkeys(get_args(Needs), _NEWCOMERS)
    )
    ragged: Incompatible | None = _ONE_CUT
    ragged_exchange: Incompatible | None = None


_UNLIKE = {"free": _UNLIKE_FREELY, "hosts": _UNLIKE_HOSTS}
_COMMON = {"momentum": _MOMENTA}
_SEVERAL = _COMMON | {"feedback": _FEEDBACK, "differences": _DIFFERENCES}

GRADIENTS = Capabilities(
    {},
    {"step": _OLDER, "free": _BEFORE_STEP},
    {},
    divides=None,
    elastic=None,
    elastic_payloads={"momentum": _MEAN_MOMENTUM},
    ragged=None,
    ragged_exchange=_UNLIKE_GRADIENTS,
)
BY_SAMPLES = replace(
    GRADIENTS,
    payloads=dict.fromkeys(get_args(Needs), _WEIGHED),
    hierarchies={"hosts": _WEIGHED},
    divides=_DIVIDED,
)
OUTER = Capabilities(_COMMON, {"free": _ROUNDS}, {}, elastic=None, elastic_payloads={})
WHOLE = replace(OUTER, hierarchies={"hosts": _HALF_A_HOST})
_EVERYBODY = Capabilities(_COMMON, {}, {}, elastic=None, ragged=None)
_RING = Capabilities(_COMMON | {"few_bits": _FEW_BITS}, {}, {"hosts": _ADDS_NOTHING}, ragged=None)
_NEIGHBOURS = Capabilities(_SEVERAL, {}, {"hosts": _PAIRS}, ragged=None)
_GROUPS = Capabilities(_SEVERAL, {"free": _CHANGES}, {}, deals=None, elastic=None, elastic_payloads={}, ragged=None)
_FREE_PAIRS = Capabilities(_SEVERAL, {"free": _NO_WAIT}, {"hosts": _PAIRS}, deals=None)
_WHOLE_GROUPS = Capabilities(deals=_EQUALLY_MANY, elastic=_HELD_UP)
_MEETINGS = replace(
    _WHOLE_GROUPS,
    payloads=_SEVERAL,
    overlaps={"step": _MEET_LATER, "free": _MEET_FREELY},
    hierarchies={"hosts": _OWN_HIERARCHY},
)


def of_policy(policy: PolicyConfig) -> Capabilities:
    """Returns the row of a policy by which the scheduler decides."""
    match policy:
        case NoSync():
            return Capabilities(deals=None, elastic=None, ragged=None)
        case SemiDecentralized(seating="near"):
            return replace(_GROUPS, elastic=_UNPLACED)
        case SemiDecentralized():
            return replace(_GROUPS, deals_by_itself=_TOGETHER if policy.window == math.inf else None)
        case PartialReduce():
            return _GROUPS
        case LocalSGD(every):
            return _EVERYBODY if every == 1 else replace(_EVERYBODY, overlaps={"free": _EVERY})
        case Decentralized(peers, every):
            row = _RING if peers == "ring" else _NEIGHBOURS
            return row if every == 1 else replace(row, overlaps={"free": _EVERY})
        case ADPSGD(asynchronous=True):
            return _FREE_PAIRS
        case ADPSGD():
            return replace(_GROUPS, hierarchies={"hosts": _PAIRS}, deals=_STAYS)
        case PHDPSGD(within="models"):
            return replace(_GROUPS, deals=_STAYS, ragged=_ONE_CUT)
        case PHDPSGD():
            return _MEETINGS if policy.sharded else _WHOLE_GROUPS
        case _:
            return replace(_GROUPS, deals_by_itself=_UNKNOWN)


@dataclass(frozen=True)
class Combination:
    """The options of a run that not every method goes with, and ``sync`` as it was given."""

    sync: object
    exchange: Exchange = field(default_factory=Exchange)
    schedule: str = "1f1b"
    num_stages: int = 1
    dealt: bool = False
    batch_by_speed: bool = False
    elastic: bool = False
    unlike: Sequence[int] = ()
    """Depths of the pipelines, if these are cut unlike."""


def check(method: SyncMethod, asked: Combination) -> None:
    """Refuses a combination that does not go with ``method``.

    Raises:
        ConfigurationError: the combination is not allowed; the message says what was asked, why it is refused, and what
            to do instead.
    """
    for said, cell in _cells(capabilities_of(method), asked):
        if cell is not None:
            raise ConfigurationError(f"{said}: {cell.why}. {cell.instead}.")


def capabilities_of(method: SyncMethod) -> Capabilities:
    """Returns the row of ``method``: its attribute ``capabilities``, which a user's own method may have, too."""
    row: Capabilities = getattr(method, "capabilities", Capabilities())
    late = {"pipedream": _LATE} if method.policy.announces == "late" else {}
    return replace(row, schedules={**late, **row.schedules})


def _cells(row: Capabilities, asked: Combination) -> Iterator[tuple[str, Incompatible | None]]:
    """Yields what was asked, and the cell of the row that answers it."""
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
            if isinstance(payload, OneBit | TopK):
                yield "few_bits"
