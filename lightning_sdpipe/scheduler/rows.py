"""Rows of the meter as they travel to the scheduler and stay there."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, TypeAlias

import msgspec

from lightning_sdpipe import meter
from lightning_sdpipe.policies.events import Count, Progress, Worker

MOST = 32
"""Most rows in one heartbeat; as soon as that many wait, they are sent."""
MOST_UPDATES = 64
"""Most updates whose spans one question may ask for."""
MOST_METRICS = 8
"""Most metrics that a worker reports."""
_LARGEST = 1 << 53
"""Most microseconds that a row may hold; above, JSON would lose digits."""


class UpdateRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The last ``count`` updates of a worker, up to ``update``.

    ``us`` has the microseconds of each of :data:`~lightning_sdpipe.meter.PHASES`, ``core`` those of waiting for a core.
    ``group`` is the sequence of the group that the worker waited for, -1 if it waited for none, or for several.
    """

    update: int
    count: int
    us: tuple[int, ...]
    core: int
    group: int = -1


class NewRows(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rows of updates without a pause in between, the last of which ended ``ago`` microseconds ago; those of
    ``dropped`` updates were left out."""

    rows: tuple[UpdateRow, ...]
    ago: int
    dropped: int = 0

    def progress(self, worker: Worker) -> Progress:
        """Return what a policy is told of these rows."""
        count = sum(row.count for row in self.rows)
        seconds, waiting = (
            sum(map(of, self.rows)) / count / 1e6
            for of in (lambda row: sum(row.us), lambda row: row.us[meter.WAIT_GROUP])
        )
        return Progress(worker, self.rows[-1].update, count, seconds, waiting)

    def fault(self) -> str | None:
        """Return what no correct client would have sent, if anything."""
        if not 0 < len(self.rows) <= MOST:
            return f"{len(self.rows)} rows"
        if min(self.ago, self.dropped) < 0 or any(later.update <= row.update for row, later in pairwise(self.rows)):
            return "rows that do not increase"
        for row in self.rows:
            numbers = (row.update, row.core, row.group + 1, *row.us)
            if len(row.us) != len(meter.PHASES) or row.count < 1 or min(numbers) < 0 or max(numbers) > _LARGEST:
                return f"the row {row}"
        return None


class Spans(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The newest updates in a worker's :attr:`~lightning_sdpipe.meter.Meter.kept`, with times in whole microseconds
    before ``said``.

    The scheduler ``asked`` for that many ``updates`` at a time in seconds of its clock. ``heard`` and ``said`` are when
    the worker heard of that and when it replied, in microseconds of the worker's clock.
    """

    updates: Count
    asked: float
    heard: int
    said: int
    kept: tuple[tuple[int, int, int], ...]

    def fault(self) -> str | None:
        """Return what no correct client would have sent, if anything."""
        times = -_LARGEST <= self.heard <= self.said <= _LARGEST and abs(self.asked) <= _LARGEST
        if len(self.kept) > meter.SPANS or not times:
            return f"{len(self.kept)} spans, asked for at {self.asked}, heard at {self.heard} and said at {self.said}"
        for what, begin, number in self.kept:
            known = meter.HIDDEN <= what < len(meter.PHASES) and 0 <= begin <= _LARGEST and 0 <= number <= _LARGEST
            if not known or ((what >= 0 or what == meter.HIDDEN) and number > begin):
                return f"the span {(what, begin, number)}"
        return None


class SpanChunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Spans of one start of ``worker``, its ``life``, that came ``at`` a time in seconds of the scheduler's clock."""

    worker: Worker
    life: int
    at: float
    spans: Spans


Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=255)]


class About(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Description of a worker for people, with the samples of one of its updates, if known, and how its pipeline is
    run: ``follows_speed`` says that a slow pipeline gets fewer batches or micro-batches."""

    host: Text
    device: Text
    rank: Count
    samples: Count | None = None
    schedule: Text = ""
    micro_batches: Count = 1
    sync: Text = ""
    follows_speed: bool = False

    def __str__(self) -> str:
        return f"{self.host}, {self.device}"

    def following_speed(self) -> About:
        """Return the description of the same worker, whose pipeline gets batches by its speed."""
        return msgspec.structs.replace(self, follows_speed=True)


class Doing(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a worker's Trainer does, for people: ``what``, in which ``epoch`` of ``epochs`` (None: no limit), the
    seconds ``left`` by its own estimate, and the newest metrics."""

    what: Text
    epoch: Count
    epochs: Count | None
    left: Count | None
    metrics: Annotated[tuple[tuple[Text, Text], ...], msgspec.Meta(max_length=MOST_METRICS)] = ()


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rows of one start of ``worker``, its ``life``; the last ended ``at`` a time in seconds of the scheduler's
    clock."""

    worker: Worker
    life: int
    at: float
    rows: tuple[UpdateRow, ...]
    dropped: int = 0
