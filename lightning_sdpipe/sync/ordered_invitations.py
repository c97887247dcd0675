"""Ordered execution of one worker's meetings with other groups, one at a time, as the scheduler decided them.

A worker learns of the meeting that answers it from its training's connection, and of invitations from its heartbeats'
connection, so they can arrive in another order. All members of a group have the same meetings, and keep equal models
only if each carries them out, with its steps, in the same order. So an invitation waits

- for the boundary that was decided before it: where the worker waited, it has carried out all its meetings, and goes
  on;
- if the worker waits in that boundary, for the step to end: the others get a model that contains the step.

A worker goes on from its boundary when it has carried out all invitations that were decided before.

There is no deadlock: a worker that carries a meeting out waits for members that still have meetings of lower numbers,
or end a step for which they need no worker that waits for this one (``policies/phd_psgd.py``,
``policies/following_stages.py``).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta

from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker


class OrderedInvitations:
    """Meetings and invitations of ``worker``, in order.

    Args:
        worker: this worker.
        carry_out: takes part in a meeting, with the newest step if the second argument says so; returns the seconds
            waited for others. It is called by one thread at a time.
        timeout: limit of every wait.
    """

    def __init__(self, worker: Worker, carry_out: Callable[[Group, bool], float], timeout: timedelta) -> None:
        self._worker = worker
        self._carry_out = carry_out
        self._seconds = timeout.total_seconds()
        self._changed = threading.Condition()
        self._invited: deque[tuple[Group, int | None]] = deque()
        self._standing = self._busy = self._closing = False
        self._passed: int | None = None
        """Iteration of the last boundary that this worker has gone on from since it joined."""
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def invite(self, group: Group, after: int | None) -> None:
        """Queue ``group``, of which this worker is a passive member. The scheduler decided it after it had answered
        iteration ``after``; called in the order of decisions, by any thread."""
        with self._changed:
            self._invited.append((group, after))
            self._changed.notify_all()

    def begin(self) -> None:
        """Start taking part. Invitations that came before are carried out, too."""
        self._closing, self._passed = False, None
        self._thread = threading.Thread(target=self._serve, name="meetings of groups", daemon=True)
        self._thread.start()

    def stand(self) -> None:
        """Mark the step as over: invitations may use its result, until :meth:`go_on`."""
        with self._changed:
            self._standing = True
            self._changed.notify_all()

    def go_on(self, iteration: int, group: Group) -> float:
        """Carry out ``group``, which answers ``iteration``, when all earlier decisions are carried out.

        Returns:
            Seconds waited for others in it.

        Raises:
            WorkerFailedError: another worker failed or does not come, now or in an invitation.
        """
        with self._changed:
            self._wait(lambda: self._done_before(group), "earlier meetings")
        waited = self._carry_out(group, True)
        with self._changed:
            self._standing, self._passed = False, iteration
            self._changed.notify_all()
        return waited

    def end(self) -> None:
        """Stop taking part, when all invitations have arrived: carries out the remaining ones.

        Raises:
            WorkerFailedError: another worker failed or does not come.
        """
        if self._thread is None:
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._wait(lambda: not self._invited and not self._busy, "its last meetings")
        self._thread.join()
        self._thread = None

    def _done_before(self, group: Group) -> bool:
        return not self._busy and not (self._invited and self._invited[0][0].sequence < group.sequence)

    def _may_begin(self) -> bool:
        if not self._invited:
            return self._closing
        group, after = self._invited[0]
        behind = after is not None and (self._passed is None or self._passed < after)
        return not behind and (self._standing or self._worker not in group.standing)

    def _wait(self, there: Callable[[], bool], what: str) -> None:
        """Wait for a condition, with the lock held."""
        arrived = self._changed.wait_for(lambda: self._failure is not None or there(), self._seconds)
        if self._failure is not None:
            raise self._failure
        if not arrived:
            next_one = f", of which group {self._invited[0][0]} comes next" if self._invited else ""
            raise WorkerFailedError(
                f"worker {self._worker} waited {self._seconds:g} s until {what} with other groups were over{next_one}"
            )

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._may_begin)
                if not self._invited:
                    return
                group, _ = self._invited.popleft()
                self._busy = True
            failure: Exception | None = None
            try:
                self._carry_out(group, self._worker in group.standing)
            except Exception as error:  # raised where the training next asks; a thread could only print it
                failure = error
            with self._changed:
                self._busy, self._failure = False, failure
                self._changed.notify_all()
            if failure is not None:
                return
