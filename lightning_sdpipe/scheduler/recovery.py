"""What a restarted scheduler does before it decides anything: it waits until the workers have come back.

The workers of a run that is under way resume: they join again, each with the last group it got, and repeat
the ready that is unanswered. The old scheduler may have died when only some members of a group had heard of
it; they are averaging and wait for the others. So readies are held until all workers are back or the grace
has passed, and a held ready that another worker's last group answers gets exactly that group. No iteration is
lost, and none is done twice.
"""

from __future__ import annotations

import math

from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler.messages import Answer


class Recovery:
    """Holds readies until ``expected`` workers are back, at most ``grace`` seconds."""

    def __init__(self, expected: int, grace: float, now: float) -> None:
        self._until = now + grace
        self.held: dict[Worker, int] = {}
        self._expected = expected
        self._back: set[Worker] = set()
        self._answers: dict[int, Answer] = {}

    def resumed(self, worker: Worker, last: Answer | None) -> None:
        """``worker`` is back and got ``last`` before."""
        self._back.add(worker)
        if last is not None:
            self._answers[last.group.sequence] = last

    @property
    def until(self) -> float:
        """When the held readies may be decided: at once if all are back."""
        return -math.inf if len(self._back) >= self._expected else self._until

    @property
    def next_sequence(self) -> int:
        """A sequence number that no group had that anybody heard of."""
        return max(self._answers, default=-1) + 1

    def answer_heard_by_others(self, worker: Worker, iteration: int) -> Answer | None:
        """The group that answers this ready, if some other member got it."""
        for answer in self._answers.values():
            if answer.iteration_of(worker) == iteration:
                return answer
        return None
