"""A worker process's side of the protocol: what it says, repeats and believes. It has no socket, thread or random
number, and no clock but the one that it is given.

Its owner serialises the calls, carries out the effects, and says what time it is::

    key = talk.ask(e.Meet, "pause/1", b"")           # or tell(...), to which no reply comes back
    for send in talk.due(now): ...                   # first times, repetitions, beats; again at talk.deadline
    key = talk.ask(m.Ready, iteration)               # a request of the thread that trains, over a line of its own
    for send in talk.due_in_training(now): ...
    for effect in talk.hear(reply): ...              # over either line; Replied(key, reply) among them

Rules:

1. A request is open until it is answered, refused or forgotten, and is repeated until then. Only a reply of the kind
   that it asks for answers it, and only once.
2. A request of the thread that trains also ends when another of its kind replaces it; joining and leaving replace each
   other. It is repeated under new numbers, since the scheduler counts each number once.
3. A worker that begins to leave no longer takes part. Its unanswered ready is not repeated, and is dropped when the
   scheduler has noted the leave: until then its group may have been decided.
4. Beats say what the process believes (the epoch, process groups, an exchange), and a ``Now`` tells it what is true.
   Older versions of either are ignored, so loss and reordering do no harm. A beat is due at once when something that
   others wait for has changed.
5. A scheduler that does not know the process may have restarted. It first hears what the process is, and then the open
   requests. What an earlier scheduler was told is forgotten, except the newest checkpoint and kept value; a group or
   lease that it answered with, read only now, is void: the new one was not told of it.
6. Each transfer counts once: a delayed message never asks again for a snapshot that was taken or dropped, nor for a
   state that this process has answered for.
7. When the process must end, or the run is over, it says nothing more but a departure and beats.
8. If the scheduler stops answering, an ordinary run ends; an elastic one warns, since it may be started again.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from lightning_sdpipe.membership.failure_detection import BARRIERS
from lightning_sdpipe.membership.members import Epoch, Exchanging, Met, is_fixed
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client.reporting import HeardLeases, RowBuffer, SpanReport
from lightning_sdpipe.scheduler.rows import About, Doing

FIRST_BEAT, PROBE, SOONEST = 0.25, 0.05, 0.125
"""Seconds between beats: until the scheduler sets the interval, while it seems away, and with much to tell."""
REPEAT_AFTER, REPEAT_IN_TRAINING = 0.5, 1.0
"""Seconds after which an unanswered request is repeated: of other threads, and of the thread that trains."""
TRANSFERS = 64
"""Most recent transfers that are remembered as dealt with."""
MET, INVITED = 8, 64
"""Most recent barriers that a restarted scheduler is told of, and invitations whose repetitions are ignored."""
LAST_BEAT = 12
"""Unanswered beats after which an ordinary run ends, and an elastic one reports the scheduler's silence. Unless the
lifeline is closed, the scheduler must also have been silent for as long as a worker may be."""

Kind: TypeAlias = type[m.Request] | type[e.Request]
Key: TypeAlias = tuple[str, str | int] | Kind
"""Name of a request; one of the thread that trains is named by its kind."""


@dataclass(frozen=True)
class Replied:
    """The reply to the request ``key`` has come; it may be a refusal."""

    key: Key
    reply: m.Reply | e.Reply


@dataclass(frozen=True)
class EpochBegan:
    """The members have changed."""

    epoch: Epoch


@dataclass(frozen=True)
class GroupBroke:
    """The exchange of the group ``sequence`` is stuck, and is to be broken off."""

    sequence: int


@dataclass(frozen=True)
class Connect:
    """A lifeline is to be opened, in place of the one before."""

    port: int
    nonce: bytes


@dataclass(frozen=True)
class Warned:
    """``text`` is to be logged as a warning."""

    text: str


Effect: TypeAlias = Replied | EpochBegan | GroupBroke | Connect | Warned | m.Invitation | e.End
"""Effects of a message; an invitation is to be followed."""

_ANSWERS: dict[Kind, tuple[type[m.Reply] | type[e.Reply], ...]] = {
    m.Hello: (m.Welcome,),
    m.Ready: (m.Answer,),
    m.AskLease: (m.Dealt,),
    e.Enrol: (e.Start, e.Get),
    e.TellReceived: (e.Start, e.Get),
    e.Meet: (e.HasMet,),
    e.Store: (e.Stored,),
}
"""Replies that answer each kind of request; a ``Noted`` answers any other kind."""
_DECIDED_LATER = e.Enrol | e.TellReceived | e.Meet
"""Requests whose answers wait for other workers."""


class _Open:
    """An unanswered request: ``request`` is its last message, ``numbers`` are those of all its messages, ``fields`` are
    as its owner gave them, and ``at`` is the time at which it is due again."""

    __slots__ = ("at", "fields", "numbers", "request", "told", "waits_for")

    def __init__(self, request: m.Request | e.Request, fields: tuple[object, ...], told: bool) -> None:
        self.request, self.fields, self.told, self.waits_for = request, fields, told, ""
        self.numbers, self.at = [request.number], -math.inf


class Conversation:
    """The conversation of one process in one start of its job; see the module's text.

    Args:
        worker: this process's worker.
        incarnation: number of this start of its job.
        mesh: the shape of the run, which the scheduler must serve; None checks nothing.
        host: the worker whose process has started the scheduler, which ends with it; None if another program has.
        clock: returns seconds.
    """

    def __init__(
        self,
        worker: Worker,
        incarnation: int,
        mesh: m.Shape | None = None,
        host: Worker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker, self.incarnation, self._mesh, self._host = worker, incarnation, mesh, host
        self.joined = False
        """True if the worker takes part in groups, as far as it knows."""
        self.about: About | None = None
        """Description of this worker for people, sent when it joins."""
        self.leases, self.rows, self.spans = HeardLeases(clock), RowBuffer(), SpanReport()
        self._heard = self._life = self.earlier = -1
        """Highest sequence of a group heard of; life of the scheduler whose answers count, once this process has
        introduced itself to a restarted one; and highest sequence that earlier schedulers may have given to a group."""
        self._answered: int | None = None
        """Iteration of the newest group heard of since the worker joined."""
        self._unanswered, self._unanswered_since = 0.0, 0.0
        """Beats in a row without an answer (−∞ once that was reported), and when the first one was sent."""
        self._invitations: deque[m.Invitation] = deque(maxlen=INVITED)
        self.epoch = Epoch(0, (), "no pipeline has come yet")
        """Newest epoch that this process heard of."""
        self.held_up = ""
        """Reason why no turn may begin now; empty if one may."""
        self.stop: e.End | None = None
        self.limit = math.inf
        """Seconds after which a transfer that does not move is given up."""
        self.updates = -1
        """Updates that this worker has made, for people."""
        self.contains = -1
        """Number of rounds whose outcome this worker's model contains; -1 where that is not counted."""
        self.doing: Callable[[], Doing | None] = lambda: None
        """Returns what this worker does, for people."""
        self.awaits: tuple[str, ...] = ()
        """What this worker waits for in vain, as a beat says it."""
        self._number, self._member, self._left, self.offered = 0, False, (-1, -1), ""  # offered: the newest transfer
        self._line: e.Line | None = None
        self._now = e.Now(0)
        """Newest :class:`Now` that was heard."""
        self._earlier: deque[int] = deque(maxlen=MET)
        """Lives of earlier schedulers, whose messages are ignored."""
        self._open: dict[Key, _Open] = {}
        self._stranger: e.Stranger | None = None  # what it lacks is sent before all else, as it is by then
        self._enrolment: e.Enrol | None = None
        self._fixed = False  # whether it has enrolled in an ordinary run, and has not finished it
        self.held: tuple[int, ...] = ()
        """Epochs whose process groups this worker holds."""
        self._exchange: Exchanging | None = None
        self._moved: Callable[[], int] = lambda: 0
        self._misses: tuple[int, tuple[int, ...]] = (0, ())
        """Number of an epoch, and the pipelines that cannot be reached in it."""
        self._met: deque[Met] = deque(maxlen=MET)
        self._dealt_with: deque[str] = deque(maxlen=TRANSFERS)
        self._lasting: dict[Key, tuple[Kind, tuple[object, ...]]] = {}  # told to each scheduler of the run
        self._beaten = self._beat_at = -math.inf
        self.away = False
        """True if a lifeline existed and is gone."""

    # ------------------------------------------------------------------ what it says

    def ask(self, kind: Kind, *fields: Any) -> Key:
        """Ask from the next :meth:`due` or :meth:`due_in_training` on, until ``Replied`` or :meth:`forget` names the
        key."""
        if kind is m.Join:
            self._open.pop(m.Leave, None)
        elif kind is m.Leave:
            self._open.pop(m.Join, None)
            self.joined, self._answered = False, None
        elif kind is m.AskLease:
            self.leases.begin(fields[0])
        return self._say(kind, fields, told=False)

    def tell(self, kind: type[e.Request], *fields: object) -> None:
        """Repeat a request until the scheduler has heard it; no reply comes back."""
        self._say(kind, fields, told=True)

    def forget(self, key: Key) -> str:
        """Stop asking, and return what the scheduler said is missing."""
        request = self._open.pop(key, None)
        return "" if request is None else request.waits_for

    def holds(self, epochs: Collection[int]) -> None:
        """Set the epochs whose process groups this worker holds."""
        self.held = tuple(sorted(epochs))
        self._beat_at = -math.inf

    def misses(self, epoch: int, pipelines: Collection[int]) -> None:
        """Set the pipelines whose worker of this stage cannot be reached from here in ``epoch``, which tries."""
        self._misses = epoch, tuple(sorted(pipelines))
        self._beat_at = -math.inf

    def exchanges(self, exchange: Exchanging | None, moved: Callable[[], int] = lambda: 0) -> None:
        """Set the exchange that this worker is in, if any, and a function that returns the bytes it has ``moved``."""
        before, self._exchange, self._moved = self._exchange, exchange, moved
        if before is not None and (exchange is None or exchange.sequence != before.sequence):
            last, (groups, barriers) = before.sequence, self._left
            self._left = (groups, last) if last >= BARRIERS else (last, barriers)

    def lifeline(self, there: bool) -> None:
        """Note whether the lifeline is there. When it is gone, the scheduler may be, too, and is probed."""
        self.away = not there
        if not there:
            self._beat_at = -math.inf

    def beat_soon(self) -> None:
        """Bring the next beat forward, as there is much to tell."""
        self._beat_at = min(self._beat_at, self._beaten + SOONEST)

    def is_over(self, life: int) -> bool:
        """Return whether the scheduler of that ``life`` was an earlier one."""
        return life in self._earlier

    @property
    def donations(self) -> tuple[str, ...]:
        """Transfers for which this pipeline still has to copy its state; only stage 0 hears of any."""
        left = (transfer for transfer in self._now.donate if transfer not in self._dealt_with)
        return tuple(left) if self.worker.stage == 0 else ()

    @property
    def deadline(self) -> float:
        """Time at which :meth:`due` has something to say."""
        at = (of.at for of in self._open.values() if isinstance(of.request, e.MemberRequest))
        return -math.inf if self._stranger is not None else min([self._beat_at, *at])

    def due(self, now: float) -> list[e.Request]:
        """Return the messages that are due now."""
        said = [] if self._stranger is None else self._introduction(self._stranger)
        if now >= self._beat_at:
            self._unanswered_since = self._unanswered_since if self._unanswered else now
            said.append(self._beat())
            every = FIRST_BEAT if self._line is None else self._line.beat
            self._beaten, self._beat_at = now, now + (min(PROBE, every) if self.away else every)
        for of in self._open.values():
            if isinstance(of.request, e.MemberRequest) and now >= of.at:
                said.append(of.request)
                of.at = now + REPEAT_AFTER
        return said

    def due_in_training(self, now: float) -> list[m.Request]:
        """Return the messages of the thread that trains that are due now."""
        said: list[m.Request] = []
        for kind, of in self._open.items():
            if not isinstance(of.request, m.Request) or now < of.at:
                continue
            if of.at > -math.inf:
                if kind is m.Ready and m.Leave in self._open:
                    continue
                of.request = self._make(type(of.request), *of.fields, again=True)
                assert isinstance(of.request, m.Request)
                of.numbers.append(of.request.number)
            said.append(of.request)
            of.at = now + REPEAT_IN_TRAINING
        return said

    def given_up(self) -> list[Effect]:
        """Return what follows from unanswered beats; call it after :meth:`due`."""
        if self._line is None:
            return []
        silent = self._beaten - self._unanswered_since
        if self._unanswered < LAST_BEAT or (silent < self._line.limit and not self.away):
            return []
        self._unanswered = -math.inf
        if self._fixed:
            host = None if self._host == self.worker else self._host
            its = "its process" if host is None else "its process, or that of the scheduler that it started,"
            ended = "ended without a word"
            unheard = f"has not answered for {silent:.0f} s: it was stopped, or cannot be reached"
            return self._lost_scheduler(f"{its} {ended if self.away else unheard}", host)
        said = "a worker that needs a group waits for it, and it can be started again at the same address"
        return [Warned(f"worker {self.worker}: the scheduler has not answered for {silent:.0f} s; {said}")]

    def _lost_scheduler(self, what: str, host: Worker | None = None) -> list[Effect]:
        """End an ordinary run, whose scheduler is gone."""
        stages, pipelines = self._mesh[:2] if self._mesh else ("M", "N")
        how = f"`sdpipe run --pipelines {pipelines} --stages {stages} SCRIPT`"
        said = f"an ordinary run ends with its scheduler, an elastic one survives it (start it by {how})"
        return self._ends(e.End(f"{what}; {said}", True, True, host))

    # ----------------------------------------------------------------- what it hears

    def hear(self, reply: m.Reply | e.Reply) -> list[Effect]:
        """Return what follows from ``reply``; nothing if it is repeated or was overtaken."""
        self._unanswered = 0
        match reply:
            case e.Noted(wants=(updates, until, asked)):
                self.spans.want(updates, until, asked)
                self.beat_soon()
                return []
            case e.Waits(number=number, reason=reason, epoch=epoch):
                if epoch is not None and self._enrolment is not None:
                    self._enrolment = msgspec.structs.replace(self._enrolment, heard_of=epoch)
                    if (enrolling := self._open.get(("enrol", ""))) is not None:
                        enrolling.request = self._enrolment
                for of in self._open.values():
                    of.waits_for = reason if number in of.numbers else of.waits_for
                return []
            case e.Start(epoch=epoch):
                self._member, self.offered = True, ""
                self._stranger = self._stranger if self._stranger and self._stranger.known else None  # said before that
                return [*self._epoch_began(epoch), *self._replied(reply)]
            case e.Get(receive=receive):
                self.offered = receive.transfer
            case e.Now():
                return self._hear_now(reply)
            case m.Invitation():
                if reply in self._invitations:
                    return []
                self._invitations.append(reply)
                return [reply]
            case e.Stranger(life=life):
                # That scheduler has let this process in since, or another one has followed it.
                overtaken = life in (self._now.version >> e.LIFE, *self._earlier)
                if self._fixed and self._member and not (reply.known or overtaken):
                    return self._lost_scheduler("it was started again, and knows nothing of this run")
                if self.stop is None and (self._stranger is None or self._stranger.known) and not overtaken:
                    self._stranger = reply
                return []
        return self._replied(reply)

    # ---------------------------------------------------------------------- inside

    def _make(self, kind: Kind, *fields: object, again: bool = False) -> Any:
        """Make a request under a new number; add to ``fields`` what the conversation knows."""
        self._number += 1
        if kind is m.Hello:
            fields = (self._mesh,)
        elif kind is m.Join:
            fields = self._mesh, self.about
        elif kind is m.Leave:
            rows = None if again else self.rows.take()  # they may have been heard, and would count twice
            fields = rows, self.contains
        elif kind is m.AskLease:
            fields = *fields, self.leases.done()
        return kind(self.worker, self.incarnation, self._number, *fields)  # type: ignore[arg-type]

    def _say(self, kind: Kind, fields: tuple[object, ...], told: bool) -> Key:
        request: m.Request | e.Request = self._make(kind, *fields)
        key: Key = ("number", request.number)
        match request:
            case m.TrainingRequest():
                key = kind
            case e.Enrol():
                key, self._enrolment, self._fixed = ("enrol", ""), request, is_fixed(request.fingerprint)
            case e.TellReceived(transfer=transfer):
                key = "enrol", transfer
                self._dealt_with.append(transfer)
            case e.Meet(key=name):
                key = "meet", name
            case e.TellSnapshot(transfer=transfer):
                self._dealt_with.append(transfer)
            case e.Publish(done=True) | e.Store() if told:
                self._lasting[key := ("lasts", kind.__name__)] = kind, fields
            case e.Depart(finished=finished):
                key = "departs", request.number
                self._enrolment, self._member, self._fixed = None, False, self._fixed and not finished
        assert told or not (isinstance(key, tuple) and key in self._open), f"another thread asks for {key}, too"
        if self.stop is None or isinstance(request, e.Depart):
            self._open[key] = _Open(request, fields, told)
        return key

    def _replied(self, reply: m.Reply | e.Reply) -> list[Effect]:
        """Close the open requests that ``reply`` answers or refuses, and believe it."""
        found = list[Effect]()
        for key in [key for key, of in self._open.items() if self._is_answered(of, reply)]:
            of = self._open.pop(key, None)
            if of is None:
                continue
            if not of.told or isinstance(reply, e.Refused):
                found.append(Replied(key, reply))
            match of.request, reply:
                case _, e.Refused():
                    continue
                case m.Ready(iteration=iteration), m.Answer(group=group):
                    self._heard, self._answered = max(self._heard, group.sequence), iteration
                case _, m.Dealt(lease=lease):
                    self.leases.hear(lease)
                case m.Join(), _:
                    self.joined = True
                case m.Leave(), _:
                    self._open.pop(m.Ready, None)
                    self._answered = None
                case _, e.HasMet(met=met):
                    self._met.append(met)
        return found

    def _is_answered(self, of: _Open, reply: m.Reply | e.Reply) -> bool:
        if isinstance(reply, e.Refused):
            return reply.number in of.numbers if reply.number else isinstance(of.request, _DECIDED_LATER)
        if not isinstance(reply, _ANSWERS.get(type(of.request), (e.Noted,))):
            return False
        match of.request, reply:
            case m.Ready(iteration=iteration), m.Answer():
                outdated = reply.life != self._life > -1
                return not outdated and m.iteration_of(self.worker, reply) == iteration
            case m.AskLease(segment=segment, ordinal=ordinal), m.Dealt(lease=lease, number=number):
                return (lease.segment, lease.ordinal) == (segment, ordinal) and number in of.numbers
            case e.Meet(key=key), e.HasMet(met=met):
                return met.key == key
            case _, e.Get(receive=receive):
                return receive.transfer not in self._dealt_with
            case _, e.Noted(number=number) | e.Stored(number=number):
                return number in of.numbers
        return True

    def _hear_now(self, now: e.Now) -> list[Effect]:
        if now.over is not None:
            return self._ends(now.over)
        life, before = now.version >> e.LIFE, self._now.version >> e.LIFE
        if self.is_over(life):
            return []
        if life != before:
            self._earlier.append(before)
            self._now, self._life = e.Now(0), life if self._life > -1 else -1
        effects = [] if now.epoch is None else self._epoch_began(now.epoch)
        if now.version <= self._now.version:
            return effects
        if now.line is not None and now.line != self._line:
            self._line, self.limit = now.line, now.line.limit
            effects.append(Connect(now.line.port, now.line.nonce))
        self._now, self.held_up = now, self.held_up if now.hold is None else now.hold
        return effects + [GroupBroke(sequence) for sequence in now.stuck]

    def _ends(self, stop: e.End) -> list[Effect]:
        if self.stop is not None:
            return []
        self.stop, self._stranger, self.offered = stop, None, ""
        self._open = {key: of for key, of in self._open.items() if isinstance(of.request, e.Depart)}
        return [stop]

    def _epoch_began(self, epoch: Epoch) -> list[Effect]:
        if epoch.number <= self.epoch.number:
            return []
        self.epoch = epoch
        return [EpochBegan(epoch)]

    def _introduction(self, stranger: e.Stranger) -> list[e.Request]:
        self._stranger = None
        if not stranger.known:
            if self._member:  # else it is a scheduler that has not let this process in yet
                self._life, self.earlier = stranger.life, self._heard
                self._dealt_with.extend(self.donations)
            self._open = {key: of for key, of in self._open.items() if not of.told}
            for kind, fields in tuple(self._lasting.values()) if self._member else ():
                self._say(kind, fields, told=True)
            for of in self._open.values():
                if isinstance(of.request, m.AskLease):  # it has not heard of an answer that was not read yet
                    of.numbers, of.at = [], 0.0
                elif isinstance(of.request, e.MemberRequest):
                    of.at = -math.inf
        if self._enrolment is None:
            return []
        fingerprint = self._enrolment.fingerprint
        if not self._member:
            return [self._make(e.Enrol, fingerprint, None, self._enrolment.heard_of)]
        resumes = e.Resumes(
            self.epoch,
            self.held,
            tuple(self._met),
            self._heard,
            self.leases.book(),
            self.joined,
            self._answered,
            self.about,
            self.contains,
        )
        return [self._make(e.Enrol, fingerprint, resumes)]

    def _beat(self) -> e.Request:
        missed_in, misses = self._misses
        epoch = self.epoch.number
        exchange = self._exchange and msgspec.structs.replace(self._exchange, moved=self._moved())
        self._unanswered += 1
        beat: e.Beat = self._make(
            e.Beat,
            self.held,
            epoch,
            self._enrolment is not None,
            self._now.version,
            exchange,
            self._left,
            misses if missed_in == epoch else (),
            self.updates,
            self.joined,
            self.rows.take(),
            self.leases.progress(),
            self.spans.take(),
            self.awaits,
            self.doing(),
            self.contains,
        )
        return beat
