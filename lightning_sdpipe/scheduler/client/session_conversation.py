"""What a worker's session says, repeats, answers and believes: no socket, thread or random number, and no clock but the
one that it is given.

Its owner serialises the calls, sends what is to be said, and carries out the effects::

    send(talk.ask(m.Ready, iteration))               # over the training thread's line
    for request in talk.again(): send(request)       # there too, when nothing has come for a while
    for effect in talk.hear(reply): ...              # Came(m.Ready, answer) among them
    for effect in talk.beat(): ...                   # over the heartbeats' line; replies there are heard ``of_beats``

Rules:

1. A request is open until it is answered, refused, or another one of its kind takes its place; joining and leaving
   take each other's. It is repeated under new numbers, since the scheduler counts each number once.
2. A scheduler that does not know a worker which takes part hears that it joins again, with the answers that others may
   lack, and then what is open. What is open is said on the training thread's line alone, where its answer is waited
   for.
3. A worker that begins to leave does not join again by itself, and its unanswered ready is dropped.
4. A reply that is repeated, or was overtaken, changes nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client.conversation import Connect, MustStop
from lightning_sdpipe.scheduler.client.recovery_report import HeardAnswers, HeardLeases, RowBuffer
from lightning_sdpipe.scheduler.rows import About

LAST_BEAT = 12
"""Heartbeats without an answer, after which a scheduler that is not restarted is given up, and any other is missed."""
INVITED = 64
"""Last invitations that are recognised when they are repeated."""

Kind: TypeAlias = type[m.Request]


@dataclass(frozen=True)
class Send:
    """``request`` is to be sent over the line that is spoken of."""

    request: m.Request


@dataclass(frozen=True)
class Came:
    """What was asked for by the open request of that kind came, or it is refused."""

    kind: Kind
    reply: m.Reply | e.Reply


@dataclass(frozen=True)
class Unheard:
    """A scheduler that may be started again has answered none of the last ``beats``."""

    beats: int


Effect: TypeAlias = Send | Came | Connect | MustStop | m.Invitation | m.Failure | Unheard
"""An invitation is to be followed; by a failure the run is over."""


class SessionConversation:
    """Of ``worker`` in ``session``; see the module's text.

    Args:
        worker: it.
        session: a number of this client; the incarnation of the worker's job in an elastic run.
        mesh: the stages and pipelines of the run, which the scheduler must serve; not checked without.
        elastic: is it an elastic run, in which the worker enrols?
        host: the worker whose process the scheduler ends with, and which has failed if the scheduler answers no
            heartbeats; None for a scheduler that may be started again.
        clock: seconds.
    """

    def __init__(
        self,
        worker: Worker,
        session: int,
        mesh: tuple[int, int] | None = None,
        *,
        elastic: bool = False,
        host: Worker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker, self.session = worker, session
        self.joined = False
        """Does the worker take part, for all it knows?"""
        self.beaten = False
        """Was a heartbeat answered?"""
        self.failure: m.Failure | None = None
        """The first one of the run, if any was heard of."""
        self.leases, self.rows = HeardLeases(clock), RowBuffer()
        self.about: About | None = None
        """For people, when it joins."""
        self._mesh, self._elastic, self._host = mesh, elastic, host
        self._number = 0
        self._open: dict[Kind, list[m.Request]] = {}
        """All that was sent for a request, the newest last; and what it depends on."""
        self._heard = HeardAnswers(worker)
        self._answered: int | None = None
        """The iteration whose group was heard of last, since it joined."""
        self._unanswered = 0
        """Heartbeats in a row."""
        self._invitations: deque[m.Invitation] = deque(maxlen=INVITED)
        self._nonce: bytes | None = None

    # ------------------------------------------------------------------ what it says

    def ask(self, kind: Kind, *fields: Any) -> m.Request:
        """What to send; it is open from now on."""
        if kind is m.Hello:
            fields = (self._mesh,)
        elif kind is m.Join:
            fields = self._mesh, False, self._heard.highest, (), self._elastic, None, self.about
            self._open.pop(m.Leave, None)
        elif kind is m.Leave:
            self.joined, self._answered = False, None
            self._heard.forget()
            self._open.pop(m.Join, None)
            self._open.pop(m.Ready, None)
            fields = (self.rows.take(),)
        elif kind is m.AskLease:
            self.leases.begin(fields[0])
            fields = *fields, self.leases.done()
        self._open[kind] = [self.make(kind, *fields)]
        return self._open[kind][0]

    def asks(self, *kinds: Kind) -> bool:
        """Is a request of any of these kinds open?"""
        return any(kind in self._open for kind in kinds)

    def again(self) -> list[m.Request]:
        """What is open, under new numbers."""
        for sent in self._open.values():
            self._number += 1
            fresh: dict[str, Any] = {}
            if isinstance(sent[-1], m.AskLease):
                fresh = {"done": self.leases.done()}
            elif isinstance(sent[-1], m.Leave):
                fresh = {"rows": None}  # which may have been heard, and would count twice
            sent.append(msgspec.structs.replace(sent[-1], number=self._number, **fresh))
        return [sent[-1] for sent in self._open.values()]

    def beat(self) -> list[Effect]:
        """A sign of life, and what follows from the silence after earlier ones."""
        effects: list[Effect] = []
        if self._unanswered == LAST_BEAT and self.failure is None:
            if self._host is None:
                effects.append(Unheard(LAST_BEAT))
            else:
                what = "it ended without a word, and the scheduler with it"
                effects += self._ends(m.Failure(self._host, what))
        self._unanswered += 1
        progress = self.rows.take(), self.leases.progress()
        return [*effects, Send(self.make(m.Heartbeat, self.joined, *progress))]

    def make(self, kind: Kind, *fields: Any) -> m.Request:
        """A request that is said once, and not open."""
        self._number += 1
        return kind(self.worker, self.session, self._number, *fields)

    # ----------------------------------------------------------------- what it hears

    def hear(self, reply: m.Reply | e.Reply, of_beats: bool = False) -> list[Effect]:
        """What follows from ``reply``, which came over the training thread's line or that ``of_beats``."""
        if of_beats:
            self._unanswered = 0
        match reply:
            case m.Unknown() if self.joined:
                heard = self._heard
                before = True, heard.highest, heard.to_report(), self._elastic, self._answered, self.about
                return self._say_first(self.make(m.Join, self._mesh, *before), of_beats)
            case m.AskLeases() if (book := self.leases.book()) is not None:
                return self._say_first(self.make(m.TellLeases, *book), of_beats)
            case m.Abort(failure=failure) | m.Pulse(failure=m.Failure() as failure):
                return self._ends(failure)
            case m.Pulse():
                self.beaten = True
            case m.Invitation() if reply not in self._invitations:
                self._invitations.append(reply)
                return [reply]
            case e.Line(port=port, nonce=nonce) if nonce != self._nonce:
                self._nonce = nonce
                return [Connect(port, nonce)]
            case e.MustEnd(reason=reason):
                return [MustStop(reason, run=False, failed=True)]
        answered = [kind for kind, sent in self._open.items() if self._is_answered(sent, reply)]
        for kind in answered:
            del self._open[kind]
        return [Came(kind, reply) for kind in answered]

    # ---------------------------------------------------------------------- inside

    def _say_first(self, request: m.Request, of_beats: bool) -> list[Effect]:
        if of_beats:
            return [Send(request)]
        again = self.again()
        for sent in self._open.values():
            sent.insert(1, request)  # if it is refused, so are they
        return [Send(request), *map(Send, again)]

    def _ends(self, failure: m.Failure) -> list[Effect]:
        if self.failure is not None:
            return []
        self.failure = failure
        return [failure]

    def _is_answered(self, sent: list[m.Request], reply: m.Reply | e.Reply) -> bool:
        """Says so, and believes the answer."""
        match sent[-1], reply:
            case _, m.Refused(number=number):
                return number in [request.number for request in sent]
            case m.Ready(iteration=iteration), m.Answer() if reply.iteration_of(self.worker) == iteration:
                self._heard.hear(reply)
                self._answered = iteration
                return True
            case m.AskLease(segment=segment, ordinal=ordinal), m.Dealt(lease=lease):
                if (lease.segment, lease.ordinal) == (segment, ordinal):
                    self.leases.hear(lease)
                    return True
            case m.Join(), m.Acknowledged(number=number) if number >= sent[0].number:
                self.joined = True
                self._heard.joined()
                return True
            case (
                (m.Leave(), m.Acknowledged(number=number))
                | (m.AskFailure(), m.FirstFailure(number=number))
                | (m.AskMissing(), m.Missing(number=number))
            ):
                return number >= sent[0].number
        return isinstance(sent[-1], m.Hello) and isinstance(reply, m.Welcome)
