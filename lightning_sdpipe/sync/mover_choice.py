"""Choice of a method's mover, by the exchange that :mod:`lightning_sdpipe.sync.capabilities` allows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor

from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.moving import GroupMean, Mover
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.exchange.outer_model import OuterModel
from lightning_sdpipe.exchange.references import OwnReference
from lightning_sdpipe.exchange.ring_mean import RingCopies, RingMean
from lightning_sdpipe.exchange.sectioned import SectionedMover, parted
from lightning_sdpipe.sync.peers import Surviving
from lightning_sdpipe.sync.synchronizer import Replica
from lightning_sdpipe.topology.groups import Replicas, hosts_of_replicas, require_names, this_host

Begin = Callable[[Sequence[Tensor]], None]


def hosts_of(replica: Replica) -> list[str] | None:
    """Return the machine of each of the stage's replicas, if the exchange distinguishes machines; else None.

    Raises:
        ConfigurationError: machines cannot be distinguished.
    """
    return hosts_of_replicas(replica.groups, replica.device) if replica.exchange.hierarchy == "hosts" else None


def own_host(exchange: Exchange, pipeline: int) -> str | None:
    """Return the machine of this replica, which belongs to ``pipeline``, if the exchange distinguishes machines; else
    None.

    Raises:
        ConfigurationError: the machine has no name.
    """
    if exchange.hierarchy != "hosts":
        return None
    host = this_host()
    require_names([(pipeline, host)])
    return host


def replicas_for(replica: Replica) -> list[Replicas]:
    """Return the replicas of the stage, or of each section of this worker, over separate process groups where a thread
    exchanges beside training."""
    exchange, sections = replica.exchange, replica.sections
    beside = exchange.overlap != "none" or exchange.hierarchy == "hosts"
    if sections is not None:
        return [among for _, among in sorted((sections.beside if beside else sections.replicas).items())]
    return [replica.beside() if beside else replica.groups.replicas()]


def by_part(replica: Replica, movers: Sequence[Mover]) -> Mover:
    """Combine the movers of all :func:`replicas_for` into one."""
    if replica.sections is None:
        (mover,) = movers
        return mover
    return SectionedMover(movers, lambda: _counts(replica))


def _begin_by_part(replica: Replica, begins: Sequence[Begin]) -> Begin:
    def begin(tensors: Sequence[Tensor]) -> None:
        for each, own in zip(begins, parted(tensors, _counts(replica)), strict=True):
            each(own)

    return begin


def _counts(replica: Replica) -> list[int]:
    """Return the number of exchanged tensors in each part."""
    return [len(part.exchanged) for part in replica.divided]


def mover_among_groups(replica: Replica) -> Mover:
    """Return the mover of models among groups that change; in an elastic run, among the present pipelines. It remembers
    the distance of models from one process group to the next."""
    payload = replica.exchange.payload

    def make(replicas: Replicas, hosts: Mapping[int, str] | Sequence[str] | None, coding: OwnReference) -> Mover:
        return GroupMean(replicas) if replica.exchange.is_plain else EncodedMean(replicas, coding, hosts)

    if replica.peers is not None:
        return Surviving(replica.peers, partial(make, coding=OwnReference(payload)))
    return by_part(
        replica, [make(replicas, hosts_of(replica), OwnReference(payload)) for replicas in replicas_for(replica)]
    )


def mover_among_all(replica: Replica) -> tuple[Mover, Begin | None]:
    """Return the mover of models among replicas that all meet, and the function to call with the models when these are
    equal, or None if it is not needed."""
    exchange = replica.exchange
    if exchange.is_full:
        return mover_among_groups(replica), None
    parts = [(replicas, OuterModel(exchange.payload, replica.pipeline)) for replicas in replicas_for(replica)]
    movers = [EncodedMean(replicas, coding, hosts_of(replica)) for replicas, coding in parts]
    return by_part(replica, movers), _begin_by_part(replica, [coding.begin for _, coding in parts])


def mover_in_a_ring(replica: Replica) -> tuple[Mover, Begin | None]:
    """Return the mover of models between neighbours of a ring, and a function as that of :func:`mover_among_all`."""
    payload = None if replica.exchange.is_full else replica.exchange.payload
    if replica.peers is not None:
        kept = RingCopies(payload, replica.pipeline, changes=True)
        replica.peers.forget = kept.forget
        return Surviving(replica.peers, lambda replicas, hosts: RingMean(replicas, kept)), None
    parts = [(replicas, RingCopies(payload, replica.pipeline)) for replicas in replicas_for(replica)]
    mover = by_part(replica, [RingMean(replicas, copies) for replicas, copies in parts])
    return mover, None if payload is None else _begin_by_part(replica, [copies.begin for _, copies in parts])
