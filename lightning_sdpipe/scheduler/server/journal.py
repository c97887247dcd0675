"""The dealer's book as a file, so that a restarted scheduler knows which batches are dealt.

It begins with a line about the mesh; then come the entries of the event log from which leases followed, of one segment
only: at the next segment the file is written anew. An entry is in the file before its leases leave. So whenever the
process is killed, the whole lines of the file are what others may have heard of. Half a line at the end was never
answered, and is cut off.

A journal that lacks an entry is worse than none: dealt batches would be dealt again, and asks would be refused. So the
journal is *void*, that is empty, from the first failed write to the next segment. It is void, too, if it was written
before the machine was started, since the system may have lost its end. Pipelines then report what they were dealt.

SQLite would not be simpler. When the disk is full, it keeps earlier transactions, which is what must not stay, and it
needs space to delete them. Its write-ahead log does not work on network file systems.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from lightning_sdpipe.dealing.leases import Asked, Done, Lease, LeaseEvent, Returned, Segment, Told, Trained
from lightning_sdpipe.errors import ConfigurationError, shape
from lightning_sdpipe.membership.members import MemberDecision, MemberEvent, Published, RunOver
from lightning_sdpipe.policies.events import Widened, Worker
from lightning_sdpipe.scheduler.log.event_log import Entry, cut_half_a_line, write_whole
from lightning_sdpipe.scheduler.server.membership_desk import MembershipDesk

log = logging.getLogger(__name__)

_MARK = b'{"format":"sdpipe-journal/'


class _Beginning(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="format", tag="sdpipe-journal/1"):
    num_stages: int
    num_pipelines: int
    boot: str = ""
    """Boot identifier of the machine; writes before another start of it may have been lost."""
    depths: tuple[int, ...] = ()
    """Stages of each pipeline, where pipelines are cut unlike."""

    @property
    def shape(self) -> str:
        """Description of the shape for people."""
        if self.depths:
            return f"{self.num_pipelines} pipelines of {', '.join(map(str, self.depths))} stages"
        return shape(self.num_stages, self.num_pipelines)


class Journal:
    """A journal that reads what an earlier scheduler wrote to ``path``, and goes on there."""

    def __init__(self, path: Path, num_stages: int, num_pipelines: int, depths: tuple[int, ...] = ()) -> None:
        self._path = path
        self._beginning = _Beginning(num_stages, num_pipelines, _boot(), depths)
        self._file: int | None = None
        self._segment: Segment | None = None
        self._done: dict[Worker, Trained] = {}
        """Progress of each worker; it is written when its pipeline returns the rest."""
        self._heard: list[Entry] = []
        """Reports of pipelines on a segment of which nothing has been dealt: not all of them have reported yet."""
        self._closed = True

    def open(self) -> list[LeaseEvent]:
        """Return the events that tell a new dealer what was dealt. What the file has already need not be written again.

        Raises:
            ConfigurationError: the file cannot be read or made, is no journal, or belongs to another run.
        """
        self._closed = False
        entries = self._read()
        for entry in entries:
            self._segment = _segment_of(entry) or self._segment
        events = list(self._events(entries)) if self._segment is not None else []
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigurationError(f"the journal {self._path} cannot be written: {error.strerror}") from error
        try:
            if self._segment is None:
                os.ftruncate(self._file, 0)
                self._append(self._beginning)
            else:
                cut_half_a_line(self._path)
        except OSError as error:
            self._void(error)
        return events

    def write(self, entry: Entry) -> None:
        """Write ``entry``, which is about to be answered, if leases depend on it."""
        event, lines = entry.event, [entry]
        if isinstance(event, Asked | Trained | Told):
            self._done[event.worker] = Trained(event.worker, event.segment, event.done)
        if isinstance(event, Returned):
            going = [done for worker, done in self._done.items() if worker.pipeline == event.pipeline]
            lines = [*[Entry(entry.at, trained) for trained in going], entry]
        elif not (entry.leases or (isinstance(event, Told) and event.leases)):
            return
        if self._closed:
            return
        try:
            if entry.leases and entry.leases[-1].segment != self._segment:
                self._segment, heard, self._heard = entry.leases[-1].segment, self._heard, []
                self._begin_anew([*heard, *lines])
            elif isinstance(event, Told) and event.segment != self._segment:
                self._heard += lines
            else:
                if self._heard:
                    self._heard += lines
                if self._file is not None:
                    self._append(*lines)
        except OSError as error:
            self._void(error)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._closed = True
        self._let_go()

    def _let_go(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _void(self, error: OSError) -> None:
        self._let_go()
        try:
            if self._path.is_file():
                os.truncate(self._path, 0)
        except OSError as again:
            log.error(
                "the scheduler's journal %s cannot be written (%s), nor emptied (%s): delete it before another "
                "scheduler is started with it, which would deal batches again",
                *(self._path, error.strerror, again.strerror),
            )
        else:
            log.error(
                "the scheduler's journal %s is void until the run's next sync point: %s", self._path, error.strerror
            )

    def _begin_anew(self, lines: list[Entry]) -> None:
        fresh = self._path.with_name(f"{self._path.name}.new")
        self._let_go()
        self._file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        try:
            self._append(self._beginning, *lines)
            os.replace(fresh, self._path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise

    def _append(self, *lines: Entry | _Beginning) -> None:
        assert self._file is not None
        write_whole(self._file, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))

    def _read(self) -> list[Entry]:
        """Return the entries in the file; none if the journal is void."""
        try:
            text = self._path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise ConfigurationError(f"the journal {self._path} cannot be read: {error.strerror}") from error
        first, *lines = text.split(b"\n")
        if not text or (not lines and (_MARK.startswith(text) or text.startswith(_MARK))):  # it ended as it began
            return []
        try:
            beginning = msgspec.json.decode(first, type=_Beginning)
        except msgspec.DecodeError as error:
            raise ConfigurationError(
                f"{self._path} is not a journal of a scheduler ({error}); give a file of its own to --journal"
            ) from error
        if msgspec.structs.replace(beginning, boot=self._beginning.boot) != self._beginning:
            raise ConfigurationError(
                f"the journal {self._path} is of a run of {beginning.shape}, and this scheduler serves "
                f"{self._beginning.shape}; delete it, or give another file"
            )
        if beginning.boot != self._beginning.boot:
            return self._void_for("was written before this machine was started, and may lack its end")
        try:
            return [msgspec.json.decode(line, type=Entry) for line in lines[:-1]]
        except msgspec.DecodeError as error:
            return self._void_for(f"is damaged ({error})")

    def _void_for(self, reason: str) -> list[Entry]:
        log.warning(
            "the scheduler's journal %s %s: it is void, and pipelines tell what they were dealt", self._path, reason
        )
        return []

    def _events(self, entries: list[Entry]) -> Iterator[LeaseEvent]:
        """Yield what each pipeline would report of the newest segment."""
        stages, pipelines, depths = (self._beginning.num_stages, self._beginning.num_pipelines, self._beginning.depths)
        segment = self._segment
        assert segment is not None
        books: dict[int, dict[int, Lease]] = {pipeline: {} for pipeline in range(pipelines)}
        done: dict[Worker, Done] = {}
        gone: set[int] = set()

        def told(pipeline: int) -> Iterator[LeaseEvent]:
            book = books.setdefault(pipeline, {})
            leases = tuple(book[ordinal] for ordinal in sorted(book))
            over = any(lease.over for lease in leases)
            for stage in range(depths[pipeline] if depths else stages):
                worker = Worker(stage, pipeline)
                how_far = done.pop(worker, Done(0))
                yield Told(worker, segment, leases, over, how_far)

        numbers = {lease.pipeline for entry in entries for lease in entry.leases}
        numbers |= {entry.event.pipeline for entry in entries if isinstance(entry.event, Returned)}
        numbers |= {entry.event.worker.pipeline for entry in entries if isinstance(entry.event, Told)}
        if max(numbers, default=0) >= pipelines:  # more pipelines have come than were planned
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
                done[event.worker] = Done(event.done.batches, event.done.seconds, loose=event.done.loose)
        for pipeline in sorted(set(books) - gone):
            yield from told(pipeline)


def _segment_of(entry: Entry) -> Segment | None:
    """Return the segment of which ``entry`` dealt something."""
    if entry.leases:
        return entry.leases[-1].segment
    return entry.event.segment if isinstance(entry.event, Told) and entry.event.leases else None


def _boot() -> str:
    """Return an identifier of this start of this machine; empty where the system gives none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class NewestCheckpoint:
    """The newest checkpoint of the elastic run whose journal is ``journal``, kept in a file beside that.

    A scheduler that died together with all pipelines is started again with ``--resume``; the pipelines that then come
    go on from that checkpoint. The file is removed when the run has finished, so a reused journal starts anew.
    """

    def __init__(self, journal: Path) -> None:
        self._path = journal.with_name(f"{journal.name}.checkpoint")

    def follow(self, elastic: MembershipDesk, now: float) -> None:
        """Tell ``elastic`` of the checkpoint that an earlier scheduler heard of, and record each new one from now
        on."""
        record = elastic.on_decided

        def keep(now: float, event: MemberEvent, decisions: list[MemberDecision]) -> None:
            record(now, event, decisions)
            self.hear(event, decisions)

        if (published := self.read()) is not None:
            record(now, published, elastic.membership.on(published, now))
        elastic.on_decided = keep

    def read(self) -> Published | None:
        """Return the checkpoint that an earlier scheduler heard of last; None if there is none."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Published)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s, with the newest checkpoint, cannot be read: %s", self._path, error)
            return None

    def hear(self, event: MemberEvent, decisions: list[MemberDecision]) -> None:
        """Record a published checkpoint, until the run has finished."""
        try:
            if isinstance(event, Published):
                self._write(msgspec.json.encode(event))
            if any(isinstance(decision, RunOver) and not decision.failed for decision in decisions):
                self._path.unlink(missing_ok=True)
        except OSError as error:
            log.error("%s cannot be changed (%s): it may name an older checkpoint", self._path, error.strerror)

    def _write(self, text: bytes) -> None:
        fresh = self._path.with_name(f"{self._path.name}.new")
        with fresh.open("wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self._path)
