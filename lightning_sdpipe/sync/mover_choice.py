"""Which exchange goes with which method, and what moves the tensors then.

Every combination of a method with a payload, an overlap and a hierarchy is carried out, or refused here with what to
use instead, before any process has started.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.common_reference import CommonModel
from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.group_mean import GroupMean
from lightning_sdpipe.exchange.moving import Mover
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.exchange.own_reference import OwnReference
from lightning_sdpipe.exchange.payloads import EightBit, Full, Half, OneBit, TopK
from lightning_sdpipe.exchange.ring_mean import RingMean
from lightning_sdpipe.policies.pairing import ring
from lightning_sdpipe.sync.synchronizer import Replica
from lightning_sdpipe.topology.groups import Replicas
from lightning_sdpipe.topology.hosts import hosts_of_replicas

Begin = Callable[[Sequence[Tensor]], None]


@dataclass(frozen=True)
class ExchangeSupport:
    """What a method can do with an exchange. Each string says why it cannot, and what to use instead; empty ones that
    it can.

    Args:
        common: do members have a common reference, so that any payload will do?
        momentum: may the momentum be sent instead of the gradient?
        step: why not ``overlap="step"``.
        free: why not ``overlap="free"``.
        hosts: why not ``hierarchy="hosts"``.
        only_eight_bits: why no payload of fewer bits, although there is a common reference.
    """

    common: bool = False
    momentum: bool = False
    step: str = ""
    free: str = "use overlap='step'; LocalSGD(every=1) and Decentralized() can average freely"
    hosts: str = ""
    only_eight_bits: str = ""


_PAIRS = "a pair exchanges one message each way, of which a hierarchy saves nothing: use hierarchy='flat'"

GRADIENTS = ExchangeSupport(
    common=True,
    momentum=True,
    step="gradients travel while the backward goes on anyway, and a mean that came one step later would be of an older "
    "model: leave overlap out, or average models with LocalSGD(every=1), which takes overlap='step'",
    free="gradients are needed before the step: average models with LocalSGD(every=1), which takes overlap='free'",
)
CHANGING_GROUPS = ExchangeSupport()
CHANGING_PAIRS = ExchangeSupport(hosts=_PAIRS)
ASYNCHRONOUS_PAIRS = ExchangeSupport(
    hosts=_PAIRS, free="neighbours are not waited for in any case: use overlap='step', which hides the transfer too"
)
MEETINGS = ExchangeSupport(
    step="to hide meetings behind the next step use PHDPSGD(asynchronous=True)",
    free="to let nobody wait use PHDPSGD(asynchronous=True)",
    hosts="its groups are a hierarchy: use hierarchy='flat', and a group for each host, as without group_size",
)
RING = ExchangeSupport(
    common=True,
    free="",
    hosts="a ring adds up nothing that a machine could add up first: use hierarchy='flat', or LocalSGD(every=1)",
    only_eight_bits="what so few bits leave out made models of a ring grow apart: use EightBit() or Half(), or "
    "LocalSGD, DiLoCo or AllReduce",
)
FREE_PAIRS = ExchangeSupport(hosts=_PAIRS, free="")
OUTER = ExchangeSupport(
    common=True, free="rounds are common to all workers: use overlap='step', or delay= to hide more updates behind them"
)
EVERYBODY = ExchangeSupport(common=True, free="")
EVERYBODY_NOW_AND_THEN = ExchangeSupport(
    common=True, free="a thread that averages at its own pace has no use for every=: use overlap='step', or every=1"
)


def check(sync: object, exchange: Exchange, takes: ExchangeSupport | None) -> None:
    """Refuses what a method cannot do with ``exchange``.

    Args:
        sync: the method, for messages.
        exchange: what was given.
        takes: what the method can do with it; None if nothing moves that an exchange could change.

    Raises:
        ConfigurationError: says what to use instead.
    """
    if takes is None:
        if exchange != Exchange():
            raise _refused(
                sync,
                exchange,
                "it moves tensors in its own way, or none: leave exchange out, or use a method that averages, such as "
                "SemiDecentralized(), LocalSGD(every=8) or AllReduce()",
            )
        return
    payload = exchange.payload
    if payload.momentum and not takes.momentum:
        raise _refused(sync, exchange, "momenta take the place of gradients: use sync=AllReduce(), or momentum=0")
    if not takes.common:
        if isinstance(payload, EightBit):
            if payload.feedback or payload.rounding != "nearest":
                fitting = replace(payload, feedback=False, rounding="nearest")
                raise _refused(
                    sync,
                    exchange,
                    "its members have no common reference to feed errors back to, and keep what a message left out "
                    f"themselves: use {fitting}",
                )
        elif not isinstance(payload, Full | Half):
            raise _refused(
                sync,
                exchange,
                "its members have no common reference that so few bits could be differences from: use EightBit() or "
                "Half(), or LocalSGD, DiLoCo or AllReduce, whose members have one",
            )
    if takes.only_eight_bits and isinstance(payload, OneBit | TopK):
        raise _refused(sync, exchange, takes.only_eight_bits)
    for value, reason in (("step", takes.step), ("free", takes.free)):
        if exchange.overlap == value and reason:
            raise _refused(sync, exchange, reason)
    if exchange.hierarchy == "hosts" and takes.hosts:
        raise _refused(sync, exchange, takes.hosts)


def _refused(sync: object, exchange: Exchange, reason: str) -> ConfigurationError:
    return ConfigurationError(f"exchange={exchange} does not go with sync={sync}: {reason}.")


def hosts_of(replica: Replica) -> list[str] | None:
    """The machine of each of the stage's replicas, if the exchange makes a difference between machines.

    Raises:
        ConfigurationError: machines cannot be told from each other.
    """
    return hosts_of_replicas(replica.groups, replica.device) if replica.exchange.hierarchy == "hosts" else None


def replicas_for(replica: Replica) -> Replicas:
    """The replicas of the stage, over a group of their own where a thread exchanges beside training."""
    exchange = replica.exchange
    beside = exchange.overlap != "none" or exchange.hierarchy == "hosts"
    return replica.groups.replicas(replica.groups.side_channel(replica.timeout) if beside else None)


def mover_among_groups(replica: Replica) -> Mover:
    """What moves models among groups that change; in an elastic job, among those who are there."""
    if (surviving := replica.mover()) is not None:
        return surviving
    exchange, replicas = replica.exchange, replicas_for(replica)
    if exchange.is_full and exchange.hierarchy == "flat":
        return GroupMean(replicas)
    return EncodedMean(replicas, OwnReference(exchange.payload), hosts_of(replica))


def among_groups(exchange: Exchange) -> Callable[[Replicas], Mover]:
    """What moves models among groups that change, over one process group after the other, between any two workers
    alike. How far apart models are is remembered."""
    if exchange.is_full:
        return GroupMean
    coding = OwnReference(exchange.payload)
    return lambda replicas: EncodedMean(replicas, coding)


def mover_among_all(replica: Replica) -> tuple[Mover, Begin | None]:
    """What moves models among replicas that all meet; and what is to be told of the models when these are equal, if
    that has to be known."""
    exchange = replica.exchange
    if exchange.is_full:
        return mover_among_groups(replica), None
    coding = CommonModel(exchange.payload, replica.pipeline)
    return EncodedMean(replicas_for(replica), coding, hosts_of(replica)), coding.begin


def mover_in_a_ring(replica: Replica) -> tuple[Mover, Begin | None]:
    """What moves models between neighbours of a ring; and as for :func:`mover_among_all`."""
    payload = None if replica.exchange.is_full else replica.exchange.payload
    mover = RingMean(replicas_for(replica), payload)
    neighbours = ring(replica.pipeline, len(replica.ranks))
    return mover, None if payload is None else lambda tensors: mover.begin(tensors, neighbours)
