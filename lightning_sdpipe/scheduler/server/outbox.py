"""Replies that go out when an input is dealt with, a count of messages that changed nothing, and deferred requests."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m

logger = logging.getLogger(__name__)

Addressed = tuple[bytes, m.Reply | e.Reply]
"""A routing identity and the message for it."""

LOGGED_PER_KIND = 20
"""Ignored messages of one kind that are logged; the rest are only counted."""


class Outbox:
    """Replies in the order in which they were said, and counts of ignored messages by kind."""

    def __init__(self) -> None:
        self.ignored: Counter[str] = Counter()
        self._replies: list[Addressed] = []

    def say(self, peer: bytes, message: m.Reply | e.Reply) -> None:
        """Send ``message`` when this input is dealt with."""
        self._replies.append((peer, message))

    def sent(self) -> list[Addressed]:
        """Return what was said since the last call, to be sent now."""
        sent, self._replies = self._replies, []
        return sent

    def clear(self) -> None:
        """Drop what was said since the last call."""
        self._replies.clear()

    def ignore(self, kind: str, peer: bytes, detail: str) -> None:
        """Count a message from ``peer`` that changes nothing, and log it unless there were many."""
        self.ignored[kind] += 1
        if self.ignored[kind] <= LOGGED_PER_KIND:
            more = "" if self.ignored[kind] < LOGGED_PER_KIND else "; more of them will only be counted"
            logger.warning("%s message from %r ignored: %s%s", kind, peer[:32], detail[:200], more)


class DeferredRequests:
    """Requests that came before their pipeline was a member or had a process group: the last of each kind from each
    worker, in the order in which it made them."""

    def __init__(self) -> None:
        self._kept: dict[Worker, list[tuple[bytes, m.Request | e.Enrol]]] = {}
        self._since: dict[Worker, float] = {}

    def __contains__(self, worker: Worker) -> bool:
        return worker in self._kept

    def keep(self, peer: bytes, request: m.Request | e.Enrol, now: float) -> None:
        """Keep ``request`` of ``peer``; that of a newer session replaces all requests of an older one."""
        kept = [*self._kept.get(request.worker, ()), (peer, request)]
        kept.sort(key=lambda pair: pair[1].number)
        newest = {type(other): (at, other) for at, other in kept if other.incarnation == request.incarnation}
        if (leaves := newest.get(m.Leave)) is not None:  # a leave outdates earlier joins and readies
            number = leaves[1].number
            newest = {
                kind: (at, other)
                for kind, (at, other) in newest.items()
                if other.number >= number or not isinstance(other, m.Join | m.Ready)
            }
        order = sorted(newest.values(), key=lambda pair: (not isinstance(pair[1], e.Enrol), pair[1].number))
        self._kept[request.worker] = order
        self._since.setdefault(request.worker, now)

    def of(self, worker: Worker) -> list[m.Request | e.Enrol]:
        """Return all kept requests of ``worker``."""
        return [request for _, request in self._kept.get(worker, ())]

    def waited(self, worker: Worker, now: float) -> float:
        """Return the seconds since the first kept request of ``worker``."""
        return now - self._since.get(worker, now)

    def workers(self) -> list[Worker]:
        """Return the workers with kept requests."""
        return [*self._kept]

    def count(self, kind: type[m.Request]) -> int:
        """Return the number of kept requests of that ``kind``."""
        return sum(isinstance(request, kind) for kept in self._kept.values() for _, request in kept)

    def first(self, worker: Worker) -> tuple[bytes, m.Request | e.Enrol] | None:
        """Return the first kept request of ``worker`` and its peer, if there is one."""
        kept = self._kept.get(worker)
        return kept[0] if kept else None

    def pop(self, worker: Worker) -> None:
        """Remove the first kept request of ``worker``."""
        del self._kept[worker][0]
        if not self._kept[worker]:
            self.forget([worker])

    def forget(self, workers: Iterable[Worker]) -> None:
        """Forget all requests of these workers, which are gone."""
        for worker in workers:
            self._since.pop(worker, None)
            self._kept.pop(worker, None)
