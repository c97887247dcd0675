"""A bounded store of keys and values, through which workers find each other to make a process group.

Keys have the form ``room/name``. A room is made by its first key, and belongs to one group that is being made. When the
store is full, the oldest other rooms are forgotten whole; a room that alone would fill it gets no more. The store does
not survive the scheduler: a group whose making is interrupted is made again in the next epoch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler.server.outbox import Outbox

MAX_KEY_CHARACTERS = 512
MAX_VALUE_BYTES = 1 << 19
MAX_BYTES = 1 << 26
MAX_KEYS = 100_000
MAX_WAITING = 10_000
MAX_MISSING = 1 << 21
"""Most missing keys of all requests together: twice those of the most pipelines when each waits for all others."""
MAX_FETCHED = 1024
MAX_NUMBER = 1 << 62
PATIENCE = 10.0
"""Seconds after which a waiting request is forgotten unless it is repeated, as clients do twice a second."""

Asker: TypeAlias = tuple[bytes, int]
"""The peer that asked, and the number of its request."""
Answer: TypeAlias = tuple[Asker, tuple[bytes | None, ...]]
"""The asker, and the values of the keys."""


class StoreFull(ValueError):
    """The request exceeds what is allowed, or cannot be carried out."""


@dataclass(frozen=True)
class Waiting:
    """A peer's request for all of ``keys``, which expires at ``until``."""

    asker: Asker
    keys: tuple[str, ...]
    until: float
    missing: set[str]
    """Keys that were not there yet; one that was may be gone again."""


class KeyValueStore:
    """A store of at most ``max_keys`` keys with ``max_bytes`` bytes; requests wait for ``max_missing`` at most."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_keys: int = MAX_KEYS, max_missing: int = MAX_MISSING) -> None:
        self._max_bytes, self._max_keys, self._max_missing = max_bytes, max_keys, max_missing
        self._rooms: OrderedDict[str, dict[str, bytes]] = OrderedDict()
        self._bytes = self._keys = 0
        self._waiting: dict[Asker, Waiting] = {}
        """In the order in which they expire."""
        self._sums: OrderedDict[Asker, int] = OrderedDict()

    def handle(self, peer: bytes, request: e.Store, outbox: Outbox, now: float) -> None:
        """Answer a worker's ``request``, and the waiting requests that it satisfies."""
        number, keys = request.number, request.keys
        answered: list[Answer] = []
        try:
            if request.verb in ("fetch", "wait"):
                values = self.wait((peer, number), keys, now) if request.verb == "wait" else self.get(keys)
                reply = None if values is None else e.Stored(number, values)
            elif len(keys) != 1:
                raise StoreFull(f"{len(keys)} keys where one is to be set")
            elif request.verb == "put":
                answered, reply = self.put(keys[0], request.value), e.Stored(number)
            elif request.verb == "add":
                total, answered = self.add(keys[0], request.amount, (peer, number))
                reply = e.Stored(number, (), total)
            else:
                reply = e.Stored(number, (), int(self.remove(keys[0])))
        except StoreFull as error:
            outbox.ignore("refused", peer, str(error))
            outbox.say(peer, e.Refused(number, f"the key-value store refuses {error}"))
            return
        if reply is not None:
            outbox.say(peer, reply)
        for (asker, asked), found in answered:
            outbox.say(asker, e.Stored(asked, found))

    def put(self, key: str, value: bytes) -> list[Answer]:
        """Set ``key``; return the answers to requests that lacked only it.

        Raises:
            StoreFull: the value is too large, or its room is; nothing has changed.
        """
        too_long = len(key) > MAX_KEY_CHARACTERS or len(value) > min(MAX_VALUE_BYTES, self._max_bytes)
        if too_long or not key.partition("/")[2]:
            raise StoreFull(
                f"{len(value)} bytes at {key[:40]!r}; keys of the form room/name with at most {MAX_KEY_CHARACTERS} "
                f"characters and {MAX_VALUE_BYTES} bytes are allowed: the store is for finding each other, not for data"
            )
        name = _namespace(key)
        room = self._rooms.get(name, {})
        before = room.get(key)
        self._make_space(name, len(value) - len(before or b""), int(before is None))
        self._rooms.setdefault(name, room)[key] = value
        answered = []
        for waiting in [waiting for waiting in self._waiting.values() if key in waiting.missing]:
            waiting.missing.remove(key)
            if not waiting.missing:
                waiting.missing.update(self._missing(waiting.keys))
            if not waiting.missing:
                del self._waiting[waiting.asker]
                answered.append((waiting.asker, self.get(waiting.keys)))
        return answered

    def add(self, key: str, amount: int, once: Asker) -> tuple[int, list[Answer]]:
        """Add to the number at ``key``; a repetition of the request ``once`` only gets its answer again.

        Raises:
            StoreFull: the value at ``key`` is no number.
        """
        if once in self._sums:
            return self._sums[once], []
        before = self.get((key,))[0]
        number = before or b"0"
        is_number = number.removeprefix(b"-").isdigit() and len(number) <= len(b"%d" % -MAX_NUMBER)
        value = int(number) + amount if is_number else MAX_NUMBER + 1
        if abs(value) > MAX_NUMBER:
            raise StoreFull(f"{amount} more at {key}, which has no number, or one that would be beyond 64 bits")
        answered = self.put(key, b"%d" % value)
        self._sums[once] = value
        while len(self._sums) > MAX_WAITING:
            self._sums.popitem(last=False)
        return value, answered

    def get(self, keys: Sequence[str]) -> tuple[bytes | None, ...]:
        """Return the present values of ``keys``."""
        return tuple(self._rooms.get(_namespace(key), {}).get(key) for key in keys)

    def _missing(self, keys: Sequence[str]) -> set[str]:
        return {key for key, value in zip(keys, self.get(keys), strict=True) if value is None}

    def wait(self, asker: Asker, keys: tuple[str, ...], now: float) -> tuple[bytes | None, ...] | None:
        """Return the values of ``keys`` if all are there; else None, and ``asker`` is answered later."""
        missing = self._missing(keys)
        if not missing:
            return self.get(keys)
        while self._waiting and (first := next(iter(self._waiting.values()))).until <= now:
            del self._waiting[first.asker]
        waits = Waiting(asker, keys, now + PATIENCE, missing)
        if (before := self._waiting.get(asker)) is None or before.keys != keys:  # else it is a repetition, as most are
            self._check_waits(waits)
        self._waiting.pop(asker, None)
        self._waiting[asker] = waits
        return None

    def _check_waits(self, waits: Waiting) -> None:
        """Raise StoreFull if that is too much to wait for."""
        keys, missing = waits.keys, waits.missing
        others = [len(waiting.missing) for waiting in self._waiting.values() if waiting.asker != waits.asker]
        long = len(keys) > MAX_FETCHED or any(len(key) > MAX_KEY_CHARACTERS for key in keys)
        if long or len(others) >= MAX_WAITING or sum(others) + len(missing) > self._max_missing:
            raise StoreFull(
                f"{len(keys)} keys to wait for, {len(missing)} of them missing; at most {MAX_FETCHED} of at most "
                f"{MAX_KEY_CHARACTERS} characters are allowed, and of all workers {MAX_WAITING} requests for "
                f"{self._max_missing} missing keys"
            )

    def remove(self, key: str) -> bool:
        """Remove ``key``; return whether it was there."""
        room = self._rooms.get(_namespace(key), {})
        value = room.pop(key, None)
        if value is None:
            return False
        self._bytes, self._keys = self._bytes - len(value), self._keys - 1
        if not room:
            del self._rooms[_namespace(key)]
        return True

    def _make_space(self, name: str, more_bytes: int, more_keys: int) -> None:
        """Make space for room ``name`` to grow by that much, forgetting other rooms."""
        if self._bytes + more_bytes > self._max_bytes or self._keys + more_keys > self._max_keys:
            room = self._rooms.get(name, {})
            own_bytes, own_keys = sum(map(len, room.values())) + more_bytes, len(room) + more_keys
            if own_bytes > self._max_bytes or own_keys > self._max_keys:
                raise StoreFull(
                    f"more in room {name}, which would hold {own_bytes} bytes under {own_keys} keys; at most "
                    f"{self._max_bytes} bytes under {self._max_keys} keys are allowed"
                )
        self._bytes, self._keys = self._bytes + more_bytes, self._keys + more_keys
        while self._bytes > self._max_bytes or self._keys > self._max_keys:
            self._forget(next(other for other in self._rooms if other != name))

    def _forget(self, name: str) -> None:
        room = self._rooms.pop(name)
        self._bytes -= sum(map(len, room.values()))
        self._keys -= len(room)


def _namespace(key: str) -> str:
    return key.partition("/")[0]
