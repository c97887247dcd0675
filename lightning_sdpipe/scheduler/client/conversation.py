"""What a process of an elastic run says, repeats and believes: no clock, socket, thread or random number.

Its owner serialises the calls, carries out the effects, and says what time it is::

    key = talk.ask(e.Meet, "pause/1", b"")           # or tell(...), of which nothing but that it was heard comes back
    for send in talk.due(now): ...                   # first times, repetitions, beats; again at talk.deadline
    for effect in talk.hear(reply): ...              # Replied(key, reply) among them

Rules:

1. A request is open until it is answered, refused or forgotten, and is said every :data:`REPEAT_AFTER` seconds until
   then. Only a reply of the kind that it asks for answers it, and only once.
2. What is believed (the epoch, process groups, an exchange) is said in beats: loss and overtaking do not matter. A beat
   is due at once when what others wait for has changed.
3. A scheduler that does not know the process hears who it is first, and then what is open, since it may have been
   started again. What was told to the one before is forgotten, but for the newest checkpoint.
4. A transfer is heard of once: a snapshot that was taken or dropped is not asked for again by a message that was
   overtaken, nor is a state that this process has answered for.
5. When the process must end, or the run is over, everything open but a departure is closed, and nothing is said any
   more but that and beats.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias

from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.membership.members import Epoch, Exchanging, Met
from lightning_sdpipe.membership.stuck import MEETINGS
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import membership_protocol as e

FIRST_BEAT = 0.25
"""Seconds between beats before the scheduler has said how many it wants."""
PROBE = 0.05
"""The same, while the scheduler seems to be away, so that one that is started again hears of the run soon."""
REPEAT_AFTER = 0.5
"""Seconds after which an unanswered request is repeated."""
REMEMBERED = 1024
"""Groups of which it is known that their result is in the model."""
TRANSFERS = 64
"""Last ones of which it is known that they are dealt with."""
MET = 8
"""Last meetings that are reported to a scheduler which was started again."""

Key: TypeAlias = tuple[str, str | int]

_ANSWERS: dict[type[e.Request], tuple[type[e.Reply], ...]] = {
    e.Enrol: (e.Start, e.Get),
    e.TellReceived: (e.Start, e.Get),
    e.Meet: (e.HasMet,),
    e.AskRegroup: (e.Regroup, e.Skip),
    e.Fetch: (e.Values,),
    e.Add: (e.Sum,),
    e.Remove: (e.Sum,),
}
"""What answers a request; any other one is noted."""
_DECIDED_LATER = e.Enrol | e.TellReceived | e.Meet | e.AskRegroup
"""Their answers name what they belong to; the rest are answered by number."""


@dataclass(frozen=True)
class Replied:
    """What was asked for under ``key`` came."""

    key: Key
    reply: e.Reply


@dataclass(frozen=True)
class NotGranted:
    """What was asked or told under ``key`` cannot be."""

    key: Key
    reason: str


@dataclass(frozen=True)
class EpochBegan:
    """The members have changed."""

    epoch: Epoch


@dataclass(frozen=True)
class GroupBroke:
    """Another member did not get the result of the group ``sequence``, and this one does not have it either."""

    sequence: int


@dataclass(frozen=True)
class Connect:
    """A lifeline is to be opened, in place of the one before."""

    port: int
    nonce: bytes


@dataclass(frozen=True)
class MustStop:
    """This process must end; or the ``run`` is over, perhaps since it ``failed``."""

    reason: str
    run: bool
    failed: bool


Effect: TypeAlias = Replied | NotGranted | EpochBegan | GroupBroke | Connect | MustStop


class _Open:
    """A request that was not answered yet."""

    __slots__ = ("at", "request", "told", "waits_for")

    def __init__(self, request: e.Request, told: bool) -> None:
        self.request, self.told = request, told
        self.at = -math.inf
        """When it is due again."""
        self.waits_for = ""


class Conversation:
    """One process's: of ``worker`` in the start ``incarnation`` of its pipeline's job; see the module's text."""

    def __init__(self, worker: Worker, incarnation: int) -> None:
        self.worker, self.incarnation = worker, incarnation
        self.epoch = Epoch(0, (), "nobody has come yet")
        """The newest that was heard of."""
        self.held_up = ""
        """Why no turn may begin now, if so."""
        self.donations: tuple[str, ...] = ()
        """Transfers for which this pipeline has still to copy its state; only stage 0 hears of any."""
        self.stop: MustStop | None = None
        self.limit = math.inf
        """Seconds after which a transfer that does not move is given up, as the scheduler says."""
        self.updates = -1
        """That this worker has made, for people."""
        self._number = 0
        self._open: dict[Key, _Open] = {}
        self._introduction: e.Request | None = None
        self._enrolment: e.Enrol | None = None
        self._member = False
        self.held: tuple[int, ...] = ()
        """Epochs of whose members this worker has a process group."""
        self._exchange: Exchanging | None = None
        self._left = (-1, -1)
        self._misses: tuple[int, tuple[int, ...]] = (0, ())
        """Of the epoch of that number."""
        self._since = 0
        """The number of the first epoch of which this process was a member."""
        self._met: deque[Met] = deque(maxlen=MET)
        self._regrouped: deque[tuple[int, Group]] = deque(maxlen=MET)
        self._dealt_with: deque[str] = deque(maxlen=TRANSFERS)
        self._completed: OrderedDict[int, None] = OrderedDict()
        self._asked_for: set[int] = set()
        """Groups that broke, and whose result this worker does not have yet."""
        self._published: e.Publish | None = None
        self._beat_at, self._beat_every = -math.inf, FIRST_BEAT
        self._nonce = b""
        self._away = False
        """Was there a lifeline that is gone?"""

    # ------------------------------------------------------------------ what it says

    def ask(self, kind: Callable[..., e.Request], *fields: object) -> Key:
        """Ask, from the next :meth:`due` on, until :class:`Replied` or :class:`NotGranted` names the key, or
        :meth:`forget`.

        Raises:
            SchedulerError: that is being asked already.
        """
        return self._say(self._make(kind, *fields), told=False)

    def tell(self, kind: Callable[..., e.Request], *fields: object) -> None:
        """Say it until it was heard."""
        self._say(self._make(kind, *fields), told=True)

    def forget(self, key: Key) -> str:
        """Ask no longer; what the scheduler said that is missing."""
        request = self._open.pop(key, None)
        return "" if request is None else request.waits_for

    def holds(self, epochs: Collection[int]) -> None:
        """This worker has process groups of these epochs, and of no others (any more)."""
        self.held = tuple(sorted(epochs))
        self._beat_at = -math.inf

    def misses(self, epoch: int, pipelines: Collection[int]) -> None:
        """In that epoch, which tries, this worker cannot reach those of its stage in ``pipelines``."""
        self._misses = epoch, tuple(sorted(pipelines))
        self._beat_at = -math.inf

    def exchanges(self, exchange: Exchanging | None) -> None:
        """This worker is in ``exchange`` now, or in none."""
        before, self._exchange = self._exchange, exchange
        if before is not None and (exchange is None or exchange.sequence != before.sequence):
            last, (groups, meetings) = before.sequence, self._left
            self._left = (groups, last) if last >= MEETINGS else (last, meetings)

    def completed(self, sequence: int) -> None:
        """The result of the group ``sequence`` is in the model; told only if another member misses it."""
        asked = sequence in self._asked_for
        self._settle(sequence)
        if asked:
            self.tell(e.TellCompleted, sequence)

    def lifeline(self, there: bool) -> None:
        """It is there, or gone: then the scheduler may be, too, and is looked for."""
        self._away = not there
        if not there:
            self._beat_at = -math.inf

    @property
    def deadline(self) -> float:
        """When something is due."""
        if self._introduction is not None:
            return -math.inf
        return min([self._beat_at, *(request.at for request in self._open.values())])

    def due(self, now: float) -> list[e.Request]:
        """What is to be said now."""
        said: list[e.Request] = []
        if self._introduction is not None:
            said.append(self._introduction)
            self._introduction = None
        if now >= self._beat_at:
            said.append(self._beat())
            self._beat_at = now + (min(PROBE, self._beat_every) if self._away else self._beat_every)
        for request in self._open.values():
            if now >= request.at:
                said.append(request.request)
                request.at = now + REPEAT_AFTER
        return said

    # ----------------------------------------------------------------- what it hears

    def hear(self, reply: e.Reply) -> list[Effect]:
        """What follows from ``reply``; nothing from one that is repeated, or was overtaken."""
        match reply:
            case e.Noted(number=number) | e.Values(number=number) | e.Sum(number=number):
                return self._answered(
                    reply, lambda of: of.request.number == number and not isinstance(of.request, _DECIDED_LATER)
                )
            case e.Waits(number=number, reason=reason):
                for request in self._open.values():
                    if request.request.number == number:
                        request.waits_for = reason
            case e.Start(epoch=epoch):
                self._member = True
                return [*self._epoch_began(epoch), *self._answered(reply, lambda of: True)]
            case e.Get(receive=receive):
                if receive.transfer not in self._dealt_with:
                    return self._answered(reply, lambda of: True)
            case e.NewEpoch(epoch=epoch):
                return self._epoch_began(epoch)
            case e.Give(donate=donate):
                if donate.transfer not in (*self._dealt_with, *self.donations) and self.worker.stage == 0:
                    self.donations += (donate.transfer,)
            case e.Drop(transfer=transfer):
                self._deal_with(transfer)
            case e.Hold(reason=reason):
                self.held_up = reason
            case e.HasMet(met=met):
                if answered := self._answered(reply, lambda of: getattr(of.request, "key", None) == met.key):
                    self._met.append(met)
                return answered
            case e.Regroup(sequence=sequence) | e.Skip(sequence=sequence):
                answered = self._answered(
                    reply, lambda of: isinstance(of.request, e.AskRegroup) and of.request.group.sequence == sequence
                )
                if answered:
                    self._settle(sequence)
                    if isinstance(reply, e.Regroup):
                        self._regrouped.append((sequence, reply.group))
                return answered
            case e.Broke(sequence=sequence):
                if sequence in self._completed:
                    self.tell(e.TellCompleted, sequence)
                else:
                    self._asked_for.add(sequence)
                    return [GroupBroke(sequence)]
            case e.Denial(reason=reason, number=number):
                return self._denied(reason, number)
            case e.MustEnd(reason=reason):
                return self._ends(MustStop(reason, run=False, failed=True))
            case e.Over(reason=reason, failed=failed):
                return self._ends(MustStop(reason, run=True, failed=failed))
            case e.Line(port=port, nonce=nonce, beat=beat, limit=limit) if nonce != self._nonce:
                self._nonce, self._beat_every, self.limit = nonce, beat, limit
                return [Connect(port, nonce)]
            case e.Stranger() if self.stop is None:
                self._introduce()
        return []

    # ---------------------------------------------------------------------- inside

    def _make(self, kind: Callable[..., e.Request], *fields: object) -> e.Request:
        self._number += 1
        return kind(self.worker, self.incarnation, self._number, *fields)

    def _say(self, request: e.Request, told: bool) -> Key:
        key: Key = ("number", request.number)
        match request:
            case e.Enrol():
                key, self._enrolment = ("enrol", ""), request
            case e.TellReceived(transfer=transfer):
                key = "enrol", transfer
                self._dealt_with.append(transfer)
            case e.Meet(key=name):
                key = "meet", name
            case e.AskRegroup(group=group):
                key = "regroup", group.sequence
            case e.TellCompleted(sequence=sequence):
                key = "completed", sequence
            case e.TellSnapshot(transfer=transfer):
                self._deal_with(transfer)
            case e.Publish(done=True):
                key, self._published = ("published", ""), request
            case e.Depart():
                self._enrolment, self._member = None, False
        if key in self._open and not told:
            raise SchedulerError(f"worker {self.worker} already asks for {' '.join(map(str, key))}, in another thread")
        if self.stop is None or isinstance(request, e.Depart):
            self._open[key] = _Open(request, told)
        return key

    def _answered(self, reply: e.Reply, belongs: Callable[[_Open], bool]) -> list[Effect]:
        kind, found = type(reply), list[Effect]()
        for key, request in list(self._open.items()):
            if kind in _ANSWERS.get(type(request.request), (e.Noted,)) and belongs(request):
                del self._open[key]
                if not request.told:
                    found.append(Replied(key, reply))
        return found

    def _denied(self, reason: str, number: int) -> list[Effect]:
        """0: whatever waits for others."""
        opened = [(key, request.request) for key, request in self._open.items()]
        hit = [key for key, of in opened if (of.number == number if number else isinstance(of, _DECIDED_LATER))]
        for key in hit:
            del self._open[key]
        return [NotGranted(key, reason) for key in hit]

    def _ends(self, stop: MustStop) -> list[Effect]:
        if self.stop is not None:
            return []
        self.stop, self._introduction = stop, None
        self._open = {key: request for key, request in self._open.items() if isinstance(request.request, e.Depart)}
        return [stop]

    def _epoch_began(self, epoch: Epoch) -> list[Effect]:
        if epoch.number <= self.epoch.number:
            return []
        self.epoch = epoch
        if not self._since and any(member.incarnation == self.incarnation for member in epoch.members):
            self._since = epoch.number
        return [EpochBegan(epoch)]

    def _deal_with(self, transfer: str) -> None:
        self._dealt_with.append(transfer)
        self.donations = tuple(other for other in self.donations if other != transfer)

    def _settle(self, sequence: int) -> None:
        self._asked_for.discard(sequence)
        self._completed[sequence] = None
        while len(self._completed) > REMEMBERED:
            self._completed.popitem(last=False)

    def _introduce(self) -> None:
        for key in [key for key, request in self._open.items() if request.told]:
            del self._open[key]
        self._dealt_with.extend(self.donations)
        self.donations = ()
        if self._enrolment is None:
            return
        fingerprint = self._enrolment.fingerprint
        if self._member:
            before = tuple(self._met), self._since, tuple(self._regrouped)
            self._introduction = self._make(e.Resume, fingerprint, self.epoch, self.held, *before)
            if self._published is not None:
                self._say(self._published, told=True)
        else:
            self._introduction = self._make(e.Enrol, fingerprint)
        for request in self._open.values():
            request.at = -math.inf

    def _beat(self) -> e.Request:
        missed_in, misses = self._misses
        enrolled, held, number = self._enrolment is not None, bool(self.held_up), self.epoch.number
        seen = self._exchange, self._left, misses if missed_in == number else ()
        return self._make(e.Beat, self.held, number, enrolled, held, *seen, self.updates)
