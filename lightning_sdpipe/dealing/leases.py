"""Messages about the batches of each pipeline: asks and reports of workers, and the leases that answer them.

:mod:`lightning_sdpipe.dealing.dealer` decides.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from lightning_sdpipe.policies.events import Count, Seconds, Widened, Worker

Progress: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e18)]
"""Batches of an epoch, trained by all pipelines together; not always a whole number."""


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
    """The ``pipeline`` trains batches ``start`` to ``stop`` of shard ``home``, in order.

    Before its k-th batch, all pipelines are predicted to have trained ``progress`` + k ``advance`` batches of the
    epoch: with N pipelines of equal speeds, N times the batches of this one. The value never falls, and at the end of
    the segment it is N ``segment.stop``. An empty lease tells the pipeline to train all that it holds, and then to ask
    again. If it is ``over``, so is the segment, at the number ``stop``: below the planned one if a user has stopped
    training.
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
        """Number of batches in the lease."""
        return self.stop - self.start

    @property
    def end(self) -> float:
        """Progress when the batches of the lease are trained."""
        return self.progress + self.size * self.advance


START = 1.0
"""Seconds that the start of a loader may take: a first batch that takes no longer does not tell a pipeline's speed."""


class Done(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A worker's progress: ``batches`` trained in the segment, the last one ``ago`` seconds ago (or the start, if there
    is none), each recently in ``seconds`` (None before one was timed). If the worker is lost, so are the last ``loose``
    of them, which no other model has. It ``stops`` if its user has asked for the end of training."""

    batches: Count
    seconds: Seconds | None = None
    ago: Seconds = 0.0
    loose: Count = 0
    stops: bool = False


class Asked(msgspec.Struct, frozen=True, gc=False, tag="asked"):
    """The ``worker`` needs lease ``ordinal`` of its pipeline, counted from 0 in ``segment``."""

    worker: Worker
    segment: Segment
    ordinal: int
    done: Done


class Trained(msgspec.Struct, frozen=True, gc=False, tag="trained"):
    """A report of the progress of ``worker`` in ``segment``."""

    worker: Worker
    segment: Segment
    done: Done


class Book(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All leases in ``segment`` that a worker has heard of; ``over`` says that it also heard of the segment's end."""

    segment: Segment
    leases: tuple[Lease, ...]
    over: bool
    done: Done


class Books(msgspec.Struct, frozen=True, gc=False, tag="books"):
    """The books of the workers of all present pipelines, to which an earlier dealer dealt."""

    books: tuple[tuple[Worker, Book], ...]


class Returned(msgspec.Struct, frozen=True, gc=False, tag="returned"):
    """The ``pipeline`` leaves or is gone: others train the batches that not all of its stages have reported as trained.

    If it asks again, it begins with ordinal 0 and takes part anew.
    """

    pipeline: int


LeaseEvent: TypeAlias = Asked | Trained | Books | Returned | Widened
