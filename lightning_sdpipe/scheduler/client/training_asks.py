"""What a worker's training thread asks of the scheduler, repeats, and believes of the answers: a part of the
:class:`~lightning_sdpipe.scheduler.client.conversation.Conversation` of the worker's process.

Rules:

1. A request is open until it is answered, refused, or another one of its kind takes its place; joining and leaving
   take each other's. It is repeated under new numbers, since the scheduler counts each number once.
2. What a scheduler that was started again must know is in :meth:`TrainingAsks.resumption`.
3. A worker that begins to leave takes part no longer, and its unanswered ready is dropped.
4. A reply that is repeated, or was overtaken, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from lightning_sdpipe.dealing.leases import Done, Segment
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client.effects import Came, Kind
from lightning_sdpipe.scheduler.client.recovery_report import HeardAnswers, HeardLeases, RowBuffer, SpanReport
from lightning_sdpipe.scheduler.rows import About, NewRows, Spans


class TrainingAsks:
    """Of ``worker``.

    Args:
        worker: it.
        make: a request of that kind with these fields, under a new number.
        mesh: the stages and pipelines of the run, which the scheduler must serve; not checked without.
        clock: seconds.
    """

    def __init__(
        self,
        worker: Worker,
        make: Callable[..., Any],
        mesh: tuple[int, int] | None,
        clock: Callable[[], float],
    ) -> None:
        self.worker, self._make, self._mesh = worker, make, mesh
        self.joined = False
        """Does the worker take part, for all it knows?"""
        self.leases, self.rows, self.spans = HeardLeases(clock), RowBuffer(), SpanReport()
        self.about: About | None = None
        """For people, when it joins."""
        self.waits_for = ""
        """What the scheduler said last is missing."""
        self._open: dict[Kind, list[m.Request]] = {}
        """All that was sent for a request, the newest last; and what it depends on."""
        self._heard = HeardAnswers(worker)
        self._answered: int | None = None
        """The iteration whose group was heard of last, since it joined."""

    def ask(self, kind: Kind, *fields: Any) -> m.Request:
        """What to send; it is open from now on."""
        self.waits_for = ""
        if kind is m.Hello:
            fields = (self._mesh,)
        elif kind is m.Join:
            fields = self._mesh, self.about
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
        request: m.Request = self._make(kind, *fields)
        self._open[kind] = [request]
        return request

    def told(self) -> tuple[bool, NewRows | None, tuple[Segment, Done] | None, Spans | None]:
        """What a beat says of the training thread, once."""
        return self.joined, self.rows.take(), self.leases.progress(), self.spans.take()

    def asks(self, *kinds: Kind) -> bool:
        """Is a request of any of these kinds open?"""
        return any(kind in self._open for kind in kinds)

    def again(self) -> list[m.Request]:
        """What is open, under new numbers."""
        for kind, sent in self._open.items():
            fields = list(msgspec.structs.astuple(sent[-1])[3:])
            if kind is m.AskLease:
                fields[-1] = self.leases.done()
            elif kind is m.Leave:
                fields = [None]  # its rows may have been heard, and would count twice
            sent.append(self._make(kind, *fields))
        return [sent[-1] for sent in self._open.values()]

    def resumption(self) -> dict[str, Any]:
        """Fields of :class:`~lightning_sdpipe.scheduler.membership_protocol.Resumes`."""
        heard = self._heard
        fields = {"heard": heard.highest, "book": self.leases.book(), "joined": self.joined, "about": self.about}
        return {**fields, "answered": self._answered, "answers": heard.to_report()} if self.joined else fields

    def hear(self, reply: m.Reply | e.Reply) -> list[Came]:
        """What follows from ``reply``, which came over the training thread's line."""
        if isinstance(reply, e.Waits) and any(sent[-1].number == reply.number for sent in self._open.values()):
            self.waits_for = reply.reason
        answered = [kind for kind, sent in self._open.items() if self._is_answered(sent, reply)]
        for kind in answered:
            del self._open[kind]
        return [Came(kind, reply) for kind in answered]

    def _is_answered(self, sent: list[m.Request], reply: m.Reply | e.Reply) -> bool:
        """Says so, and believes the answer."""
        match sent[-1], reply:
            case _, e.Refused(number=number):
                return number in [request.number for request in sent]
            case m.Ready(iteration=iteration), m.Answer() if m.iteration_of(self.worker, reply) == iteration:
                self._heard.hear(reply)
                self._answered = iteration
                return True
            case m.AskLease(segment=segment, ordinal=ordinal), m.Dealt(lease=lease):
                if (lease.segment, lease.ordinal) == (segment, ordinal):
                    self.leases.hear(lease)
                    return True
            case m.Join(), e.Noted(number=number) if number >= sent[0].number:
                self.joined = True
                return True
            case m.Leave(), e.Noted(number=number):
                return number >= sent[0].number
        return isinstance(sent[-1], m.Hello) and isinstance(reply, m.Welcome)
