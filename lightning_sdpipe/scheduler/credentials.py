"""CURVE keys of a run: they decide which programs may talk to the scheduler, and prove to a worker that it is the right
one.

A run has one pair for the scheduler and one for its workers. Keys live in memory or in files that only their
owner may read; they never appear in logs, in ``repr``, or on a command line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import struct
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from lightning_sdpipe.errors import ConfigurationError, os_errors_as

SCHEDULER_KEY_FILE = "scheduler.key"
WORKER_KEY_FILE = "worker.key"
_CHARACTERS, _BYTES = 40, 32

log = logging.getLogger(__name__)
ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # fixed by ZeroMQ RFC 27
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH  # others are clients that went


class _Pair(msgspec.Struct, frozen=True):
    """One side's own keys. A subclass adds the public key of the other side."""

    public: str
    secret: str

    def __post_init__(self) -> None:
        _check_keys(*msgspec.structs.astuple(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(…)"


class SchedulerKeys(_Pair, frozen=True, tag="sdpipe scheduler keys"):
    """Keys that the scheduler holds: its own pair, and the public key of the workers it lets in."""

    worker_public: str


class WorkerKeys(_Pair, frozen=True, tag="sdpipe worker keys"):
    """Keys that a worker (and ``sdpipe status``) holds: its own pair, and the public key of the scheduler."""

    scheduler_public: str


_Keys = TypeVar("_Keys", bound=SchedulerKeys | WorkerKeys)


def make_keys() -> tuple[SchedulerKeys, WorkerKeys]:
    """Draw new keys for one run."""
    if not zmq.has("curve"):
        raise ConfigurationError(
            "this build of libzmq has no CURVE, which connections beyond this machine need; "
            "install pyzmq from its wheels: pip install --force-reinstall pyzmq"
        )
    public, secret = (key.decode() for key in zmq.curve_keypair())
    worker_public, worker_secret = (key.decode() for key in zmq.curve_keypair())
    return SchedulerKeys(public, secret, worker_public), WorkerKeys(worker_public, worker_secret, public)


def write_keys(directory: Path) -> tuple[Path, Path]:
    """Make keys and write them to two new files in ``directory``, readable by their owner only."""
    paths = scheduler_file, worker_file = directory / SCHEDULER_KEY_FILE, directory / WORKER_KEY_FILE
    for path in paths:
        if path.exists():
            raise ConfigurationError(f"{path} exists already; remove it or choose another directory")
    directory.mkdir(parents=True, exist_ok=True)
    for path, keys in zip(paths, make_keys(), strict=True):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(keys)) + b"\n")
    return scheduler_file, worker_file


def own_keys() -> tuple[Path, Path]:
    """Return the two key files of this account on this machine, made when first asked for.

    Without ``--key-file``, a scheduler on loopback that is started by hand uses them, and so do its workers and
    ``sdpipe status``. Other accounts of the machine can read neither file.

    Raises:
        ConfigurationError: the files cannot be made.
    """
    directory = _own_directory()
    if not directory.exists():
        made = None
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(dir=directory.parent))  # mode 0700
            write_keys(made)
            with contextlib.suppress(FileExistsError):  # another process was faster
                made.rename(directory)
        except OSError as error:
            if not directory.exists():
                raise ConfigurationError(
                    f"no keys can be written to {directory} ({error.strerror}), and a scheduler needs some on one "
                    "machine too; make them elsewhere with `sdpipe keygen` and give --key-file and SDPIPE_KEY_FILE"
                ) from error
        finally:
            if made is not None:
                shutil.rmtree(made, ignore_errors=True)
    return directory / SCHEDULER_KEY_FILE, directory / WORKER_KEY_FILE


def worker_keys(address: str, key_file: str | Path | None) -> WorkerKeys | None:
    """Return a worker's keys for the scheduler at ``address``: those of ``key_file``; without one, on loopback, those
    of :func:`own_keys`.

    Raises:
        ConfigurationError: the file cannot be read, or others can read it.
    """
    if key_file is None and is_loopback(address):
        key_file = own_keys()[1]
    return None if key_file is None else read_worker_keys(Path(key_file))


def _own_directory() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "lightning_sdpipe", "keys", socket.gethostname())  # homes may be shared by machines


def read_scheduler_keys(path: Path) -> SchedulerKeys:
    """Read the scheduler's keys from the file that :func:`write_keys` made."""
    return _read(path, SchedulerKeys, f"a worker's keys; the scheduler needs {SCHEDULER_KEY_FILE}")


def read_worker_keys(path: Path) -> WorkerKeys:
    """Read a worker's keys from the file that :func:`write_keys` made."""
    return _read(path, WorkerKeys, f"the scheduler's keys; a worker needs {WORKER_KEY_FILE}")


def worker_keys_beside(scheduler_key_file: Path) -> WorkerKeys | None:
    """Return the workers' keys that were made with those of ``scheduler_key_file``, if they still lie beside it."""
    scheduler = read_scheduler_keys(scheduler_key_file)
    try:
        keys = read_worker_keys(scheduler_key_file.with_name(WORKER_KEY_FILE))
    except ConfigurationError:  # a scheduler does not need them
        return None
    return keys if keys.scheduler_public == scheduler.public else None


def host_and_port(address: str) -> tuple[str, str]:
    """Return the parts of an address over TCP."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), port


def check_port(address: str) -> None:
    """Raise ConfigurationError if this ZeroMQ address has an impossible port, which ZeroMQ would turn into another."""
    port = host_and_port(address)[1]
    if address.startswith("tcp://") and port.lstrip("-").isdecimal() and not 0 <= int(port) <= 65535:
        raise ConfigurationError(f"{address} is not allowed; give a port from 0 to 65535")


def is_loopback(address: str) -> bool:
    """Return whether this ZeroMQ address stays on this machine."""
    if address.startswith(("ipc://", "inproc://")):
        return True
    host, _ = host_and_port(address)
    return host in ("localhost", "::1") or host.startswith("127.")


def _check_keys(*keys: str) -> None:
    """Raise ConfigurationError for a malformed key, without quoting it, as it may be secret."""
    for key in keys:
        try:
            whole = len(key) == _CHARACTERS and len(z85.decode(key)) == _BYTES
        except (ValueError, KeyError, UnicodeEncodeError, struct.error):
            whole = False
        if not whole:
            raise ConfigurationError(
                f"a key has {_CHARACTERS} characters of the alphabet z85, and one of these has {len(key)}, or others; "
                "sdpipe keygen makes them"
            )


def read_private(path: Path, cannot: str, advice: str = "") -> bytes:
    """Return the contents of a file that is this account's alone.

    Raises:
        ConfigurationError: others may read it, or it ``cannot`` be read.
    """
    with os_errors_as(cannot, advice):
        if path.stat().st_mode & 0o077:
            raise ConfigurationError(f"others may read or change what is in {path}; run: chmod 600 {path}")
        return path.read_bytes()


def _read(path: Path, kind: type[_Keys], others: str) -> _Keys:
    text = read_private(path, f"cannot read keys from {path}", "make some: sdpipe keygen")
    try:
        keys: SchedulerKeys | WorkerKeys = msgspec.json.decode(text, type=SchedulerKeys | WorkerKeys)
    except (msgspec.DecodeError, json.JSONDecodeError, UnicodeDecodeError):
        # without the cause, which could quote the secret
        raise ConfigurationError(f"{path} is not a key file; make one: sdpipe keygen") from None
    if not isinstance(keys, kind):
        raise ConfigurationError(f"{path} holds {others}")
    return keys


class KeyCheck:
    """The scheduler's side of CURVE: it answers libzmq's question whether a key may enter, and logs every address that
    lacks the workers' key.

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
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as peer:
        return str(peer.getpeername()[0])
    return "an unknown address"
