"""A worker's side of the scheduler: a socket for its training thread, and heartbeats from another thread.

A request that is not answered is repeated, so a scheduler that was restarted at the same address finds its
workers again by itself: whoever it does not know joins again and repeats the ready that is unanswered.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import zmq

from lightning_sdpipe.dealing.leases import Lease, Segment
from lightning_sdpipe.errors import MustEndError, RefusedError, SchedulerError, WorkerFailedError
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client.client_thread import Lifeline, open_lifeline
from lightning_sdpipe.scheduler.client.connection import GLANCE, Connection
from lightning_sdpipe.scheduler.client.heartbeat import HeartbeatThread
from lightning_sdpipe.scheduler.client.recovery_report import HeardAnswers, HeardLeases
from lightning_sdpipe.scheduler.client.step_timer import StepTimer
from lightning_sdpipe.scheduler.credentials import WorkerKeys

__all__ = ["Failure", "RunAborted", "SchedulerClient"]

Failure = m.Failure
log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply", bound=m.Reply)

CONNECT_TIMEOUT = 15.0
"""Seconds in which a scheduler must answer for the first time."""
LAST_WORDS = 1.0
"""Seconds that a failing worker spends at most on telling the others."""
LAST_BEAT = 12
"""Heartbeats without an answer, after which a scheduler that is not restarted is given up, and any other is missed."""
MEANWHILE = 0.02
"""Seconds between two looks at what else there is to do."""
REPEAT_AFTER = 1.0
"""Seconds after which an unanswered request is repeated."""


class RunAborted(WorkerFailedError):
    """The scheduler ended the run; ``failure`` says who failed first and why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class SchedulerClient:
    """Speaks for one worker. Every wait ends after ``timeout`` seconds with a :class:`SchedulerError`, or with
    :class:`MustEndError` when an elastic run went on without this process.

    All methods belong to one thread, the one that trains. ``mesh`` is the number of stages and of pipelines of the run,
    which the scheduler must serve; it is not checked without. It must answer within ``connect_timeout`` seconds when it
    is first spoken to.
    ``heartbeat`` is in seconds, None for none.
    ``on_abort`` is called in the heartbeats' thread when the run is over because another worker failed, which the
    training thread may not learn while it waits for a tensor.
    ``host`` is the worker whose process the scheduler ends with; when many heartbeats in a row are not answered, that
    worker is taken to have failed. None for a scheduler that may be restarted.
    ``on_invitation`` is called there too, in order, for groups that the worker is a passive member of, with the last
    iteration that had been answered before, None if none had since the worker joined. It may be set until :meth:`join`.
    ``incarnation`` is that of the worker's job in an elastic run, whose
    :class:`~lightning_sdpipe.scheduler.client.membership_client.MembershipClient` enrols it before it joins; None in
        any other.
    """

    def __init__(
        self,
        address: str,
        worker: Worker,
        *,
        mesh: tuple[int, int] | None = None,
        timeout: float = 60.0,
        connect_timeout: float = CONNECT_TIMEOUT,
        credentials: WorkerKeys | None = None,
        heartbeat: float | None = 1.0,
        on_invitation: Callable[[Group, int | None], None] | None = None,
        on_abort: Callable[[Failure], None] | None = None,
        host: Worker | None = None,
        incarnation: int | None = None,
    ) -> None:
        self.address = address
        self.worker = worker
        self.aborted: Failure | None = None
        """The first failure of the run, as soon as the heartbeats heard of it."""
        self.serves: tuple[int, int] | None = None
        """The stages and pipelines that the scheduler serves, once it has been greeted."""
        self.meanwhile: Callable[[], object] | None = None
        """Called often while a lease is waited for."""
        self._mesh = mesh
        self._timeout = timeout
        self._connect_timeout = min(timeout, connect_timeout)
        self._credentials = credentials
        self._heartbeat = heartbeat
        self.on_invitation = on_invitation
        self._on_abort = on_abort
        self._host = host
        self._incarnation = incarnation
        self._session = secrets.randbits(63) if incarnation is None else incarnation
        self._number = 0
        self._lock = threading.Lock()
        """Guards what a rejoin tells, and that no join is numbered after the leave that ends what it began."""
        self.policy: str | None = None
        """What the scheduler decides by, as JSON, once it has answered."""
        self._joined = False
        self._iteration: int | None = None
        self._heard = HeardAnswers(worker)
        self._answered: int | None = None
        """The iteration whose group was heard of last, since it joined."""
        self._early: m.Answer | None = None
        """To the unanswered ready, if it came while something else was waited for."""
        self._leases = HeardLeases()
        self._steps = StepTimer()
        self._invited = 0
        self._beaten = False
        self._invitations = threading.Condition()
        """Of the two, which the heartbeats' thread changes."""
        self._thread: HeartbeatThread | None = None
        self._lifeline: Lifeline | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._connection = Connection(self._context, address, credentials, m.routing_id(worker, incarnation))
        except BaseException:
            self._context.term()
            raise

    def greet(self) -> None:
        """Make sure that the scheduler is there, and the right one.

        Raises:
            SchedulerError: it does not answer, the keys do not fit, it speaks another version, or serves another mesh.
        """
        if self.policy is not None:
            return
        connection, until, repeat_at = self._connection, time.monotonic() + self._connect_timeout, 0.0
        while (now := time.monotonic()) < until:
            if now >= repeat_at:
                connection.send(m.encode(m.Hello(self.worker, self._session, self._next_number(), self._mesh)))
                repeat_at = now + REPEAT_AFTER
            welcome = self._receive(m.Welcome, lambda reply: True, min(until, now + GLANCE))
            if welcome is not None:
                self.serves = welcome.mesh
                connection.established()
                self.policy = welcome.policy
                return
            connection.check()
        raise SchedulerError(
            f"worker {self.worker} waited {self._connect_timeout:g} s for the scheduler at {self.address} to answer; "
            f"{connection.silence()}"
        )

    def join(self) -> None:
        """Take part from now on; returns when the scheduler has acknowledged it."""
        self.greet()
        self._ask(self._join, m.Acknowledged, "the scheduler to let it join")
        self._joined = True
        self._heard.joined()
        self._steps.start()
        if self._heartbeat is not None and self._thread is None:
            name = m.heartbeat_id(self.worker, self._incarnation)
            self._thread = HeartbeatThread(
                lambda: Connection(self._context, self.address, self._credentials, name),
                _Pulse(self),
                self._heartbeat,
            )
            self._thread.start()
            if self.on_invitation is not None:  # which reach nobody before the scheduler knows that connection
                self._wait_there(lambda: self._beaten, "the scheduler to answer its first heartbeat")

    def leave(self) -> None:
        """Pause or end the epoch; returns when the scheduler has acknowledged it."""
        self._iteration = self._early = None
        with self._lock:
            self._joined = False
            self._answered = None
            self._heard.forget()
        self._wait_for_invitations(self._ask(self._leave, m.Acknowledged, "the scheduler to let it leave").invitations)

    def ready(self, iteration: int) -> None:
        """The local step of ``iteration`` is done; does not wait. :meth:`group` fetches the answer."""
        if not self._joined:
            raise SchedulerError(
                f"worker {self.worker} reported iteration {iteration} without having joined; call join() first"
            )
        if self._iteration is not None:
            raise SchedulerError(
                f"worker {self.worker} reported iteration {iteration} before it fetched the group of "
                f"iteration {self._iteration}; call group() after every ready()"
            )
        self._iteration = iteration
        self._transmit(m.Ready(self.worker, self._session, self._next_number(), iteration))

    def group(self) -> Group:
        """Wait for the answer to the last :meth:`ready`, and for the invitations that were sent before it."""
        iteration = self._iteration
        if iteration is None:
            raise SchedulerError(f"worker {self.worker} asked for a group without being ready; call ready() first")
        answer = self._early or self._wait(
            m.Answer,
            lambda reply: reply.iteration_of(self.worker) == iteration,
            lambda: self._transmit(m.Ready(self.worker, self._session, self._next_number(), iteration)),
            f"the group of its iteration {iteration}",
        )
        self._iteration = self._early = None
        with self._lock:
            self._heard.hear(answer)
            self._answered = iteration
        self._wait_for_invitations(answer.invitations_of(self.worker))
        return answer.group

    def lease(self, segment: Segment, ordinal: int) -> Lease:
        """Wait for lease ``ordinal`` of this worker's pipeline in ``segment``, which all its stages get alike.

        After one that is not empty the answer comes at once: batches, or an empty lease. After an empty one, which is
        the sign to train whatever is held, it comes when there is something, or the segment is over.
        """
        self._leases.begin(segment)

        def matches(reply: m.Dealt) -> bool:
            return reply.lease.segment == segment and reply.lease.ordinal == ordinal

        def ask() -> None:
            done = self._leases.done()
            self._transmit(m.AskLease(self.worker, self._session, self._next_number(), segment, ordinal, done))

        ask()
        lease = self._wait(m.Dealt, matches, ask, f"lease {ordinal} of {segment}").lease
        self._leases.hear(lease)
        return lease

    def trained(self, batches: int) -> None:
        """So many batches of the segment are trained by this worker; heartbeats tell, this only notes it."""
        self._leases.trained(batches)

    def step_ended(self, iteration: int, waited: float) -> None:
        """The step of ``iteration`` is over; ``waited`` are all seconds so far that this worker waited for replicas.

        Heartbeats tell the scheduler how long steps take lately; this only notes it.
        """
        self._steps.ended(iteration, waited)

    def failed(self, reason: str) -> None:
        """Tell the scheduler, and through it everybody, that this worker failed. Never raises."""
        try:
            reason = reason[: m.MAX_REASON_CHARACTERS]
            self._transmit(m.Failed(self.worker, self._session, self._next_number(), reason))
            self._receive(m.Abort, lambda reply: True, time.monotonic() + LAST_WORDS)
        except Exception:  # the failure that is being reported matters more than the one to report it
            return

    def first_failure(self, timeout: float) -> Failure | None:
        """What failed first in this run, if anything; None also when the scheduler does not answer."""
        try:
            number = self._next_number()
            self._transmit(m.AskFailure(self.worker, self._session, number))
            until = time.monotonic() + timeout
            reply = self._receive(m.FirstFailure, lambda reply: reply.number == number, until)
        except RunAborted as aborted:
            return aborted.failure
        except (MustEndError, SchedulerError):
            return None
        return None if reply is None else reply.failure

    def close(self) -> None:
        """End the thread and free the sockets; safe to call twice."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        if self._lifeline is not None:
            self._lifeline.farewell()
            self._lifeline = None
        self._connection.close()
        self._context.term()

    def _next_number(self) -> int:
        with self._lock:
            self._number += 1
            return self._number

    def _join(self, number: int) -> m.Join:
        elastic = self._incarnation is not None
        return m.Join(self.worker, self._session, number, self._mesh, heard=self._heard.highest, elastic=elastic)

    def _leave(self, number: int) -> m.Leave:
        return m.Leave(self.worker, self._session, number)

    def _ask(self, request: Callable[[int], m.Request], reply: type[_Reply], what: str) -> _Reply:
        first = self._number + 1

        def send() -> None:
            self._transmit(request(self._next_number()))

        send()
        return self._wait(reply, lambda reply: getattr(reply, "number", -1) >= first, send, what)

    def _transmit(self, request: m.Request) -> None:
        if not self._connection.send(m.encode(request)):
            raise SchedulerError(
                f"worker {self.worker} has no connection to the scheduler at {self.address}; check that it "
                "runs, can be reached, and was started with the keys that belong to this worker's"
            )

    def _wait(
        self, kind: type[_Reply], matches: Callable[[_Reply], bool], repeat: Callable[[], None], what: str
    ) -> _Reply:
        until = time.monotonic() + self._timeout
        while (now := time.monotonic()) < until:
            reply = self._receive(kind, matches, min(until, now + REPEAT_AFTER), repeat)
            if reply is not None:
                return reply
            if self.aborted is not None:
                raise RunAborted(self.aborted)
            repeat()
        raise SchedulerError(f"worker {self.worker} waited {self._timeout:g} s for {what}; {self._who_is_missing()}")

    def _receive(
        self,
        kind: type[_Reply],
        matches: Callable[[_Reply], bool],
        until: float,
        repeat: Callable[[], None] | None = None,
    ) -> _Reply | None:
        """The next reply of that kind; stale ones are dropped. None when it did not come in time."""
        while (left := until - time.monotonic()) > 0:
            if self.meanwhile is not None and kind is m.Dealt:
                self.meanwhile()
                left = min(left, MEANWHILE)
            reply = self._connection.receive(left)
            if reply is None:
                continue
            if isinstance(reply, kind) and matches(reply):
                return reply
            if isinstance(reply, m.Abort):
                self.aborted = reply.failure
                raise RunAborted(reply.failure)
            if isinstance(reply, e.MustEnd):
                raise MustEndError(self.worker.pipeline, reply.reason)
            if isinstance(reply, e.Line):
                self._hold(reply)
            if isinstance(reply, m.Lost):
                log.warning("worker %s was silent for %.1f s; the others go on without it", reply.worker, reply.silent)
            if isinstance(reply, m.Unknown) and repeat is not None:
                rejoin = self._rejoin()
                if rejoin is not None:
                    self._transmit(rejoin)
                    repeat()
            if isinstance(reply, m.AskLeases) and (book := self._book()) is not None and repeat is not None:
                self._transmit(book)
                repeat()
            if isinstance(reply, m.Answer) and reply.iteration_of(self.worker) == self._iteration is not None:
                self._early = reply
            if isinstance(reply, m.Refused) and reply.number == self._number:
                raise RefusedError(f"the scheduler at {self.address} refused: {reply.reason}")
        return None

    def _hold(self, line: e.Line) -> None:
        """The scheduler is to know at once when this process ends; one that was started again wants a new line."""
        lifeline = open_lifeline(self.address, line.port, line.nonce)
        with self._lock:
            before, self._lifeline = self._lifeline, lifeline
        if before is not None:
            before.farewell()

    def _rejoin(self) -> m.Join | None:
        with self._lock:
            if not self._joined:
                return None
            self._number += 1
            heard, elastic, number = self._heard, self._incarnation is not None, self._number
            answers, answered = heard.to_report(), self._answered
            return m.Join(
                self.worker, self._session, number, self._mesh, True, heard.highest, answers, elastic, answered
            )

    def _wait_for_invitations(self, sent: int) -> None:
        if self._invited < sent:
            self._wait_there(lambda: self._invited >= sent, f"{sent - self._invited} invitations that it was sent")

    def _wait_there(self, there: Callable[[], bool], what: str) -> None:
        """Until the heartbeats' thread has heard something."""
        with self._invitations:
            if not self._invitations.wait_for(lambda: there() or self.aborted is not None, self._timeout):
                raise SchedulerError(
                    f"worker {self.worker} waited {self._timeout:g} s for {what}; its heartbeats may not reach the "
                    f"scheduler at {self.address}"
                )
        if self.aborted is not None and not there():
            raise RunAborted(self.aborted)

    def _book(self) -> m.TellLeases | None:
        book = self._leases.book()
        return None if book is None else m.TellLeases(self.worker, self._session, self._next_number(), *book)

    def _who_is_missing(self) -> str:
        number = self._next_number()
        self._transmit(m.AskMissing(self.worker, self._session, number))
        until = time.monotonic() + min(2.0, self._timeout)
        reply = self._receive(m.Missing, lambda reply: reply.number == number, until)
        if reply is None:
            return f"the scheduler at {self.address} does not answer; check that it runs and can be reached"
        names = ", ".join(map(str, reply.workers)) or "nobody"
        return f"the scheduler at {self.address} answers and says that it waits for {names}"


class _Pulse:
    """What the heartbeats' thread may do with a client."""

    def __init__(self, client: SchedulerClient) -> None:
        self._client = client

    def heartbeat(self) -> m.Request:
        client = self._client
        with client._lock:
            client._number += 1
            number, joined = client._number, client._joined
        steps, dealt = client._steps.take(), client._leases.progress()
        return m.Heartbeat(client.worker, client._session, number, joined, steps, dealt)

    def book(self) -> m.Request | None:
        return self._client._book()

    def rejoin(self) -> m.Request | None:
        return self._client._rejoin()

    def hear_line(self, line: e.Line) -> None:
        self._client._hold(line)

    def hear_failure(self, failure: Failure) -> None:
        first_time = self._client.aborted is None
        with self._client._invitations:
            self._client.aborted = failure
            self._client._invitations.notify_all()
        if first_time and self._client._on_abort is not None:
            self._client._on_abort(failure)

    def hear_nothing(self, beats: int) -> None:
        client = self._client
        if beats != LAST_BEAT or client.aborted is not None:
            return
        if client._host is not None:
            self.hear_failure(Failure(client._host, "it ended without a word, and the scheduler with it"))
            return
        log.warning(
            "worker %s: the scheduler at %s has not answered %d heartbeats; who needs a group waits up to %g s, and it "
            "can be started again at the same address",
            client.worker,
            client.address,
            beats,
            client._timeout,
        )

    def hear_pulse(self) -> None:
        client = self._client
        if not client._beaten:
            with client._invitations:
                client._beaten = True
                client._invitations.notify_all()

    def hear_invitation(self, group: Group, after: int | None) -> m.Request | None:
        client = self._client
        if client.on_invitation is None:
            with client._lock:
                client._number += 1
                number = client._number
            reason = (
                f"the policy made it a passive member of group {group.sequence}, and it cannot average while it "
                "computes; give SchedulerClient an on_invitation, or use another policy"
            )
            return m.Failed(client.worker, client._session, number, reason)
        client.on_invitation(group, after)
        with client._invitations:
            client._invited += 1
            client._invitations.notify_all()
        return None
