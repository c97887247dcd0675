"""A worker's side of the scheduler: one DEALER socket, used by one thread."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TypeVar

import zmq

from lightning_sdpipe.errors import SchedulerError, WorkerFailedError
from lightning_sdpipe.scheduler import messages as m
from lightning_sdpipe.scheduler.policy import Group, Worker

__all__ = ["Failure", "SchedulerClient"]

Failure = m.Failure
_Reply = TypeVar("_Reply", bound=m.Reply)

LAST_WORDS = 1.0
"""Seconds that a failing worker spends at most on telling the others."""


class SchedulerClient:
    """Speaks for one worker. Every wait ends after ``timeout`` seconds with a :class:`SchedulerError`."""

    def __init__(self, address: str, worker: Worker, *, timeout: float = 60.0) -> None:
        self.address = address
        self.worker = worker
        self._timeout = timeout
        self._session = secrets.randbits(63)
        self._number = 0
        self._iteration: int | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, m.routing_id(worker))
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1 if "[" in address else 0)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise SchedulerError(
                f"{address!r} is no address of a scheduler ({error.strerror}); "
                "give one as in tcp://127.0.0.1:5555"
            ) from error

    def join(self) -> None:
        """Take part from now on; returns when the scheduler has acknowledged it."""
        number = self._send(m.Join)
        self._wait(m.Acknowledged, lambda reply: reply.number == number, "the scheduler to let it join")

    def leave(self) -> None:
        """Pause or end the epoch; returns when the scheduler has acknowledged it."""
        self._iteration = None
        number = self._send(m.Leave)
        self._wait(m.Acknowledged, lambda reply: reply.number == number, "the scheduler to let it leave")

    def ready(self, iteration: int) -> None:
        """The local step of ``iteration`` is done; does not wait. :meth:`group` fetches the answer."""
        if self._iteration is not None:
            raise SchedulerError(
                f"worker {self.worker} reported iteration {iteration} before it fetched the group of its "
                f"iteration {self._iteration}; call group() after every ready()"
            )
        self._number += 1
        self._transmit(m.Ready(self.worker, self._session, self._number, iteration))
        self._iteration = iteration

    def group(self) -> Group:
        """Wait for the answer to the last :meth:`ready`."""
        iteration = self._iteration
        if iteration is None:
            raise SchedulerError(
                f"worker {self.worker} asked for a group without being ready; call ready() first"
            )
        answer = self._wait(
            m.Answer, lambda reply: reply.iteration == iteration, f"the group of its iteration {iteration}"
        )
        self._iteration = None
        return answer.group

    def failed(self, reason: str) -> None:
        """Tell the scheduler, and through it everybody, that this worker failed. Never raises."""
        try:
            number = self._number + 1
            self._transmit(
                m.Failed(self.worker, self._session, number, reason[: m.MAX_REASON_CHARACTERS]),
            )
            self._number = number
            self._receive(m.Abort, lambda reply: True, time.monotonic() + LAST_WORDS)
        except Exception:  # the failure that is being reported matters more than the one to report it
            return

    def first_failure(self, timeout: float) -> Failure | None:
        """What failed first in this run, if anything; None also when the scheduler does not answer."""
        try:
            number = self._send(m.AskFailure)
            reply = self._receive(
                m.FirstFailure, lambda reply: reply.number == number, time.monotonic() + timeout
            )
        except WorkerFailedError as error:
            return error.failure if isinstance(error, RunAborted) else None
        except SchedulerError:
            return None
        return None if reply is None else reply.failure

    def close(self) -> None:
        """Free the socket; safe to call twice."""
        self._socket.close(0)
        self._context.term()

    def _send(self, kind: type[m.Join] | type[m.Leave] | type[m.AskFailure] | type[m.AskMissing]) -> int:
        self._number += 1
        self._transmit(kind(self.worker, self._session, self._number))
        return self._number

    def _transmit(self, request: m.Request) -> None:
        try:
            self._socket.send(m.encode(request), zmq.DONTWAIT)
        except zmq.ZMQError as error:
            raise SchedulerError(
                f"worker {self.worker} cannot send to the scheduler at {self.address} ({error.strerror})"
            ) from error

    def _wait(self, kind: type[_Reply], matches: Callable[[_Reply], bool], what: str) -> _Reply:
        reply = self._receive(kind, matches, time.monotonic() + self._timeout)
        if reply is None:
            raise SchedulerError(
                f"worker {self.worker} waited {self._timeout:g} s for {what}; {self._who_is_missing()}"
            )
        return reply

    def _receive(self, kind: type[_Reply], matches: Callable[[_Reply], bool], until: float) -> _Reply | None:
        """The next reply of that kind; others are stale and dropped. None when it did not come in time."""
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
                raise RunAborted(reply.failure)
            if isinstance(reply, m.Refused) and reply.number == self._number:
                raise SchedulerError(f"the scheduler at {self.address} refused: {reply.reason}")
        return None

    def _who_is_missing(self) -> str:
        number = self._send(m.AskMissing)
        patience = min(2.0, self._timeout)
        reply = self._receive(m.Missing, lambda reply: reply.number == number, time.monotonic() + patience)
        if reply is None:
            return f"the scheduler at {self.address} does not answer; check that it runs and can be reached"
        names = ", ".join(map(str, reply.workers)) or "nobody"
        return f"the scheduler at {self.address} answers and says that it waits for {names}"


class RunAborted(WorkerFailedError):
    """The scheduler ended the run; ``failure`` says who failed first and why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"worker {failure.worker} failed first: {failure.reason}")
        self.failure = failure
