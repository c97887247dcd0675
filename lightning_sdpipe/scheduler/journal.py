"""The dealer's book as a file, so that a scheduler that is started again knows which batches are dealt.

It begins with a line about the mesh; then come those entries of the event log from which leases followed, of one
segment only: at the next one the file is written anew. An entry is in the file before its leases leave. What was
written survives the end of the process, and not that of the machine.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.policies.events import Widened, Worker
from lightning_sdpipe.policies.leases import Asked, Done, Lease, LeaseEvent, Returned, Segment, Told, Trained
from lightning_sdpipe.scheduler.event_log import Entry

log = logging.getLogger(__name__)


class _Beginning(msgspec.Struct, frozen=True, tag_field="format", tag="sdpipe-journal/1"):
    num_stages: int
    num_pipelines: int


class Journal:
    """Reads what an earlier scheduler wrote to ``path``, and goes on there."""

    def __init__(self, path: Path, num_stages: int, num_pipelines: int) -> None:
        self._path = path
        self._beginning = _Beginning(num_stages, num_pipelines)
        self._file: int | None = None
        self._segment: Segment | None = None
        self._done: dict[Worker, Trained] = {}
        """How far each worker is; written when its pipeline returns the rest."""

    def open(self) -> list[LeaseEvent]:
        """Events after which a new dealer knows what was dealt.

        Raises:
            ConfigurationError: the file cannot be read or written, is no journal, or is that of another run.
        """
        entries = list(self._entries())
        for entry in entries:
            self._segment = _segment_of(entry) or self._segment
        events = list(self._events(entries)) if self._segment is not None else []
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigurationError(f"the journal {self._path} cannot be written: {error.strerror}") from error
        if self._segment is None:
            os.ftruncate(self._file, 0)
            self._append(self._beginning)
        return events

    def write(self, entry: Entry) -> None:
        """``entry`` is about to be answered."""
        if self._file is None:
            return
        event, segment = entry.event, _segment_of(entry)
        if isinstance(event, Asked | Trained | Told):
            self._done[event.worker] = Trained(event.worker, event.segment, event.done)
        try:
            if segment is not None and segment != self._segment:
                self._begin_anew()
                self._segment = segment
            if isinstance(event, Returned):
                for worker, trained in self._done.items():
                    if worker.pipeline == event.pipeline:
                        self._append(Entry(entry.at, trained))
            if segment is not None or isinstance(event, Returned):
                self._append(entry)
        except OSError as error:
            log.error("the scheduler's journal %s ends here: %s", self._path, error.strerror)
            self.close()

    def close(self) -> None:
        """Safe to call twice."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _begin_anew(self) -> None:
        fresh = self._path.with_name(f"{self._path.name}.new")
        self.close()
        self._file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        self._append(self._beginning)
        os.replace(fresh, self._path)

    def _append(self, line: Entry | _Beginning) -> None:
        assert self._file is not None
        os.write(self._file, msgspec.json.encode(line) + b"\n")

    def _entries(self) -> Iterator[Entry]:
        if not self._path.exists():
            return
        try:
            first, *lines = self._path.read_bytes().split(b"\n")
        except OSError as error:
            raise ConfigurationError(f"the journal {self._path} cannot be read: {error.strerror}") from error
        if not first and not lines:
            return
        try:
            beginning = msgspec.json.decode(first, type=_Beginning)
            entries = [msgspec.json.decode(line, type=Entry) for line in lines[:-1]]  # the last may be cut off
        except msgspec.DecodeError as error:
            raise ConfigurationError(
                f"{self._path} is not a journal of a scheduler ({error}); give a file of its own to --journal"
            ) from error
        if beginning != self._beginning:
            raise ConfigurationError(
                f"the journal {self._path} is of a run of {beginning.num_stages} stages × {beginning.num_pipelines} "
                f"pipelines, and this scheduler serves {self._beginning.num_stages} × "
                f"{self._beginning.num_pipelines}; delete it, or give another file"
            )
        yield from entries

    def _events(self, entries: list[Entry]) -> Iterator[LeaseEvent]:
        """What each pipeline would tell of the newest segment."""
        stages, pipelines = self._beginning.num_stages, self._beginning.num_pipelines
        segment = self._segment
        assert segment is not None
        books: dict[int, dict[int, Lease]] = {pipeline: {} for pipeline in range(pipelines)}
        done: dict[Worker, Done] = {}
        gone: set[int] = set()

        def told(pipeline: int) -> Iterator[LeaseEvent]:
            book = books.setdefault(pipeline, {})
            leases = tuple(book[ordinal] for ordinal in sorted(book))
            over = any(lease.over for lease in leases)
            for stage in range(stages):
                worker = Worker(stage, pipeline)
                how_far = done.pop(worker, Done(0))
                yield Told(worker, segment, leases, over, how_far)

        numbers = {lease.pipeline for entry in entries for lease in entry.leases}
        numbers |= {entry.event.pipeline for entry in entries if isinstance(entry.event, Returned)}
        numbers |= {entry.event.worker.pipeline for entry in entries if isinstance(entry.event, Told)}
        if max(numbers, default=0) >= pipelines:  # more have come than were planned
            yield Widened(max(numbers) + 1)
        for entry in entries:
            event = entry.event
            if isinstance(event, Returned):
                yield from told(event.pipeline)
                yield event
                books[event.pipeline] = {}
                gone.add(event.pipeline)
            for lease in [*entry.leases, *(event.leases if isinstance(event, Told) else ())]:
                if lease.segment == segment:
                    books.setdefault(lease.pipeline, {})[lease.ordinal] = lease
                    gone.discard(lease.pipeline)
            if isinstance(event, Asked | Trained | Told) and event.segment == segment:
                done[event.worker] = Done(event.done.batches, event.done.seconds)
        for pipeline in sorted(set(books) - gone):
            yield from told(pipeline)


def _segment_of(entry: Entry) -> Segment | None:
    """The one that ``entry`` dealt something of."""
    if entry.leases:
        return entry.leases[-1].segment
    return entry.event.segment if isinstance(entry.event, Told) and entry.event.leases else None
