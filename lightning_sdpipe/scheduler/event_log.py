"""Every event and decision of a run, in order, with its time: in memory the newest, and as lines of JSON if asked.

A file begins with a line about the scheduler, its policy included; then comes a line for each event, with the decisions
that followed from it. Times are those that the policy was given, so that it decides the same when they are played back
to it. A scheduler that is started again goes on in the same file, with a first line of its own.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.dealer import Dealer
from lightning_sdpipe.policies.decisions import Decision, Group
from lightning_sdpipe.policies.events import Event, Widened
from lightning_sdpipe.policies.leases import Asked, Expected, Lease, LeaseEvent, Returned, Told, Trained
from lightning_sdpipe.policies.members import MemberDecision, MemberEvent
from lightning_sdpipe.policies.membership import Membership
from lightning_sdpipe.policies.policy import Policy, RefusedEvent
from lightning_sdpipe.policies.terms import Terms

log = logging.getLogger(__name__)

FORMAT = "sdpipe-log/1"
REMEMBERED = 4096
"""Events that are kept in memory, unless there are many workers."""


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """``event`` happened at ``at``, in seconds of the scheduler's clock, and ``decisions`` or ``leases`` followed, or
    in an elastic run ``members``."""

    at: float
    event: Event | LeaseEvent | MemberEvent
    decisions: list[Decision] = []
    leases: list[Lease] = []
    members: list[MemberDecision] = []


class Beginning(msgspec.Struct, frozen=True, tag_field="format", tag=FORMAT):
    """The first line of a scheduler: what it decides by, for whom, and what its clock and the wall's showed."""

    policy: dict[str, Any]
    num_stages: int
    num_pipelines: int
    at: float
    time: str
    elastic: Terms | None = None


class Reader(Protocol):
    """Looks at a run."""

    def on(self, now: float, event: Event, decisions: list[Decision]) -> None:
        """``event`` happened, and ``decisions`` followed."""


class EventLog:
    """Remembers the newest events, tells readers of each, and writes them to the file ``path``, if it is given one."""

    def __init__(self, path: Path | None = None) -> None:
        self.recent: deque[tuple[float, Event, list[Decision]]] = deque(maxlen=REMEMBERED)
        self._readers: list[Callable[[float, Event, list[Decision]], None]] = []
        self._path = path
        self._file: int | None = None
        self.journal: Callable[[Entry], None] | None = None
        """Hears of what is dealt before anybody else does."""

    def open(self, beginning: Beginning) -> None:
        """Begin to write, at the end of the file.

        Raises:
            ConfigurationError: the file cannot be written.
        """
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigurationError(f"the scheduler's log {self._path} cannot be written: {error.strerror}") from error
        self._write(beginning)

    def remember(self, events: int) -> None:
        """Keep at least so many in memory."""
        if events > (self.recent.maxlen or 0):
            self.recent = deque(self.recent, maxlen=events)

    def group(self, number: int) -> Group | None:
        """The group of that number, if it is remembered."""
        for _, _, decisions in reversed(self.recent):
            for group in decisions:
                if group.sequence == number:
                    return group
        return None

    def tell(self, reader: Reader) -> None:
        """``reader`` hears of what happens from now on."""
        self._readers.append(reader.on)

    def record(self, now: float, event: Event, decisions: list[Decision]) -> None:
        """``event`` happened at ``now``, and ``decisions`` followed."""
        self.recent.append((now, event, decisions))
        for read in self._readers:
            read(now, event, decisions)
        if self._file is not None:
            self._write(Entry(now, event, decisions))

    def record_leases(self, now: float, event: LeaseEvent, leases: list[Lease]) -> None:
        """``event`` happened at ``now``, and ``leases`` followed. They are not kept in memory: a dealer is."""
        entry = Entry(now, event, leases=leases)
        if self.journal is not None:
            self.journal(entry)
        if self._file is not None:
            self._write(entry)

    def record_members(self, now: float, event: MemberEvent, decisions: list[MemberDecision]) -> None:
        """``event`` happened at ``now``, and ``decisions`` followed. They are not kept in memory: the members are."""
        if self._file is not None:
            self._write(Entry(now, event, members=decisions))

    def close(self) -> None:
        """Safe to call twice."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, line: Entry | Beginning) -> None:
        assert self._file is not None
        try:
            os.write(self._file, msgspec.json.encode(line) + b"\n")  # whole lines, that also a killed scheduler leaves
        except OSError as error:
            log.error("the scheduler's log %s ends here: %s", self._path, error.strerror)
            self.close()


class Record(msgspec.Struct):
    """What one scheduler has written."""

    beginning: Beginning
    entries: list[Entry]

    def policy(self) -> Policy:
        """A new one with the same values."""
        return registry.build(
            registry.from_plain(self.beginning.policy), self.beginning.num_stages, self.beginning.num_pipelines
        )

    def dealer(self) -> Dealer:
        """A new one for the same workers."""
        return Dealer(self.beginning.num_stages, self.beginning.num_pipelines)

    def membership(self) -> Membership | None:
        """A new one with the same terms, if the run may have been elastic."""
        beginning = self.beginning
        if beginning.elastic is None:
            return None
        return Membership(beginning.num_stages, beginning.elastic, beginning.at)


class Difference(msgspec.Struct, frozen=True):
    """Where a policy decides something else than is recorded."""

    number: int
    entry: Entry
    decisions: list[Decision] | list[Lease] | list[MemberDecision] | RefusedEvent


def read_log(path: Path) -> list[Record]:
    """The records of a log file, one for each start of a scheduler; a last line that is cut off is left out.

    Raises:
        ConfigurationError: the file cannot be read, or is no log.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigurationError(f"the log {path} cannot be read: {error.strerror}") from error
    records: list[Record] = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            if line.startswith(b'{"format"'):
                records.append(Record(msgspec.json.decode(line, type=Beginning), []))
            else:
                records[-1].entries.append(msgspec.json.decode(line, type=Entry))
        except (msgspec.DecodeError, IndexError) as error:
            raise ConfigurationError(
                f"line {number} of {path} is not that of a scheduler's log ({error}); sdpipe scheduler --log writes one"
            ) from error
    if not records:
        raise ConfigurationError(f"{path} has no line of a scheduler's log; sdpipe scheduler --log writes one")
    return records


def differences(
    policy: Policy, dealer: Dealer, entries: Sequence[Entry], membership: Membership | None = None
) -> Iterator[Difference]:
    """Plays ``entries`` back to ``policy``, ``dealer`` and ``membership``, which must be new; where they decide
    otherwise, and how."""
    for number, entry in enumerate(entries):
        event = entry.event
        if isinstance(event, MemberEvent):
            members = [] if membership is None else membership.on(event, entry.at)
            if members != entry.members:
                yield Difference(number, entry, members)
            continue
        if isinstance(event, Widened):
            dealer.on(event, entry.at)
        try:
            if isinstance(event, Asked | Trained | Told | Returned | Expected):
                decisions: list[Decision] | list[Lease] = dealer.on(event, entry.at)
                recorded: list[Decision] | list[Lease] = entry.leases
            else:
                decisions, recorded = policy.on(event, entry.at), entry.decisions
        except RefusedEvent as refused:
            yield Difference(number, entry, refused)
            continue
        if decisions != recorded:
            yield Difference(number, entry, decisions)
