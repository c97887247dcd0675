"""A worker's side of the scheduler: a socket for its training thread, and heartbeats from another thread.

What both say and believe is a
:class:`~lightning_sdpipe.scheduler.client.session_conversation.SessionConversation`. A request that is not answered is
repeated, so a scheduler that was restarted at the same address finds its workers again by itself: a worker that it does
not know joins again and repeats the ready that is unanswered.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import zmq

from lightning_sdpipe import meter
from lightning_sdpipe.dealing.leases import Lease, Segment
from lightning_sdpipe.errors import MustEndError, RefusedError, SchedulerError, WorkerFailedError
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client import session_conversation as s
from lightning_sdpipe.scheduler.client.client_thread import Lifeline, open_lifeline
from lightning_sdpipe.scheduler.client.connection import GLANCE, Connection
from lightning_sdpipe.scheduler.client.conversation import Connect, MustStop
from lightning_sdpipe.scheduler.client.heartbeat import HeartbeatThread
from lightning_sdpipe.scheduler.credentials import WorkerKeys
from lightning_sdpipe.scheduler.rows import About

__all__ = ["Failure", "RunAborted", "SchedulerClient"]

Failure = m.Failure
log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply")

CONNECT_TIMEOUT = 15.0
"""Seconds in which a scheduler must answer for the first time."""
LAST_WORDS = 1.0
"""Seconds that a failing worker spends at most on telling the others."""
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
    which the scheduler must serve; it is not checked without. ``heartbeat`` is in seconds, None for none.
    ``host`` is the worker whose process the scheduler ends with; when many heartbeats in a row are not answered, that
    worker is taken to have failed. None for a scheduler that may be restarted.
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
        credentials: WorkerKeys | None = None,
        heartbeat: float | None = 1.0,
        host: Worker | None = None,
        incarnation: int | None = None,
    ) -> None:
        self.address = address
        self.worker = worker
        self.policy: str | None = None
        """What the scheduler decides by, as JSON, once it has answered."""
        self.serves: tuple[int, int] | None = None
        """The stages and pipelines that the scheduler serves, once it has been greeted."""
        self.about: About | None = None
        """What people are told of this worker. To be set before :meth:`join`."""
        self.meanwhile: Callable[[], object] | None = None
        """Called often while a lease is waited for."""
        self.on_invitation: Callable[[Group, int | None], None] | None = None
        """Called in the heartbeats' thread, in order, for groups that the worker is a passive member of, with the last
        iteration that had been answered before, None if none had since the worker joined. To be set before
        :meth:`join`."""
        self.on_abort: Callable[[Failure], None] | None = None
        """Called in the heartbeats' thread when the run is over because another worker failed, which the training
        thread may not learn while it waits for a tensor. To be set before :meth:`join`."""
        self._timeout = timeout
        self.credentials = credentials
        self._heartbeat = heartbeat
        self._incarnation = incarnation
        elastic = incarnation is not None
        session = secrets.randbits(63) if incarnation is None else incarnation
        self._talk = s.SessionConversation(worker, session, mesh, elastic=elastic, host=host)
        self._changed = threading.Condition()
        """Guards the conversation and what came of it, which both threads change."""
        self._outcomes: dict[s.Kind, m.Reply | e.Reply] = {}
        self._must_end: str | None = None
        self._invited = 0
        self._iteration: int | None = None
        """Of the ready whose group was not fetched yet."""
        self._thread: HeartbeatThread | None = None
        self._lifeline: Lifeline | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._connection = Connection(self._context, address, credentials, m.routing_id(worker, incarnation))
        except BaseException:
            self._context.term()
            raise

    @property
    def aborted(self) -> Failure | None:
        """The first failure of the run, as soon as it was heard of."""
        return self._talk.failure

    def greet(self) -> None:
        """Make sure that the scheduler is there, and the right one.

        Raises:
            SchedulerError: it does not answer, the keys do not fit, it speaks another version, or serves another mesh.
        """
        if self.policy is None:
            what = f"the scheduler at {self.address} to answer"
            self._ask(m.Hello)
            welcome = self._wait(m.Hello, m.Welcome, what, min(self._timeout, CONNECT_TIMEOUT))
            self.serves, self.policy = welcome.mesh, welcome.policy
            self._connection.established()

    def join(self) -> None:
        """Take part from now on; returns when the scheduler has acknowledged it."""
        self.greet()
        self._talk.about = self.about
        self._ask(m.Join)
        self._wait(m.Join, m.Acknowledged, "the scheduler to let it join")
        meter.current().start()
        if self._heartbeat is not None and self._thread is None:
            name = m.heartbeat_id(self.worker, self._incarnation)
            self._thread = HeartbeatThread(
                lambda: Connection(self._context, self.address, self.credentials, name),
                lambda line: self._carry_out(line, self._talk.beat),
                self._hear,
                self._heartbeat,
            )
            self._thread.start()
            if self.on_invitation is not None:  # which reach nobody before the scheduler knows that connection
                self._wait_there(lambda: self._talk.beaten, "the scheduler to answer its first heartbeat")

    def leave(self) -> None:
        """Pause or end the epoch; returns when the scheduler has acknowledged it."""
        self._iteration = None
        self._ask(m.Leave)
        acknowledged = self._wait(m.Leave, m.Acknowledged, "the scheduler to let it leave")
        self._wait_for_invitations(acknowledged.invitations)

    def ready(self, iteration: int) -> None:
        """The local step of ``iteration`` is done; does not wait. :meth:`group` fetches the answer."""
        if not self._talk.joined:
            raise SchedulerError(
                f"worker {self.worker} reported iteration {iteration} without having joined; call join() first"
            )
        if self._iteration is not None:
            raise SchedulerError(
                f"worker {self.worker} reported iteration {iteration} before it fetched the group of "
                f"iteration {self._iteration}; call group() after every ready()"
            )
        self._iteration = iteration
        self._ask(m.Ready, iteration)

    def group(self) -> Group:
        """Wait for the answer to the last :meth:`ready`, and for the invitations that were sent before it."""
        if self._iteration is None:
            raise SchedulerError(f"worker {self.worker} asked for a group without being ready; call ready() first")
        answer = self._wait(m.Ready, m.Answer, f"the group of its iteration {self._iteration}")
        self._iteration = None
        self._wait_for_invitations(answer.invitations_of(self.worker))
        return answer.group

    def lease(self, segment: Segment, ordinal: int) -> Lease:
        """Wait for lease ``ordinal`` of this worker's pipeline in ``segment``, which all its stages get alike.

        After one that is not empty the answer comes at once: batches, or an empty lease. After an empty one, which is
        the sign to train whatever is held, it comes when there is something, or the segment is over.
        """
        self._ask(m.AskLease, segment, ordinal)
        with meter.phase(meter.WAIT_GROUP):
            return self._wait(m.AskLease, m.Dealt, f"lease {ordinal} of {segment}").lease

    def trained(self, batches: int) -> None:
        """So many batches of the segment are trained by this worker; heartbeats tell, this only notes it."""
        with self._changed:
            self._talk.leases.trained(batches)

    def step_ended(self, iteration: int, waited: float) -> None:
        """The step of ``iteration`` is over; ``waited`` are all seconds so far that this worker waited for replicas.

        Heartbeats tell the scheduler what the steps were made of; this only notes it.
        """
        row = meter.current().update_ended(waited)
        if row is not None:
            with self._changed:
                full = self._talk.rows.add(iteration, row)
            if full and self._thread is not None:
                self._thread.beat_soon()

    def failed(self, reason: str) -> None:
        """Tell the scheduler, and through it everybody, that this worker failed. Never raises."""
        try:
            with self._changed:
                request = self._talk.make(m.Failed, reason[: m.MAX_REASON_CHARACTERS])
            self._transmit([request])
            self._look_for(m.Failed, LAST_WORDS)
        except Exception:  # the failure that is being reported matters more than the one to report it
            return

    def first_failure(self, timeout: float) -> Failure | None:
        """What failed first in this run, if anything; None also when the scheduler does not answer."""
        reply = None
        try:
            if self.aborted is None:
                self._ask(m.AskFailure)
                reply = self._look_for(m.AskFailure, timeout)
        except SchedulerError:
            return None
        return reply.failure if isinstance(reply, m.FirstFailure) else self.aborted

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

    # ----------------------------------------------------------- the training thread's

    def _ask(self, kind: s.Kind, *fields: Any) -> None:
        with self._changed:
            request = self._talk.ask(kind, *fields)
            self._outcomes.pop(kind, None)
        self._transmit([request])

    def _transmit(self, requests: Iterable[m.Request]) -> None:
        for request in requests:
            if not self._connection.send(m.encode(request)) and self.policy is not None:
                raise SchedulerError(
                    f"worker {self.worker} has no connection to the scheduler at {self.address}; check that it "
                    "runs, can be reached, and was started with the keys that belong to this worker's"
                )

    def _wait(self, kind: s.Kind, reply: type[_Reply], what: str, seconds: float | None = None) -> _Reply:
        """The answer to the request of that ``kind``, which is repeated until it comes."""
        now, seconds = time.monotonic(), self._timeout if seconds is None else seconds
        until, repeat_at = now + seconds, now + REPEAT_AFTER
        while (outcome := self._outcomes.pop(kind, None)) is None:
            self._check()
            if now >= until:
                raise SchedulerError(f"worker {self.worker} waited {seconds:g} s for {what}; {self._who_is_missing()}")
            if now >= repeat_at:
                with self._changed:
                    requests = self._talk.again()
                self._transmit(requests)
                repeat_at = now + REPEAT_AFTER
            left = min(until, repeat_at) - now
            if self.meanwhile is not None and kind is m.AskLease:
                self.meanwhile()
                left = min(left, MEANWHILE)
            if self.policy is None:
                self._connection.check()
                left = min(left, GLANCE)
            self._receive(left)
            now = time.monotonic()
        if isinstance(outcome, m.Refused):
            raise RefusedError(f"the scheduler at {self.address} refused: {outcome.reason}")
        assert isinstance(outcome, reply)
        return outcome

    def _look_for(self, kind: s.Kind, seconds: float) -> m.Reply | e.Reply | None:
        """What comes of the request of that kind, if it does so in time, and before the run ends."""
        until = time.monotonic() + seconds
        while kind not in self._outcomes and self.aborted is None and self._must_end is None:
            if (left := until - time.monotonic()) <= 0:
                break
            self._receive(left)
        return self._outcomes.pop(kind, None)

    def _receive(self, seconds: float) -> None:
        reply = self._connection.receive(seconds)
        if reply is not None:
            self._hear(self._connection, reply)

    def _check(self) -> None:
        if self._must_end is not None:
            raise MustEndError(self.worker.pipeline, self._must_end)
        if self.aborted is not None:
            raise RunAborted(self.aborted)

    def _wait_for_invitations(self, sent: int) -> None:
        if self._invited < sent:
            self._wait_there(lambda: self._invited >= sent, f"{sent - self._invited} invitations that it was sent")

    def _wait_there(self, there: Callable[[], bool], what: str) -> None:
        """Until the heartbeats' thread has heard something."""
        with self._changed:
            if not self._changed.wait_for(lambda: there() or self.aborted is not None, self._timeout):
                raise SchedulerError(
                    f"worker {self.worker} waited {self._timeout:g} s for {what}; its heartbeats may not reach the "
                    f"scheduler at {self.address}"
                )
            if not there():
                self._check()

    def _who_is_missing(self) -> str:
        if self.policy is None:
            return self._connection.silence()
        self._ask(m.AskMissing)
        reply = self._look_for(m.AskMissing, min(2.0, self._timeout))
        self._check()
        if not isinstance(reply, m.Missing):
            return f"the scheduler at {self.address} does not answer; check that it runs and can be reached"
        names = ", ".join(map(str, reply.workers)) or "nobody"
        return f"the scheduler at {self.address} answers and says that it waits for {names}"

    # -------------------------------------------------------------------- both threads'

    def _hear(self, line: Connection, reply: m.Reply | e.Reply) -> None:
        if isinstance(reply, m.Lost):
            log.warning("worker %s was silent for %.1f s; the others go on without it", reply.worker, reply.silent)
        self._carry_out(line, lambda: self._talk.hear(reply, of_beats=line is not self._connection))

    def _carry_out(self, line: Connection, effects: Callable[[], list[s.Effect]]) -> None:
        with self._changed:
            found = effects()
            for effect in found:
                match effect:
                    case s.Came(kind, reply):
                        self._outcomes[kind] = reply
                    case MustStop(reason):
                        self._must_end = reason
            self._changed.notify_all()
        for effect in found:
            match effect:
                case s.Send(request):
                    line.send(m.encode(request))  # unsent: said again later
                case Connect(port, nonce):
                    self._hold(port, nonce)
                case m.Failure() if line is not self._connection and self.on_abort is not None:
                    self.on_abort(effect)
                case s.Unheard(beats):
                    log.warning(
                        "worker %s: the scheduler at %s has not answered %d heartbeats; who needs a group waits up to "
                        "%g s, and it can be started again at the same address",
                        *(self.worker, self.address, beats, self._timeout),
                    )
                case m.Invitation(group, after):
                    self._follow(line, group, after)

    def _follow(self, line: Connection, group: Group, after: int | None) -> None:
        if self.on_invitation is not None:
            self.on_invitation(group, after)
            with self._changed:
                self._invited += 1
                self._changed.notify_all()
            return
        reason = (
            f"the policy made it a passive member of group {group.sequence}, and it cannot average while it "
            "computes; set SchedulerClient.on_invitation, or use another policy"
        )
        with self._changed:
            request = self._talk.make(m.Failed, reason)
        line.send(m.encode(request))

    def _hold(self, port: int, nonce: bytes) -> None:
        """The scheduler is to know at once when this process ends; one that was started again wants a new line."""
        lifeline = open_lifeline(self.address, port, nonce)
        with self._changed:
            before, self._lifeline = self._lifeline, lifeline
        if before is not None:
            before.farewell()
