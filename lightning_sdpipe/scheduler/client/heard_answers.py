"""What a worker tells a restarted scheduler: the groups that it has heard of, and others may not have."""

from __future__ import annotations

from itertools import accumulate

from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler.protocol import Answer
from lightning_sdpipe.scheduler.server.recovery import log

MEMBERS_IN_REPORT = 20_000
"""Of all groups that one report has room for: each takes up to 40 bytes of the largest request."""


class HeardAnswers:
    """A worker's half: the answers that it has heard and that another member may not have."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._last_with: dict[Worker, Answer] = {}
        self.highest: int | None = None
        """The highest number of a group that was heard of; -1 if none was, None until the worker has joined."""

    def joined(self) -> None:
        """The worker has joined."""
        if self.highest is None:
            self.highest = -1

    def hear(self, answer: Answer) -> None:
        """The answer to this worker's ready came."""
        group = answer.group
        self.highest = max(-1 if self.highest is None else self.highest, group.sequence)
        for member in group.members:
            if not group.passive or member not in group.passive:  # who is passive asks for nothing
                self._last_with[member] = answer

    def to_report(self) -> tuple[Answer, ...]:
        """Each once, oldest first; of more than fit into a request the newest."""
        unique = {answer.group.sequence: answer for answer in self._last_with.values()}
        newest_first = sorted(unique, reverse=True)
        sizes = accumulate(len(unique[number].group.members) for number in newest_first)
        fitting = [number for number, members in zip(newest_first, sizes, strict=True) if members <= MEMBERS_IN_REPORT]
        if len(fitting) < len(unique):
            log.warning("worker %s cannot report %d groups at once", self._worker, len(unique) - len(fitting))
        return tuple(unique[number] for number in reversed(fitting))

    def forget(self) -> None:
        """The worker has left: all its groups have averaged, so their members have heard of them."""
        self._last_with.clear()
