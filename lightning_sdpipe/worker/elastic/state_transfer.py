"""Transfer of a donor's state: Lightning's checkpoint of its stage, from its memory into the newcomer's.

Both sides make a process group of two for it. The donor copies its tensors where its training stands, between two
turns, and sends them while it trains on. The newcomer unpacks them by ``torch.load(weights_only=True)``, which runs no
code of the sender's.
"""

from __future__ import annotations

import io
import logging
import pickle
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.utils._pytree import tree_map_only

from lightning_sdpipe import p2p
from lightning_sdpipe.errors import ConfigurationError, WorkerFailedError
from lightning_sdpipe.exchange.transfers import PendingMessage, complete
from lightning_sdpipe.lightning_internals import checkpoint_of
from lightning_sdpipe.scheduler.client.client import CancelledError

log = logging.getLogger(__name__)

CONNECTING = timedelta(seconds=10)
"""Time in which both sides must connect to make their group."""
_CHUNK = 2**23  # bytes that are sent at once
_GLANCE = 0.05  # seconds

_WHAT_TO_KEEP = (
    "Let callbacks, learning-rate schedules and on_save_checkpoint keep numbers, strings, tensors, and lists and dicts "
    "of them"
)

_HYPERPARAMETERS = ("hparams_name", "hyper_parameters", "hparams_type")


def snapshot(trainer: Trainer) -> dict[str, Any]:
    """Copy ``trainer``'s checkpoint, without hyper-parameters: these may be objects of any kind, and the newcomer's
    script has its own."""
    checkpoint = checkpoint_of(trainer)
    kept = {name: value for name, value in checkpoint.items() if not name.endswith(_HYPERPARAMETERS)}
    copied: dict[str, Any] = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), kept)
    return copied


def send_state(state: Mapping[str, Any], store: Store, timeout: timedelta) -> None:
    """Send ``state`` in a thread, which gives up when no byte moves for ``timeout``; a newcomer that goes away
    meanwhile is not a failure. If the state cannot be sent, the newcomer is told why, and the donor goes on."""

    def send() -> None:
        try:
            give = _Peer("the newcomer", 0, store, timeout, p2p.Connections())  # first: the newcomer is connecting
            packed, refused = _pack(state)
            if refused:
                log.warning("a newcomer did not get the state that it was to be given, which %s", refused)
            data = torch.frombuffer(packed, dtype=torch.uint8)
            give.move(give.group.send, torch.tensor([data.numel(), int(bool(refused))]))
            for part in torch.split(data, _CHUNK):
                give.move(give.group.send, part)
            with suppress(WorkerFailedError):  # it has all, or is gone
                give.move(give.group.recv, torch.empty(1))  # what is on its way would be lost with the connection
        except RuntimeError as error:
            log.warning("a newcomer did not get the state that it was to be given: %s", str(error).splitlines()[0])

    threading.Thread(target=send, name="donation", daemon=True).start()


def receive_state(
    store: Store, timeout: timedelta, donor: str, cancelled: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Receive the state that :func:`send_state` sends.

    Raises:
        WorkerFailedError: the donor is gone, or no byte has moved for ``timeout``; or ``cancelled`` returns true, as
            when there is another donor. gloo connects for up to five times :data:`CONNECTING` and cannot be told to
            stop, so that is left to a thread.
        ConfigurationError: the state holds objects that cannot be sent, or are not accepted from another process.
    """
    outcome: SimpleQueue[tuple[Tensor, bool] | Exception] = SimpleQueue()
    connections = p2p.Connections()
    arguments = store, timeout, donor, connections, outcome
    threading.Thread(target=_receive, args=arguments, name="receiving", daemon=True).start()
    while True:
        try:
            came = outcome.get(timeout=_GLANCE)
            break
        except Empty:
            if cancelled():
                connections.given_up.set()
                raise WorkerFailedError(f"{donor} need no longer give its state") from None
    if isinstance(came, RuntimeError | CancelledError):
        raise WorkerFailedError(f"{donor} did not give its state: {str(came).splitlines()[0]}") from came
    if isinstance(came, Exception):
        raise came
    data, refused = came
    if refused:
        raise ConfigurationError(f"The state of {donor} {data.numpy().tobytes().decode()} {_WHAT_TO_KEEP}.")
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(data.numpy().data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigurationError(
            f"The state that {donor} gave holds objects that are not taken from another process: "
            f"{str(error).splitlines()[0]} {_WHAT_TO_KEEP}; or allow a class by torch.serialization.add_safe_globals."
        ) from error
    return state


def _receive(
    store: Store,
    timeout: timedelta,
    donor: str,
    connections: p2p.Connections,
    outcome: SimpleQueue[tuple[Tensor, bool] | Exception],
) -> None:
    try:
        take = _Peer(donor, 1, store, timeout, connections)
        size, refused = take.move(take.group.recv, torch.zeros(2, dtype=torch.int64)).tolist()
        data = torch.empty(size, dtype=torch.uint8)
        for part in torch.split(data, _CHUNK):
            take.move(take.group.recv, part)
        outcome.put((data, bool(refused)))
        take.move(take.group.send, torch.ones(1))
    except Exception as error:  # receive_state() raises it
        outcome.put(error)


class _Peer:
    """The other side of a transfer. This side has the rank ``own``; ``connections`` gets those that are made."""

    def __init__(self, name: str, own: int, store: Store, timeout: timedelta, connections: p2p.Connections) -> None:
        self._name, self._rank, self._timeout, self._connections = name, 1 - own, timeout, connections
        with connections:
            self.group: Any = _connect(store, own)

    def move(self, begin: Callable[..., dist.Work], part: Tensor) -> Tensor:
        """Send or receive ``part``, and return it."""
        message = PendingMessage(self._name, self._rank, begin([part], self._rank, 0), [part])
        try:
            complete([message], self.group, self._timeout, self._connections)
        except WorkerFailedError:
            p2p.close_connections(self.group)
            raise
        return part


def _pack(state: Mapping[str, Any]) -> tuple[memoryview, str]:
    """Return the bytes to send, and why ``state`` cannot be packed, if so: then the bytes are that reason."""
    buffer, refused = io.BytesIO(), ""
    try:
        torch.save(dict(state), buffer)
    except Exception as error:  # objects report in various ways that they cannot be packed
        reason = (str(error).splitlines() or [""])[0]
        refused = f"holds objects that cannot be sent: {type(error).__name__}: {reason}."
        buffer = io.BytesIO(refused.encode())
    return buffer.getbuffer(), refused


def _connect(store: Store, rank: int) -> Any:
    return dist.ProcessGroupGloo(store, rank, 2, CONNECTING)
