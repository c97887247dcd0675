"""Cut of the pipelines of an elastic run, where it follows from measured times: that of the first pipeline that has
measured. The others take it over, those that come later without measuring.

Pipelines tell each other in the scheduler's key-value store, before they enrol. Who has measured takes a number there,
and the one of number 1 tells the sizes of its stages. Members have each scheduler of the run keep them, since a store
does not survive its scheduler.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Protocol

from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.partition.pipeline_cut import PipelineCut

log = logging.getLogger(__name__)

_TELLING = 20.0
"""Seconds in which who has number 1 must have told its cut; that takes it one message."""


class Store(Protocol):
    """The scheduler's key-value store; see :class:`~lightning_sdpipe.scheduler.client.store.StoreClient`."""

    def put(self, key: str, value: bytes, timeout: float | None = None) -> None:
        """Set ``key`` for all processes."""

    def fetch(self, keys: Sequence[str], timeout: float | None = None) -> tuple[bytes | None, ...]:
        """Return the present values of ``keys``, None where there is none."""

    def wait(self, keys: Sequence[str], timeout: float | None = None) -> tuple[bytes, ...]:
        """Return the values of ``keys`` when all are there."""

    def add(self, key: str, amount: int, timeout: float | None = None) -> int:
        """Add to the number at ``key``, 0 at first; return the sum."""


def key_of(cut: PipelineCut, name: str = "kept") -> str:
    """Return the key of what pipelines that are to be cut by ``cut`` tell each other: the sizes that members keep, the
    ``"sizes"`` of the first, or the ``"number"`` of those that have measured."""
    asked = hashlib.sha256(repr(cut).encode()).hexdigest()[:12]
    return f"cut-{asked}/{name}"


def encode(sizes: Sequence[int]) -> bytes:
    """Return the numbers of blocks of the stages for the store."""
    return json.dumps([*sizes]).encode()


def known(store: Store, cut: PipelineCut) -> list[int] | None:
    """Return the sizes that a pipeline of the run has told; None if none has."""
    for value in store.fetch([key_of(cut), key_of(cut, "sizes")]):
        if value is not None:
            sizes: list[int] = json.loads(value)
            return sizes
    return None


def agree(store: Store, cut: PipelineCut, mine: Sequence[int], seconds: float = _TELLING) -> list[int]:
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
