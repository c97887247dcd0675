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
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.utils._pytree import tree_map_only

from lightning_sdpipe.errors import ConfigurationError, WorkerFailedError
from lightning_sdpipe.exchange.transfers import PendingMessage, complete
from lightning_sdpipe.lightning_internals import checkpoint_of
from lightning_sdpipe.scheduler.client.membership_client import CancelledError

log = logging.getLogger(__name__)

CONNECTING = timedelta(seconds=10)
"""Time in which both sides must connect to make their group."""
_CHUNK = 2**23  # bytes that are sent at once, and must arrive in time
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
    """Send ``state`` in a thread; a newcomer that goes away meanwhile is no failure. If the state cannot be sent, the
    newcomer is told why, and the donor goes on."""

    def send() -> None:
        try:
            group = _connect(store, 0)  # first: the newcomer has begun to connect
            packed, refused = _pack(state)
            if refused:
                log.warning("a newcomer did not get the state that it was to be given, which %s", refused)
            data = torch.frombuffer(packed, dtype=torch.uint8)
            give = _Peer("the newcomer", 1, group, timeout, threading.Event())
            give.move(group.send, torch.tensor([data.numel(), int(bool(refused))]))
            for part in torch.split(data, _CHUNK):
                give.move(group.send, part.clone())  # which alone is kept if a wait is given up
        except RuntimeError as error:
            log.warning("a newcomer did not get the state that it was to be given: %s", str(error).splitlines()[0])

    threading.Thread(target=send, name="donation", daemon=True).start()


def receive_state(
    store: Store, timeout: timedelta, donor: str, cancelled: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Receive the state that :func:`send_state` sends; each part of it may take ``timeout``.

    Raises:
        WorkerFailedError: the donor is gone, or does not answer; or ``cancelled`` returns true, as when another donor
            is there. gloo connects for up to five times :data:`CONNECTING` and cannot be told to stop, so that is left
            to a thread.
        ConfigurationError: the state holds objects that cannot be sent, or are not taken from another process.
    """
    outcome: SimpleQueue[tuple[Tensor, bool] | Exception] = SimpleQueue()
    in_vain = threading.Event()
    arguments = store, timeout, donor, in_vain, outcome
    threading.Thread(target=_receive, args=arguments, name="receiving", daemon=True).start()
    while True:
        try:
            came = outcome.get(timeout=_GLANCE)
            break
        except Empty:
            if cancelled():
                in_vain.set()
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
    in_vain: threading.Event,
    outcome: SimpleQueue[tuple[Tensor, bool] | Exception],
) -> None:
    try:
        group = _connect(store, 1)
        take = _Peer(donor, 0, group, timeout, in_vain)
        size, refused = take.move(group.recv, torch.zeros(2, dtype=torch.int64)).tolist()
        data, landing = torch.empty(size, dtype=torch.uint8), torch.empty(min(size, _CHUNK), dtype=torch.uint8)
        for part in torch.split(data, _CHUNK):
            part.copy_(take.move(group.recv, landing[: part.numel()]))
        outcome.put((data, bool(refused)))
    except Exception as error:  # receive_state() raises it
        outcome.put(error)


@dataclass(frozen=True)
class _Peer:
    """The other side of a transfer, of that ``rank`` in ``group``."""

    name: str
    rank: int
    group: Any
    timeout: timedelta
    in_vain: threading.Event

    def move(self, begin: Callable[..., dist.Work], part: Tensor) -> Tensor:
        """Send or receive ``part``, and return it."""
        message = PendingMessage(self.name, self.rank, begin([part], self.rank, 0), [part])
        complete([message], self.group, self.timeout, self.in_vain)
        return part


def _pack(state: Mapping[str, Any]) -> tuple[memoryview, str]:
    """Return the bytes to send, and the reason if they are not ``state``: then they are that reason."""
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
