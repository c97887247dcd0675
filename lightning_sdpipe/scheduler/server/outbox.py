"""What becomes of messages: replies that go out when an input is dealt with, and a count of what changed nothing."""

from __future__ import annotations

import logging
from collections import Counter

from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m

logger = logging.getLogger(__name__)

Addressed = tuple[bytes, m.Reply | e.Reply]
"""A routing identity and the message for it."""

LOGGED_PER_KIND = 20
"""Ignored messages of one kind that are logged; the rest are only counted."""


class Outbox:
    """Replies in the order in which they were said, and what was ignored, by kind."""

    def __init__(self) -> None:
        self.ignored: Counter[str] = Counter()
        self._replies: list[Addressed] = []

    def say(self, peer: bytes, message: m.Reply | e.Reply) -> None:
        """Send ``message`` when this input is dealt with."""
        self._replies.append((peer, message))

    def sent(self) -> list[Addressed]:
        """Return what was said since the last time, to be sent now."""
        sent, self._replies = self._replies, []
        return sent

    def clear(self) -> None:
        """Send nothing of what was said since the last time."""
        self._replies.clear()

    def ignore(self, kind: str, peer: bytes, detail: str) -> None:
        """A message from ``peer`` changes nothing; it is counted, and logged unless there were many."""
        self.ignored[kind] += 1
        if self.ignored[kind] <= LOGGED_PER_KIND:
            more = "" if self.ignored[kind] < LOGGED_PER_KIND else "; more of them will only be counted"
            logger.warning("%s message from %r ignored: %s%s", kind, peer[:32], detail[:200], more)
