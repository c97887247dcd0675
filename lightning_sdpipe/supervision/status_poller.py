"""Polls the scheduler in a thread: an answer may take seconds, and nothing else waits for it.

The module also reads what a supervisor needs from the status of an elastic run.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.scheduler.log.status import Status
from lightning_sdpipe.supervision.events import Seen


def seen(status: Status, asked: float) -> Seen:
    """Return what ``status`` says of the run; ``asked`` is when the question was asked."""
    members = status.members
    if members is None:
        return Seen(asked, {}, failure=status.failure)
    return Seen(
        asked,
        {pipeline: _life(incarnation) for pipeline, incarnation in members.lives.items()},
        members.leader,
        members.update,
        frozenset(members.ever),
        {_life(member[1]): reason for member, reason in zip(members.gone, members.reasons, strict=True)},
        status.failure or members.over,
        members.resumed,
    )


def _life(incarnation: int) -> str:
    return f"{incarnation:x}"


PERIOD = 0.25


class StatusPoller:
    """Calls ``look`` with the time every ``PERIOD`` seconds, and writes to the descriptor ``wake`` when it answers.

    An exception of ``look`` ends the supervisor, unless the scheduler did not answer: it may be starting again.
    """

    def __init__(self, look: Callable[[float], Seen], wake: int) -> None:
        self._look = look
        self._wake = wake
        self._answers: deque[Seen | Exception] = deque(maxlen=1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="looker", daemon=True)
        self._thread.start()

    def answer(self) -> Seen | None:
        """Return the newest answer, if it has not been taken yet."""
        try:
            answer = self._answers.pop()
        except IndexError:
            return None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the thread, and wait for it."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(PERIOD):
            try:
                self._answers.append(self._look(time.monotonic()))
            except SchedulerError:
                continue
            except Exception as error:
                self._answers.append(error)
                return
            finally:
                with contextlib.suppress(BlockingIOError):  # the last wake was not read yet
                    os.write(self._wake, b"\0")
