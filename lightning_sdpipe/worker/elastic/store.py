"""A ``torch.distributed.Store`` over the scheduler's key-value store: how replicas find each other to make a group.

The scheduler imports no torch and its connection is encrypted where there are keys; a TCPStore would live and die with
one of the workers, for everybody who can reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from lightning_sdpipe.scheduler.client.elastic_client import CancelledError, ElasticClient


class SchedulerStore(Store):
    """Keys under ``room`` in the key-value store of the scheduler that ``client`` speaks to.

    Who makes a process group must keep a Python reference to it for as long as the group is being made. Every wait
    ends after ``timeout`` seconds with a SchedulerError, or with :class:`CancelledError` soon after ``cancelled`` says
    so: as when an epoch of membership is superseded while a member that is gone is waited for.
    """

    def __init__(
        self, client: ElasticClient, room: str, timeout: float, cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__()
        if "/" in room or not room:
            raise ValueError(f"room={room!r} is not allowed; give a name without a slash")
        self._client, self._room, self._seconds, self._cancelled = client, room, timeout, cancelled

    def set(self, key: str, value: bytes | str) -> None:
        self._check()
        self._client.put(self._name(key), value.encode() if isinstance(value, str) else bytes(value), self._seconds)

    def get(self, key: str) -> bytes:
        return self._wait([key], self._seconds)[0]

    def add(self, key: str, amount: int) -> int:
        self._check()
        return self._client.add(self._name(key), amount, self._seconds)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, self._seconds if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        return None not in self._client.fetch([self._name(key) for key in keys], self._seconds)

    def delete_key(self, key: str) -> bool:
        return self._client.remove(self._name(key), self._seconds)

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._seconds)

    def _wait(self, keys: Sequence[str], seconds: float) -> tuple[bytes, ...]:
        self._check()
        return self._client.wait([self._name(key) for key in keys], seconds, self._cancelled)

    def _name(self, key: str) -> str:
        return f"{self._room}/{key}"

    def _check(self) -> None:
        if self._cancelled():
            raise CancelledError(f"nobody needs the process group of {self._room} any more")
