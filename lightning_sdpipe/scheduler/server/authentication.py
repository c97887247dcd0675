"""The scheduler's side of CURVE: it lets in the workers' key, and logs every address that lacks it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket as sockets

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from lightning_sdpipe.scheduler.credentials import SchedulerKeys

log = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # fixed by ZeroMQ RFC 27
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class KeyCheck:
    """Answers libzmq's question whether a key may enter.

    Wrong keys and clients without any fail inside libzmq before it asks; its monitor reports them. The monitor then
    names no peer, only the connection, so each peer's address is looked up when the connection is accepted.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes], keys: SchedulerKeys) -> None:
        self._allowed = z85.decode(keys.worker_public)
        self._router = router
        self._addresses: dict[int, str] = {}
        self._handshake_failed = 0
        self._logged: set[str] = set()
        router.curve_server = True
        router.curve_publickey = keys.public.encode()
        router.curve_secretkey = keys.secret.encode()
        router.setsockopt(zmq.ZAP_DOMAIN, b"sdpipe")
        self.questions = context.socket(zmq.REP)
        self.questions.setsockopt(zmq.LINGER, 0)
        self.questions.bind(ZAP_ENDPOINT)
        events = _FAILURES | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        self.news: zmq.Socket[bytes] = router.get_monitor_socket(events)

    def answer(self) -> None:
        """Answer one question of libzmq (ZeroMQ RFC 27)."""
        version, request_id, _domain, address, _identity, mechanism, *credentials = self.questions.recv_multipart()
        allowed = mechanism == b"CURVE" and credentials[:1] == [self._allowed]
        if not allowed:
            self._log_once(address.decode(errors="replace"))
        code, text = (b"200", b"OK") if allowed else (b"400", b"No access")
        self.questions.send_multipart([version, request_id, code, text, b"", b""])

    def hear(self) -> None:
        """Read one event of the monitor."""
        event = recv_monitor_message(self.news)
        kind, descriptor = event["event"], event["value"]
        if kind == zmq.EVENT_ACCEPTED:
            self._addresses[descriptor] = _peer(descriptor)
        elif kind & _FAILURES:
            self._handshake_failed += 1
        else:
            address = self._addresses.pop(descriptor, "an unknown address")
            if self._handshake_failed:
                self._handshake_failed -= 1
                self._log_once(address)

    def close(self) -> None:
        """Free both sockets."""
        self._router.disable_monitor()
        self.questions.close(0)

    def _log_once(self, address: str) -> None:
        if address not in self._logged:
            self._logged.add(address)
            log.warning("a client at %s without the right key was turned away (logged once)", address)


def _peer(descriptor: int) -> str:
    with contextlib.suppress(OSError), sockets.socket(fileno=os.dup(descriptor)) as peer:
        return str(peer.getpeername()[0])
    return "an unknown address"
