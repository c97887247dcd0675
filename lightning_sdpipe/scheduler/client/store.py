"""Client of the scheduler's key-value store, which all processes of a run share; keys are "room/name"."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler.client.client_thread import ClientThread


class StoreClient:
    """Sends requests over ``line``; may be called from any thread."""

    def __init__(self, line: ClientThread) -> None:
        self._line = line

    def put(self, key: str, value: bytes, timeout: float | None = None) -> None:
        """Set ``key`` for all processes."""
        self._ask(f"the scheduler to keep {key}", timeout, "put", (key,), value)

    def fetch(self, keys: Sequence[str], timeout: float | None = None) -> tuple[bytes | None, ...]:
        """Return the present values of ``keys``, None where there is none."""
        what = f"the scheduler to say what is at {', '.join(keys)}"
        return self._ask(what, timeout, "fetch", tuple(keys)).values

    def wait(
        self, keys: Sequence[str], timeout: float | None = None, cancelled: Callable[[], bool] | None = None
    ) -> tuple[bytes, ...]:
        """Return the values of ``keys`` when all are there.

        Raises:
            CancelledError: ``cancelled``, which is called often, has returned true.
        """
        what = f"another worker to set {', '.join(keys)}"
        reply = self._ask(what, timeout, "wait", tuple(keys), cancelled=cancelled)
        return tuple(value for value in reply.values if value is not None)

    def add(self, key: str, amount: int, timeout: float | None = None) -> int:
        """Add to the number at ``key``, 0 at first; return the sum."""
        return self._ask(f"the scheduler to add to {key}", timeout, "add", (key,), b"", amount).count

    def remove(self, key: str, timeout: float | None = None) -> bool:
        """Remove ``key``; return whether it was there."""
        return self._ask(f"the scheduler to forget {key}", timeout, "remove", (key,)).count > 0

    def _ask(
        self, what: str, timeout: float | None, *fields: object, cancelled: Callable[[], bool] | None = None
    ) -> e.Stored:
        reply = self._line.ask(what, e.Store, *fields, timeout=timeout, cancelled=cancelled)
        assert isinstance(reply, e.Stored)
        return reply
