"""The scheduler's socket: one ROUTER and a loop that receives, decodes, handles, encodes and sends."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from lightning_sdpipe.errors import ConfigurationError, SchedulerError, os_errors_as
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.credentials import KeyCheck, SchedulerKeys, check_port, host_and_port, is_loopback
from lightning_sdpipe.scheduler.log.event_log import LIMIT, Beginning, EventLog
from lightning_sdpipe.scheduler.server.lifelines import Lifelines
from lightning_sdpipe.scheduler.server.newest_checkpoint import keep_newest
from lightning_sdpipe.scheduler.server.outbox import Addressed
from lightning_sdpipe.scheduler.server.service import SchedulerService

LONGEST_WAIT = 60.0
WORKER_TIMEOUT = 30.0
MOST_AT_ONCE = 32
"""Most messages that are dealt with before the replies go out, and the server looks again at what is due."""
MOST_UNREAD = 256
"""Replies kept for a client that does not read them; it repeats the requests whose replies were dropped."""
MOST_UNHANDLED = 128
"""Requests kept of one client; what it sends beyond that waits on its own side."""

_MORE_FOLLOWS, _NO_WAIT = zmq.SNDMORE, zmq.NOBLOCK
_NOTICES = "inproc://notices"


@dataclass(frozen=True)
class Endpoint:
    """Address that a server listens at, and the keys by which it knows the clients that may connect.

    Args:
        bind: ZeroMQ address; a port of ``*`` is any that is free.
        keys: None only where no other machine can connect.
        lifeline_port: port for the lifelines of the processes of a run; 0 is any that is free.

    Raises:
        ConfigurationError: other machines could connect without keys, or there is no such port.
    """

    bind: str = "tcp://127.0.0.1:*"
    keys: SchedulerKeys | None = None
    lifeline_port: int = 0

    def __post_init__(self) -> None:
        check_port(self.bind)
        check_port(f"tcp://*:{self.lifeline_port}")
        if self.keys is None and not is_loopback(self.bind):
            raise ConfigurationError(
                f"the scheduler would listen at {self.bind}, which other machines can reach, without keys; "
                "make some with `sdpipe keygen` and give them, or bind to tcp://127.0.0.1:*"
            )


@dataclass(frozen=True)
class Files:
    """Files that a server writes: a log of at most ``log_limit`` bytes, and one that names the newest checkpoint; None
    writes none."""

    log: Path | None = None
    log_limit: int = LIMIT
    newest: Path | None = None


LOOPBACK, NO_FILES = Endpoint(), Files()


class Server:
    """The server of one run. ``open`` binds, ``run`` serves until told to stop, ``close`` frees the port.

    With ``elastic`` terms pipelines may come and go. Every process holds a connection to ``lifeline_port``. A worker is
    lost after ``worker_timeout`` seconds of silence, and a server that starts in the middle of a run waits for all
    workers at least as long, since one may be stopped just then.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        num_stages: int,
        num_pipelines: int,
        endpoint: Endpoint = LOOPBACK,
        *,
        worker_timeout: float = WORKER_TIMEOUT,
        files: Files = NO_FILES,
        elastic: ElasticConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = ""
        now, terms = clock(), elastic or ElasticConfig.of_fixed(num_pipelines)
        terms = msgspec.structs.replace(terms, recovery_grace=max(terms.recovery_grace, worker_timeout))
        self._log = EventLog(files.log, files.log_limit)
        self._beginning = Beginning(
            registry.to_plain(policy),
            num_stages,
            num_pipelines,
            now,
            datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            terms,
        )
        self.service = SchedulerService(
            policy,
            num_stages,
            num_pipelines,
            worker_timeout=worker_timeout,
            elastic=terms,
            now=now,
            log=self._log,
        )
        self._newest = files.newest
        self._endpoint = endpoint
        self._stop_notice, self._lifeline_notice = (name + secrets.token_bytes(16) for name in (b"stop-", b"line-"))
        """Identities of the sockets in this process from which notices come; no client can guess them."""
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._key_check: KeyCheck | None = None

    def open(self) -> str:
        """Bind and return the address that clients connect to."""
        self._context = context = zmq.Context()
        self._socket = socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 1000)  # an abort just sent must still leave
        socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_REQUEST_BYTES)
        socket.setsockopt(zmq.SNDHWM, MOST_UNREAD)
        socket.setsockopt(zmq.RCVHWM, MOST_UNHANDLED)
        socket.setsockopt(zmq.IPV6, 1 if "[" in self._endpoint.bind else 0)
        try:
            if self._endpoint.keys is not None:
                self._key_check = KeyCheck(context, socket, self._endpoint.keys)
            socket.bind(_NOTICES)
            socket.bind(self._endpoint.bind)
        except zmq.ZMQError as error:
            self.close()
            advice = (
                "another program listens there: end it or choose another port, or tcp://127.0.0.1:* for any"
                if error.errno == zmq.EADDRINUSE
                else "give an address of this machine, as in tcp://127.0.0.1:5555"
            )
            raise SchedulerError(
                f"the scheduler cannot listen at {self._endpoint.bind} ({error.strerror}); {advice}"
            ) from error
        try:
            self._log.open(self._beginning)
            if self._newest is not None:
                keep_newest(self._newest, self.service.members, self._clock())
        except ConfigurationError:
            self.close()
            raise
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return self.address

    def run(self, stop: Sequence[int]) -> None:
        """Serve until one of the file descriptors ``stop`` is readable (or at its end).

        Waiting happens inside the ROUTER's own receive, which costs each message a third of asking a poller first; a
        :class:`ControlThread` watches everything else and says in a frame when to stop.
        """
        socket, service, clock = self._socket, self.service, self._clock
        assert socket is not None, "open() comes first"
        assert self._context is not None
        with ControlThread(self._context, self._stop_notice, stop, self._key_check), self._lifelines(self._context):
            while True:
                if service.deadline() <= (now := clock()):
                    self._send(socket, service.tick(now))
                replies: list[Addressed] = []
                for identity, frame in _messages(socket, service.deadline() - now):
                    if identity == self._stop_notice:
                        self._send(socket, replies)
                        return
                    now = clock()
                    if identity == self._lifeline_notice:
                        replies += service.line_ended(frame, now)
                    else:
                        replies += self._handle(identity, frame, now)
                self._send(socket, replies)  # all at once, which wakes up the thread that writes to the network once

    @contextlib.contextmanager
    def _lifelines(self, context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[None]:
        """Listen for the lifelines of the run's processes, at the host that the scheduler itself listens at."""
        known = self.service.lines
        if not self.address.startswith("tcp://"):
            yield
            return
        host, _ = host_and_port(self.address)
        port, advice = self._endpoint.lifeline_port, "choose another --lifeline-port, or 0 for any"
        cannot = f"the lifelines of the run's processes cannot be listened for at {host}, port {port}"
        with os_errors_as(cannot, advice, SchedulerError):
            lines = Lifelines(context, host, port, _NOTICES, self._lifeline_notice, known, self.service.limit)
        with lines:
            known.port = lines.port
            yield

    def close(self) -> None:
        """Free the port; safe to call twice."""
        if self._key_check is not None:
            self._key_check.close()
            self._key_check = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._context is not None:
            self._context.term()
            self._context = None
        self._log.close()

    def _handle(self, peer: bytes, frame: bytes, now: float) -> list[Addressed]:
        try:
            request = m.decode_request(frame)
        except m.WrongVersion as error:
            self.service.ignore("other version", peer, str(error))
            return [(peer, e.Refused(0, str(error)))]  # any version can read which version this side speaks
        except m.MalformedFrame as error:
            self.service.ignore("malformed", peer, str(error))
            return []
        return self.service.handle(peer, request, now)

    @staticmethod
    def _send(socket: zmq.Socket[bytes], replies: list[Addressed]) -> None:
        last, frame = None, b""
        for peer, message in replies:
            if message is not last:  # the members of a group get the same
                last, frame = message, m.encode(message)
            socket.send(peer, _MORE_FOLLOWS)
            socket.send(frame)

    def __enter__(self) -> Server:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _messages(socket: zmq.Socket[bytes], seconds: float) -> Iterator[tuple[bytes, bytes]]:
    """Wait ``seconds`` for a message; yield it, and those that wait behind it, as peers and the frames that they sent.
    ``recv_multipart`` would take twice as long."""
    # Rounded up, since waking before the deadline would spin until it has come.
    socket.setsockopt(zmq.RCVTIMEO, math.ceil(1000 * min(max(seconds, 0.0), LONGEST_WAIT)))
    flags = 0
    with contextlib.suppress(zmq.Again):
        for _ in range(MOST_AT_ONCE):
            peer, frame = socket.recv(flags), socket.recv(copy=False)
            data = b"" if frame.more else frame.bytes  # no worker sends more frames
            while frame.more:
                frame = socket.recv(copy=False)
            yield peer, data
            flags = _NO_WAIT


class ControlThread:
    """Watches all but workers' messages while the server's loop runs: the signal to stop, which it passes to the loop
    as a frame from ``identity``, and the questions of CURVE."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        identity: bytes,
        stop: Sequence[int],
        key_check: KeyCheck | None,
    ) -> None:
        self._context, self._identity = context, identity
        self._stop = stop
        self._key_check = key_check
        self._dismissed, self._dismiss = os.pipe()
        self._thread = threading.Thread(target=self._run, name="scheduler watcher", daemon=True)

    def __enter__(self) -> ControlThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._dismiss, b"\0")  # closing it would go unnoticed while a fork holds it, too
        self._thread.join()
        os.close(self._dismiss)
        os.close(self._dismissed)

    def _run(self) -> None:
        key_check = self._key_check
        poller = zmq.Poller()
        for descriptor in (*self._stop, self._dismissed):
            poller.register(descriptor, zmq.POLLIN)
        if key_check is not None:
            poller.register(key_check.questions, zmq.POLLIN)
            poller.register(key_check.news, zmq.POLLIN)
        while True:
            events = dict(poller.poll())
            if self._dismissed in events:
                return
            if any(descriptor in events for descriptor in self._stop):
                self._tell()
                return
            if key_check is not None and key_check.questions in events:
                key_check.answer()
            if key_check is not None and key_check.news in events:
                key_check.hear()

    def _tell(self) -> None:
        with self._context.socket(zmq.DEALER) as notifier:
            notifier.setsockopt(zmq.ROUTING_ID, self._identity)
            notifier.setsockopt(zmq.LINGER, 1000)
            notifier.connect(_NOTICES)
            notifier.send(b"")
