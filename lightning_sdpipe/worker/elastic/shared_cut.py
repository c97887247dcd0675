"""Cut of the pipelines of an elastic run, where it follows from measured times: that of the first pipeline that has
measured. The others take it over, those that come later without measuring.

Pipelines tell each other in the scheduler's key-value store, before they enrol. A pipeline that has measured takes a
number there, and the one of number 1 tells the sizes of its stages. Members have each scheduler of the run keep them,
since a store does not survive its scheduler.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch.distributed as dist

from lightning_sdpipe import p2p
from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.partition.pipeline_cut import PipelineCut, is_measured
from lightning_sdpipe.partition.plan import Plan
from lightning_sdpipe.scheduler.client.membership_client import MembershipClient, StoreClient
from lightning_sdpipe.worker.scheduler_connection import MakePlans

log = logging.getLogger(__name__)

_TELLING = 20.0
"""Seconds in which the pipeline of number 1 must have told its cut; that takes it one message."""


def plan(line: MembershipClient, cuts: Sequence[PipelineCut], make: MakePlans) -> Sequence[Plan]:
    """Return the plans of the cut that the pipelines of a run have, the same on all of them.

    Args:
        line: client of the scheduler.
        cuts: the cut that was asked for; or that of each pipeline, none of which is measured.
        make: makes the plans of cuts, and measures for them if that is needed.
    """
    if not any(is_measured(cut.partition) for cut in cuts):
        return make(cuts)
    (cut,) = cuts
    made: Sequence[Plan] = ()
    sizes = _from_rank_zero(lambda: known(line.store, cut))
    if sizes is None:
        made = make(cuts)
        mine = [len(span) for span in made[0].spans]
        sizes = _from_rank_zero(lambda: agree(line.store, cut, mine))
        assert sizes is not None
    if not made or [len(span) for span in made[0].spans] != sizes:
        made = make([replace(cut, partition=sizes)])
    if dist.get_rank() == 0:
        line.keep(key_of(cut), encode(sizes))
    return made


def _from_rank_zero(ask: Callable[[], list[int] | None]) -> list[int] | None:
    everybody = dist.group.WORLD
    assert everybody is not None
    told: list[int] | None = p2p.broadcast_value(ask() if dist.get_rank() == 0 else None, 0, everybody)
    return told


def key_of(cut: PipelineCut, name: str = "kept") -> str:
    """Return the key of what pipelines that are to be cut by ``cut`` tell each other: the sizes that members keep, the
    ``"sizes"`` of the first, or the ``"number"`` of those that have measured."""
    asked = hashlib.sha256(repr(cut).encode()).hexdigest()[:12]
    return f"cut-{asked}/{name}"


def encode(sizes: Sequence[int]) -> bytes:
    """Return the numbers of blocks of the stages for the store."""
    return json.dumps([*sizes]).encode()


def known(store: StoreClient, cut: PipelineCut) -> list[int] | None:
    """Return the sizes that a pipeline of the run has told; None if none has."""
    for value in store.fetch([key_of(cut), key_of(cut, "sizes")]):
        if value is not None:
            sizes: list[int] = json.loads(value)
            return sizes
    return None


def agree(store: StoreClient, cut: PipelineCut, mine: Sequence[int], seconds: float = _TELLING) -> list[int]:
    """Return the sizes that all pipelines use: ``mine``, which follow from this pipeline's measurement, unless another
    was first. One that is lost when it was first, and has not told, is waited for ``seconds``."""
    if store.add(key_of(cut, "number"), 1) > 1:
        try:
            store.wait([key_of(cut, "sizes")], seconds)
        except SchedulerError as error:
            log.warning("the first pipeline that measured did not tell its cut; this one's is taken (%s)", error)
    told = known(store, cut)
    if told is None:
        store.put(key_of(cut, "sizes"), encode(mine))
    return [*mine] if told is None else told
