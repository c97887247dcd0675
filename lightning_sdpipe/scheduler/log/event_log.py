"""Every event and decision of a run, in order, with its time, as lines of JSON.

A file begins with a line about the scheduler, its policy included; then comes a line for each event, with the decisions
that followed from it. Times are those that the policy was given, so that a replay leads to the same decisions. A
restarted scheduler goes on in the same file, with a first line of its own.

A file that reaches half of the log's limit gets ``.1`` appended to its name, replacing the one before, and the log goes
on in a new file. Its first line says how many events of this scheduler are in earlier files.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from lightning_sdpipe.dealing.dealer import Dealer
from lightning_sdpipe.dealing.leases import Asked, Books, Lease, LeaseEvent, Returned, Trained
from lightning_sdpipe.errors import ConfigurationError, os_errors_as
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.membership.members import MemberDecision, MemberEvent
from lightning_sdpipe.membership.membership import Membership
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.decisions import Decision
from lightning_sdpipe.policies.events import Event, Widened, Worker
from lightning_sdpipe.policies.policy import RefusedEvent
from lightning_sdpipe.scheduler.rows import About, Chunk, Doing

log = logging.getLogger(__name__)

FORMAT = "sdpipe-log/3"
LIMIT = 256 << 20
"""Most bytes of a log's files together."""


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event at ``at`` (seconds of the scheduler's clock), and the ``decisions`` or ``leases`` that followed, or the
    decisions on membership, ``members``."""

    at: float
    event: Event | LeaseEvent | MemberEvent
    decisions: list[Decision] = []
    leases: list[Lease] = []
    members: list[MemberDecision] = []


class Beginning(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="format", tag=FORMAT):
    """The first line of a scheduler, or of a file: its policy, the shape of the run, and what its clock (``at``) and
    the wall clock (``time``) showed when it was started."""

    policy: dict[str, Any]
    num_stages: int
    num_pipelines: int
    at: float
    time: str
    elastic: ElasticConfig | None = None
    after: int = 0
    """Events of this scheduler in earlier files."""


class Updates(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line with a worker's rows, which lead to no decision, and the worker's description."""

    rows: Chunk
    about: About | None = None


class Does(msgspec.Struct, frozen=True):
    """A line that says what ``worker`` does from the time ``at`` on."""

    doing: Doing
    worker: Worker
    at: float


class EventLog:
    """The log in the file ``path``; without one, nothing is written. The file and the one before have at most ``limit``
    bytes together."""

    def __init__(self, path: Path | None = None, limit: int = LIMIT) -> None:
        self._path = path
        self._limit = limit
        self._file: int | None = None
        self._size = self._written = 0
        """Bytes of the file, and events of this scheduler in all files."""
        self._beginning: Beginning | None = None

    def open(self, beginning: Beginning) -> None:
        """Open the file, and write at its end from now on.

        Raises:
            ConfigurationError: the file cannot be written.
        """
        if self._path is None:
            return
        with os_errors_as(f"the scheduler's log {self._path} cannot be written"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.is_file():
                cut_half_a_line(self._path)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self._size = os.fstat(self._file).st_size
        self._beginning = beginning
        self.write(beginning)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def write(self, line: Entry | Updates | Does | Beginning) -> None:
        """Write ``line``, unless there is no file, or no more of it can be written."""
        if self._file is None:
            return
        text = msgspec.json.encode(line) + b"\n"
        try:
            if self._size + len(text) > self._limit // 2 and self._size and not isinstance(line, Beginning):
                self._begin_file()
            write_whole(self._file, text)  # at once, so that it survives the death of the scheduler
        except OSError as error:
            log.error("the scheduler's log %s ends here: %s", self._path, error.strerror)
            self.close()
            return
        self._size += len(text)
        self._written += isinstance(line, Entry)

    def _begin_file(self) -> None:
        assert self._path is not None
        assert self._file is not None
        assert self._beginning is not None
        self._path.replace(before(self._path))
        os.close(self._file)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        first = msgspec.json.encode(msgspec.structs.replace(self._beginning, after=self._written)) + b"\n"
        write_whole(self._file, first)
        self._size = len(first)


def before(path: Path) -> Path:
    """Return the path of the file that holds the earlier part of the log ``path``."""
    return path.with_name(f"{path.name}.1")


def write_whole(file: int, data: bytes) -> None:
    """Write all of ``data`` to the descriptor ``file``; the system may take less at once when a disk is full.

    Raises:
        OSError: not all of it was written.
    """
    while data:
        data = data[os.write(file, data) :]


def cut_half_a_line(path: Path) -> None:
    """Cut off an incomplete last line, left by a killed process or a full disk, so that others can write behind it.

    Raises:
        OSError: the line cannot be cut off.
    """
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        whole = end
        while whole and not (chunk := _before(file, whole)).endswith(b"\n"):
            whole -= len(chunk) - (chunk.rfind(b"\n") + 1)
        if whole < end:
            log.warning("%s ends with half a line of %d bytes, which is cut off", path, end - whole)
            file.truncate(whole)


def _before(file: BinaryIO, end: int) -> bytes:
    start = max(0, end - (1 << 16))
    file.seek(start)
    return file.read(end - start)


Decided = list[Decision] | list[Lease] | list[MemberDecision]


class Record(msgspec.Struct):
    """The entries that one scheduler has written."""

    beginning: Beginning
    entries: list[Entry]
    updates: list[Updates]
    """Rows of workers, in the order in which heartbeats brought them."""
    doing: dict[Worker, Doing] = {}
    """Last activity of each worker."""

    @property
    def events(self) -> int:
        """Number of the scheduler's events, with those in files that are gone."""
        return self.beginning.after + len(self.entries)

    @property
    def depths(self) -> tuple[int, ...]:
        """Stages of each pipeline, where these are cut differently and groups are of whole pipelines; else empty."""
        return () if self.beginning.elastic is None else self.beginning.elastic.depths

    def differences(self) -> Iterator[Difference]:
        """Replay the entries to new parts of a scheduler; yield each entry for which they decide otherwise."""
        beginning = self.beginning
        config, mesh = registry.from_plain(beginning.policy), (beginning.num_stages, beginning.num_pipelines)
        policy = registry.build(config, *mesh, self.depths)
        dealer = Dealer(*mesh, int(config.keeps_equal), self.depths)
        terms = beginning.elastic or ElasticConfig.of_fixed(beginning.num_pipelines)
        membership = Membership(beginning.num_stages, terms, beginning.at, beginning.num_pipelines)
        for number, entry in enumerate(self.entries):
            event = entry.event
            recorded: Decided = entry.decisions
            if isinstance(event, Widened):
                dealer.on(event, entry.at)
            try:
                if isinstance(event, MemberEvent):
                    decided: Decided = membership.on(event, entry.at)
                    recorded = entry.members
                elif isinstance(event, Asked | Trained | Books | Returned):
                    decided, recorded = dealer.on(event, entry.at), entry.leases
                else:
                    decided = policy.on(event, entry.at)
            except RefusedEvent as refused:
                yield Difference(number, entry, refused)
                continue
            if decided != recorded:
                yield Difference(number, entry, decided)


class Difference(msgspec.Struct, frozen=True):
    """An entry for which a policy decides otherwise than recorded."""

    number: int
    entry: Entry
    decisions: Decided | RefusedEvent


def read_log(path: Path) -> list[Record]:
    """Return the records of a log, one for each start of a scheduler; a last line that is cut off is left out.

    Raises:
        ConfigurationError: the file cannot be read, or is no log.
    """
    records: list[Record] = []
    for file in [file for file in (before(path), path) if file.exists()] or [path]:
        _read_file(file, records)
    if not records:
        raise ConfigurationError(
            f"{path} has no line of a scheduler's log; SDPipeStrategy(log_dir=…) and sdpipe run write scheduler.jsonl"
        )
    return records


def _read_file(path: Path, records: list[Record]) -> None:
    with os_errors_as(f"the log {path} cannot be read"):
        lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            if line.startswith(b'{"rows"'):
                records[-1].updates.append(msgspec.json.decode(line, type=Updates))
            elif line.startswith(b'{"doing"'):
                does = msgspec.json.decode(line, type=Does)
                records[-1].doing[does.worker] = does.doing
            elif line.startswith(b'{"format"'):
                beginning = msgspec.json.decode(line, type=Beginning)
                if not (records and beginning.after == records[-1].events > 0):
                    records.append(Record(beginning, [], []))
            else:
                records[-1].entries.append(msgspec.json.decode(line, type=Entry))
        except (msgspec.DecodeError, IndexError) as error:
            raise ConfigurationError(
                f"line {number} of {path} is not that of a scheduler's log of format {FORMAT} ({error}); sdpipe "
                "scheduler --log writes one"
            ) from error
