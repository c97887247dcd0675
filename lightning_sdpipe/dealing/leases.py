"""What is said about the batches of each pipeline: asks and reports of workers, and the leases that answer them.

:mod:`lightning_sdpipe.dealing.dealer` decides.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from lightning_sdpipe.policies.events import Count, Seconds, Widened, Worker

Progress: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e18)]
"""Batches of an epoch, by all pipelines; not always whole ones."""


class Segment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Batches ``start`` to ``stop`` of each home shard in ``epoch``; ``run`` is equal on all workers, and new whenever
    training begins anew."""

    run: Count
    epoch: Count
    start: Count
    stop: Count

    def __str__(self) -> str:
        return f"batches {self.start} to {self.stop} of epoch {self.epoch}"


class Lease(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="lease"):
    """``pipeline`` trains batches ``start`` to ``stop`` of shard ``home``, in order.

    Before its k-th batch, ``progress`` + k ``advance`` batches of the epoch are trained by all, as far as can be
    foretold: with N pipelines of equal speeds, N times the batches of this one. The value never falls, and at the end
    of the segment it is N ``segment.stop``.
    An empty lease says: train all that you hold, then ask again. If it is ``over``, so is the segment.
    """

    segment: Segment
    pipeline: Count
    ordinal: Count
    home: Count
    start: Count
    stop: Count
    progress: Progress
    advance: Progress
    over: bool = False

    @property
    def size(self) -> int:
        """Batches in it."""
        return self.stop - self.start

    @property
    def end(self) -> float:
        """The progress when its batches are trained."""
        return self.progress + self.size * self.advance


class Done(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a worker has trained: ``batches`` in the segment, the last ``ago`` seconds ago (or so long ago it began),
    each in ``seconds`` lately (None before the first)."""

    batches: Count
    seconds: Seconds | None = None
    ago: Seconds = 0.0


class Asked(msgspec.Struct, frozen=True, gc=False, tag="asked"):
    """``worker`` needs lease ``ordinal`` of its pipeline, counted from 0 in ``segment``."""

    worker: Worker
    segment: Segment
    ordinal: int
    done: Done


class Trained(msgspec.Struct, frozen=True, gc=False, tag="trained"):
    """How far ``worker`` is in ``segment``."""

    worker: Worker
    segment: Segment
    done: Done


class Told(msgspec.Struct, frozen=True, gc=False, tag="told"):
    """What the pipeline of ``worker`` was dealt in ``segment``, as far as it heard; ``over`` if it heard that."""

    worker: Worker
    segment: Segment
    leases: tuple[Lease, ...]
    over: bool
    done: Done


class Returned(msgspec.Struct, frozen=True, gc=False, tag="returned"):
    """``pipeline`` leaves or is gone: others train what not all of its stages have said to have trained.

    If it asks again, it begins with ordinal 0 and takes part anew.
    """

    pipeline: int


class Expected(msgspec.Struct, frozen=True, gc=False, tag="expected"):
    """``pipeline``, which is beyond those that were planned, is in the run, and another scheduler may have dealt to it:
    nothing is dealt before it tells."""

    pipeline: int


LeaseEvent: TypeAlias = Asked | Trained | Told | Returned | Expected | Widened
