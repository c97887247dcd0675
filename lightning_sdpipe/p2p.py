"""Transfers over a process group, staged through pinned memory where gloo moves an accelerator's tensors. Errors name
the peers."""

from __future__ import annotations

import ctypes
import json
import math
import os
import socket as sockets
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum, auto, unique
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe import meter
from lightning_sdpipe.errors import LOST_CONNECTION, WorkerFailedError


@unique
class Tag(IntEnum):
    """Tags of messages other than those of links, whose tags count from 0, and of exchanges, whose number is the tag.

    A receive takes the next message with its tag, so each purpose has a tag of its own.
    """

    QUESTION = 2**31 - 16  # never sent
    CLOSING = auto()  # never sent
    LOSS = auto()
    NORM_SO_FAR = auto()
    NORM = auto()
    SCALE = auto()
    BLOCK_CALL = auto()
    PYTHON_STATE = auto()
    MODULE_STATE = auto()
    PREDICTIONS = auto()
    ENCODED_ROUND = auto()
    SAID_AT_BARRIER = auto()


class Wait(Protocol):
    """A thread's wait for other workers; ``str`` describes it to users."""

    @property
    def ranks(self) -> Sequence[int]:
        """The global ranks that are waited for."""

    def lost(self) -> WorkerFailedError | None:
        """Return an error if the wait can never succeed; any thread may ask."""


_waited_for: dict[Wait, None] = {}


@contextmanager
def awaiting(wait: Wait) -> Iterator[None]:
    """Note that this thread is in ``wait`` during the block."""
    _waited_for[wait] = None
    try:
        yield
    finally:
        del _waited_for[wait]


@dataclass(eq=False)
class Transfer:
    """Sends or receives in flight. It keeps the tensors alive until :meth:`wait` returns them."""

    peer: str
    works: list[dist.Work] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    staged: list[Tensor] = field(default_factory=list)
    receiving: bool = False
    where: tuple[Any, int] | None = None  # the process group, and the peer's rank in the world

    def wait(self, phase: int = meter.WAIT_STAGE) -> list[Tensor]:
        """Block until the peer has taken or delivered everything; the meter counts the time as ``phase``.

        Raises:
            WorkerFailedError: the peer closed the connection or the group's timeout passed; the message names the peer.
        """
        with meter.current().waiting(phase):
            _waited_for[self] = None
            try:
                for work in self.works:
                    work.wait()
            except RuntimeError as error:
                raise self.failed(error) from error
            finally:
                del _waited_for[self]
        self.works.clear()
        if self.receiving:
            for tensor, copy in zip(self.tensors, self.staged, strict=True):
                if copy is not tensor:
                    tensor.copy_(copy)
        return self.tensors

    def failed(self, error: RuntimeError) -> WorkerFailedError:
        """Return ``error`` as a failure of this transfer that names the peer."""
        return WorkerFailedError(f"{self} failed: {str(error).splitlines()[0]}")

    def __str__(self) -> str:
        return f"{'receiving from' if self.receiving else 'sending to'} {self.peer}"

    @property
    def ranks(self) -> Sequence[int]:
        return [] if self.where is None else [self.where[1]]

    def lost(self) -> WorkerFailedError | None:
        """Return an error if the connection to the peer is lost; any thread may ask."""
        if self.where is None:
            return None
        group, rank = self.where
        reason = lost_connection(group, dist.get_group_rank(group, rank))
        return self.failed(RuntimeError(reason)) if reason else None

    def start(
        self, begin: Callable[..., dist.Work | None], tensors: Sequence[Tensor], rank: int, group: Any, tag: int
    ) -> None:
        """Start sending or receiving ``tensors``, in order, with ``begin``."""
        self.where = group, rank
        try:
            with unrecorded():
                for tensor in tensors:
                    if tensor.numel():
                        work = begin(tensor, rank, group=group, tag=tag)
                        assert work is not None, "a process sends and receives in groups of which it is a member"
                        self.works.append(work)
        except RuntimeError as error:
            raise self.failed(error) from error


class unrecorded:
    """Hides the start of a transfer between two workers from torch's profiler, which would record the transfer until
    it is waited for. If that is in another cycle of the profiler, torch writes to freed memory (seen in 2.13)."""

    def __enter__(self) -> None:
        torch._C._autograd._enable_record_function(False)  # for this thread; torch has no public name for it

    def __exit__(self, *_: object) -> None:
        torch._C._autograd._enable_record_function(True)


class waiting_for:
    """Surrounds a collective of ``group``: if a member is gone or late, WorkerFailedError names the members and the
    usual ``cause``, if given."""

    __slots__ = ("_cause", "_group", "_purpose", "_waiting")

    def __init__(self, group: dist.ProcessGroup, purpose: str, cause: str = "") -> None:
        self._group, self._purpose, self._cause = group, purpose, cause

    def __enter__(self) -> None:
        self._waiting = meter.current().waiting()
        self._waiting.__enter__()
        _waited_for[self] = None

    def __str__(self) -> str:
        return f"{self._purpose} among ranks {sorted(dist.get_process_group_ranks(self._group))}"

    @property
    def ranks(self) -> Sequence[int]:
        return dist.get_process_group_ranks(self._group)

    def lost(self) -> None:
        """Do nothing: gloo itself ends all waits in a collective."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        del _waited_for[self]
        self._waiting.__exit__(kind, error, trace)
        if error is None or isinstance(error, WorkerFailedError):  # its message already says more
            return
        if isinstance(error, RuntimeError):
            reason = str(error).splitlines()[0]
            raise WorkerFailedError(f"{self} failed: {reason}{self._cause}") from error


def lost_connection(group: Any, rank: int) -> str:
    """Return why the gloo ``group`` has lost its connection to its member ``rank``; empty if it has one.

    gloo notes at once that a connection has ended, and ends all waits for messages over it, except for the message that
    was under way: that wait goes on to its timeout. A receive that begins now fails. Any thread may ask.
    """
    try:
        with unrecorded():
            group.recv([torch.empty(1)], rank, Tag.QUESTION)
    except RuntimeError as error:
        if LOST_CONNECTION in str(error):
            return str(error).splitlines()[0]
    return ""


def close_connections(group: Any) -> None:
    """Close all connections of the gloo ``group``, so that all waits for its messages end. gloo closes them when a wait
    times out, so this lets one time out."""
    for peer in {*range(group.size())} - {group.rank()}:  # all, since a wait for a lost peer cannot time out
        with suppress(RuntimeError):  # the timeout is expected
            group.recv([torch.zeros(1)], peer, Tag.CLOSING).wait(timedelta(milliseconds=1))


def waited_for() -> set[Wait]:
    """Return the current waits of this process's threads."""
    return set(_waited_for)


_TCP_INFO = struct.Struct("=24xI28xI60xQQ")
"""Fields of Linux's ``tcp_info``: segments not yet acknowledged, milliseconds since the last acknowledgement, bytes
acknowledged by the peer, and bytes received."""
_MOMENT, _ASKING = 0.25, 256  # seconds, and more bytes than a few of gloo's questions (48 each) take in that time
_libc = ctypes.CDLL(None)


def traffic(without: Collection[int], silence: float) -> tuple[int, set[str]] | None:
    """Return the bytes that this process's TCP connections have moved so far, and the addresses of peers whose machines
    have left data unacknowledged for ``silence`` seconds. Connections to and from the ports ``without`` do not count.
    Return None on systems other than Linux."""
    moved, silent = 0, set()
    own, peer, size = ctypes.create_string_buffer(28), ctypes.create_string_buffer(28), ctypes.c_uint32()
    for descriptor in (found := _sockets()):
        ports = list[int]()
        for ask, end in ((_libc.getsockname, own), (_libc.getpeername, peer)):
            size.value = len(end)
            if not ask(descriptor, end, ctypes.byref(size)):
                ports.append(int.from_bytes(end.raw[2:4]))
        if len(ports) < 2 or not {*ports}.isdisjoint(without):
            continue
        if info := _tcp_info(descriptor):
            unanswered, since, acknowledged, received = info
            moved += acknowledged + received
            if unanswered and since > 1000 * silence:
                v6 = int.from_bytes(peer.raw[:2], sys.byteorder) == sockets.AF_INET6
                address = peer.raw[8:24] if v6 else peer.raw[4:8]
                silent.add(sockets.inet_ntop(sockets.AF_INET6 if v6 else sockets.AF_INET, address))
    return (moved, silent) if found else None


class Connections:
    """The connections of a gloo process group that this process makes within the block, and the bytes that they carry.
    Connections that another thread makes meanwhile are included."""

    def __init__(self) -> None:
        self.given_up = threading.Event()
        """Set when the connections are given up; waits for their messages end soon after."""
        self._made: dict[int, str] = {}
        self._lock = threading.Lock()
        self._carried: dict[int, int] = {}
        self._looked_at, self._moved = -math.inf, 0

    def __enter__(self) -> Connections:
        self._made = _sockets()
        return self

    def __exit__(self, *_: object) -> None:
        self._made = dict(_sockets().items() - self._made.items())

    def moved(self) -> int:
        """Return the bytes that they have moved so far, as of a moment ago; any thread may ask. gloo's questions
        whether a connection is there (:func:`lost_connection`) do not count, so a connection that carries less than a
        kilobyte a second seems idle. Where the system does not tell (other than Linux), the number always grows."""
        now = time.monotonic()
        with self._lock:
            if now >= self._looked_at + _MOMENT:
                here = _sockets()
                carried = {
                    each: sum(info[2:])
                    for each in self._made
                    if here.get(each) == self._made[each] and (info := _tcp_info(each))
                }
                more = (count - self._carried.get(each, 0) for each, count in carried.items())
                self._moved += sum(count for count in more if count >= _ASKING) if here else 1
                self._carried, self._looked_at = carried, now
            return self._moved


def _sockets() -> dict[int, str]:
    """Return the unique name of each of this process's sockets, by descriptor; empty on systems other than Linux."""
    found: dict[int, str] = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # it was closed meanwhile
                if (where := os.readlink(f"/proc/self/fd/{name}")).startswith("socket:"):
                    found[int(name)] = where
    return found


def _tcp_info(descriptor: int) -> tuple[int, int, int, int] | None:
    """Return the fields of :data:`_TCP_INFO` for a connection; None for another kind of socket."""
    info, size = ctypes.create_string_buffer(_TCP_INFO.size), ctypes.c_uint32(_TCP_INFO.size)
    if _libc.getsockopt(descriptor, sockets.IPPROTO_TCP, sockets.TCP_INFO, info, ctypes.byref(size)):
        return None
    return _TCP_INFO.unpack(info.raw)


def labelled(what: str, micro_batch: int | None = None) -> AbstractContextManager[object]:
    """Return a context that labels ``what`` a worker does, perhaps for one ``micro_batch``, in torch's profiler, as in
    ``sdpipe:forward 3``. Nothing is created while no profiler runs."""
    if not torch._C._autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"sdpipe:{what}" if micro_batch is None else f"sdpipe:{what} {micro_batch}")


_NOTHING = nullcontext()


def backend_for(device: torch.device, group: Any) -> str:
    """Return the name of the backend that moves tensors of ``device`` in ``group``. If the group has none for this type
    of device, it is gloo, and messages go through host memory."""
    if not isinstance(group, dist.ProcessGroup):  # a backend by itself
        return str(group.name())
    if device.type not in {known.type for known in group._device_types}:
        return "gloo"
    return str(group._get_backend(device).name())


def through_host(tensor: Tensor, group: Any) -> bool:
    """Return whether a message with ``tensor`` must go through host memory, since gloo reads no other."""
    return tensor.device.type != "cpu" and backend_for(tensor.device, group) == "gloo"


def pinned_like(tensor: Tensor) -> Tensor:
    """Return a pinned tensor in host memory with the shape of ``tensor``."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def _landing(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensor into which the network writes a message for ``tensor``."""
    return pinned_like(tensor) if through_host(tensor, group) else tensor


def _departing(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensor from which the network reads a message with the values of ``tensor``."""
    payload = tensor.detach().contiguous()
    if through_host(payload, group):
        payload = pinned_like(payload).copy_(payload)  # waits until its values are computed
    return payload


def send(tensors: Sequence[Tensor], to: int, group: dist.ProcessGroup, tag: int, peer: str) -> Transfer:
    """Start sending ``tensors`` to global rank ``to``; they must not change before the transfer is waited for."""
    transfer = Transfer(peer, tensors=[_departing(tensor, group) for tensor in tensors])
    transfer.start(dist.isend, transfer.tensors, to, group, tag)
    return transfer


def receive(into: Sequence[Tensor], source: int, group: dist.ProcessGroup, tag: int, peer: str) -> Transfer:
    """Start receiving from global rank ``source`` into contiguous tensors, in the order in which they were sent."""
    staged = [_landing(tensor, group) for tensor in into]
    transfer = Transfer(peer, tensors=[*into], staged=staged, receiving=True)
    transfer.start(dist.irecv, staged, source, group, tag)
    return transfer


def send_bytes(data: bytes, to: int, group: dist.ProcessGroup, tag: int, peer: str, first: int = 8) -> Transfer:
    """Start sending a byte string of any length, preceded by its length in 8 bytes. The first message has ``first``
    bytes, padded if need be; a second one follows if they do not hold everything."""
    whole = bytearray(max(first, 8 + len(data)))
    whole[:8], whole[8 : 8 + len(data)] = len(data).to_bytes(8, "little"), data
    payload = torch.frombuffer(whole, dtype=torch.uint8)
    return send([payload[:first], payload[first:]], to, group, tag, peer)


def receive_bytes(source: int, group: dist.ProcessGroup, tag: int, peer: str, first: int = 8) -> bytes:
    """Wait for a byte string that the peer sent with :func:`send_bytes` and the same ``first``."""
    begun = receive([torch.empty(first, dtype=torch.uint8)], source, group, tag, peer).wait()[0].numpy().tobytes()
    length = int.from_bytes(begun[:8], "little")
    (rest,) = receive([torch.empty(max(0, 8 + length - first), dtype=torch.uint8)], source, group, tag, peer).wait()
    return (begun[8:] + rest.numpy().tobytes())[:length]


def broadcast_bytes(data: bytes, source: int, group: dist.ProcessGroup) -> bytes:
    """Broadcast the bytes of global rank ``source`` to every member.

    Raises:
        WorkerFailedError: a member is gone, or the group's timeout passed.
    """
    with waiting_for(group, f"a broadcast from rank {source}"):
        length = torch.tensor([len(data)])
        dist.broadcast(length, source, group=group)
        payload = torch.empty(int(length), dtype=torch.uint8)
        if dist.get_rank() == source:
            payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(payload, source, group=group)
    return payload.numpy().tobytes()


def broadcast_value(value: Any, source: int, group: dist.ProcessGroup) -> Any:
    """Broadcast the JSON value of global rank ``source`` to every member; raise as :func:`broadcast_bytes` does."""
    return json.loads(broadcast_bytes(json.dumps(value).encode(), source, group))


def same(number: int, group: dist.ProcessGroup, purpose: str) -> bool:
    """Return whether all members of ``group`` have the same number; all of them must call it.

    Raises:
        WorkerFailedError: a member is gone, or the group's timeout passed.
    """
    extremes = torch.tensor([number, -number])
    with waiting_for(group, purpose):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    return not extremes.sum()
