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

from lightning_sdpipe.errors import ConfigurationError, SchedulerError, WorkerFailedError
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import messages as m
from lightning_sdpipe.scheduler.credentials import WorkerKeys, is_loopback
from lightning_sdpipe.scheduler.heartbeat import HeartbeatThread
from lightning_sdpipe.scheduler.status import Status

__all__ = ["Failure", "RunAborted", "SchedulerClient", "ask_status"]

Failure = m.Failure
log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply", bound=m.Reply)

LAST_WORDS = 1.0
"""Seconds that a failing worker spends at most on telling the others."""
LAST_BEAT = 12
"""Heartbeats that stay unanswered before a scheduler that is not restarted is given up."""
REPEAT_AFTER = 1.0
"""Seconds after which an unanswered request is repeated."""


class RunAborted(WorkerFailedError):
    """The scheduler ended the run; ``failure`` says who failed first and why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"worker {failure.worker} failed first: {failure.reason}")
        self.failure = failure


class SchedulerClient:
    """Speaks for one worker. Every wait ends after ``timeout`` seconds with a :class:`SchedulerError`.

    All methods belong to one thread, the one that trains. ``heartbeat`` is in seconds, None for none.
    ``on_abort`` is called in the heartbeats' thread when the run is over because another worker failed, which the
    training thread may not learn while it waits for a tensor.
    ``host`` is the worker whose process the scheduler ends with; when many heartbeats in a row are not answered, that
    worker is taken to have failed. None for a scheduler that may be restarted.
    ``on_invitation`` is called there too, for groups that the worker is a passive member of (asynchronous AD-PSGD
    only); it may be set until :meth:`join`.
    """

    def __init__(
        self,
        address: str,
        worker: Worker,
        *,
        timeout: float = 60.0,
        credentials: WorkerKeys | None = None,
        heartbeat: float | None = 1.0,
        on_invitation: Callable[[Group], None] | None = None,
        on_abort: Callable[[Failure], None] | None = None,
        host: Worker | None = None,
    ) -> None:
        _check_credentials(address, credentials)
        self.address = address
        self.worker = worker
        self.aborted: Failure | None = None
        """The first failure of the run, as soon as the heartbeats heard of it."""
        self._timeout = timeout
        self._credentials = credentials
        self._heartbeat = heartbeat
        self.on_invitation = on_invitation
        self._on_abort = on_abort
        self._host = host
        self._session = secrets.randbits(63)
        self._number = 0
        self._numbers = threading.Lock()
        """Guards the number, and that no join is numbered after the leave that ends what it began."""
        self._joined = False
        self._averaging = False
        self._marks_averaging = False
        self._iteration: int | None = None
        self._last: m.Answer | None = None
        self._invited = 0
        self._invitations = threading.Condition()
        self._thread: HeartbeatThread | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = _connect(self._context, address, credentials, m.routing_id(worker))
        except BaseException:
            self._context.term()
            raise

    def join(self) -> None:
        """Take part from now on; returns when the scheduler has acknowledged it."""
        self._ask(m.Join, m.Acknowledged, "the scheduler to let it join")
        self._joined = True
        if self._heartbeat is not None and self._thread is None:
            self._thread = HeartbeatThread(
                lambda: _connect(self._context, self.address, self._credentials, m.heartbeat_id(self.worker)),
                _Pulse(self),
                self._heartbeat,
            )
            self._thread.start()

    def leave(self) -> None:
        """Pause or end the epoch; returns when the scheduler has acknowledged it."""
        self._iteration = None
        with self._numbers:
            self._joined = False
        reply = self._ask(m.Leave, m.Acknowledged, "the scheduler to let it leave")
        with self._invitations:
            if not self._invitations.wait_for(lambda: self._invited >= reply.invitations, self._timeout):
                missing = reply.invitations - self._invited
                raise SchedulerError(
                    f"worker {self.worker} waited {self._timeout:g} s for {missing} invitations that the "
                    f"scheduler at {self.address} says it has sent"
                )

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
        """Wait for the answer to the last :meth:`ready`."""
        iteration = self._iteration
        if iteration is None:
            raise SchedulerError(f"worker {self.worker} asked for a group without being ready; call ready() first")
        answer = self._wait(
            m.Answer,
            lambda reply: reply.iteration_of(self.worker) == iteration,
            lambda: self._transmit(m.Ready(self.worker, self._session, self._next_number(), iteration)),
            f"the group of its iteration {iteration}",
        )
        self._iteration = None
        self._last = answer
        self._averaging = self._marks_averaging and len(answer.group.members) > 1
        return answer.group

    def averaged(self) -> None:
        """The averaging with the last group is done; only tells ``sdpipe status`` sync from compute."""
        self._marks_averaging = True
        self._averaging = False

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
        except SchedulerError:
            return None
        return None if reply is None else reply.failure

    def close(self) -> None:
        """End the thread and free the sockets; safe to call twice."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        self._socket.close(0)
        self._context.term()

    def _next_number(self) -> int:
        with self._numbers:
            self._number += 1
            return self._number

    def _ask(self, kind: type[m.Join] | type[m.Leave], reply: type[_Reply], what: str) -> _Reply:
        first = self._number + 1

        def send() -> None:
            self._transmit(kind(self.worker, self._session, self._next_number()))

        send()
        return self._wait(reply, lambda reply: getattr(reply, "number", -1) >= first, send, what)

    def _transmit(self, request: m.Request) -> None:
        try:
            self._socket.send(m.encode(request), zmq.DONTWAIT)
        except zmq.Again as error:  # libzmq gave the connection up, or holds a thousand unsent requests
            raise SchedulerError(
                f"worker {self.worker} has no connection to the scheduler at {self.address}; check that it "
                "runs, can be reached, and was started with the keys that belong to this worker's"
            ) from error

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
            if not self._socket.poll(int(left * 1000) + 1):
                continue
            try:
                reply = m.decode_reply(self._socket.recv())
            except m.MalformedFrame as error:
                raise SchedulerError(
                    f"the program at {self.address} is no scheduler of this version ({error})"
                ) from error
            if isinstance(reply, kind) and matches(reply):
                return reply
            if isinstance(reply, m.Abort):
                self.aborted = reply.failure
                raise RunAborted(reply.failure)
            if isinstance(reply, m.Lost):
                log.warning("worker %s was silent for %.1f s; the others go on without it", reply.worker, reply.silent)
            if isinstance(reply, m.Unknown) and repeat is not None:
                rejoin = self._rejoin()
                if rejoin is not None:
                    self._transmit(rejoin)
                    repeat()
            if isinstance(reply, m.Refused) and reply.number == self._number:
                raise SchedulerError(f"the scheduler at {self.address} refused: {reply.reason}")
        return None

    def _rejoin(self) -> m.Join | None:
        with self._numbers:
            if not self._joined:
                return None
            self._number += 1
            return m.Join(self.worker, self._session, self._number, True, self._last)

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
        with client._numbers:
            client._number += 1
            return m.Heartbeat(client.worker, client._session, client._number, client._joined, client._averaging)

    def rejoin(self) -> m.Request | None:
        return self._client._rejoin()

    def hear_failure(self, failure: Failure) -> None:
        first_time = self._client.aborted is None
        self._client.aborted = failure
        if first_time and self._client._on_abort is not None:
            self._client._on_abort(failure)

    def hear_nothing(self, beats: int) -> None:
        if self._client._host is not None and beats >= LAST_BEAT and self._client.aborted is None:
            gone = "it ended without a word, and the scheduler with it"
            self.hear_failure(Failure(self._client._host, gone))

    def hear_invitation(self, group: Group) -> None:
        client = self._client
        if client.on_invitation is None:
            log.error(
                "worker %s was invited to group %d but cannot average while it computes; "
                "give SchedulerClient an on_invitation, or use ADPSGD(asynchronous=False)",
                client.worker,
                group.sequence,
            )
        else:
            client.on_invitation(group)
        with client._invitations:
            client._invited += 1
            client._invitations.notify_all()


def ask_status(address: str, *, credentials: WorkerKeys | None = None, timeout: float = 5.0) -> Status:
    """How the run is that the scheduler at ``address`` serves."""
    _check_credentials(address, credentials)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        socket = _connect(context, address, credentials, None)
        try:
            socket.send(m.encode(m.AskStatus()))
            if not socket.poll(int(timeout * 1000)):
                raise SchedulerError(
                    f"the scheduler at {address} did not answer within {timeout:g} s; check the address, "
                    "that it runs, and that you gave its worker.key if it has one"
                )
            reply = m.decode_reply(socket.recv())
        except m.MalformedFrame as error:
            raise SchedulerError(f"the program at {address} is no scheduler of this version ({error})") from error
        finally:
            socket.close(0)
    finally:
        context.term()
    if not isinstance(reply, m.StatusReply):
        raise SchedulerError(f"the scheduler at {address} sent {type(reply).__name__} for its status")
    return reply.status


def _connect(
    context: zmq.Context[zmq.Socket[bytes]], address: str, credentials: WorkerKeys | None, name: bytes | None
) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1 if "[" in address else 0)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if name is not None:
        socket.setsockopt(zmq.ROUTING_ID, name)
    try:
        if credentials is not None:
            socket.curve_serverkey = credentials.scheduler_public.encode()
            socket.curve_publickey = credentials.public.encode()
            socket.curve_secretkey = credentials.secret.encode()
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close(0)
        raise SchedulerError(
            f"{address!r} is no address of a scheduler ({error.strerror}); give one as in tcp://127.0.0.1:5555"
        ) from error
    return socket


def _check_credentials(address: str, credentials: WorkerKeys | None) -> None:
    if credentials is None and not is_loopback(address):
        raise ConfigurationError(
            f"the scheduler at {address} is on another machine and nobody talks to it without keys; "
            "give the worker.key that `sdpipe keygen` made for it"
        )
