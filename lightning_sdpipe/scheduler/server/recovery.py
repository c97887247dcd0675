"""What a restarted scheduler does before it decides anything: it waits until the workers have come back.

The workers of a run that is under way resume: they join again and repeat the ready that is unanswered. The old
scheduler may have died when only some members of a group had heard of it; they may be averaging and wait for the
others, and with an exchange that overlaps training they may even be groups ahead. So a worker that joins again brings
every answer that another member could still ask for: for each other worker, the last one that the two shared, since
who was in a later group has heard of the earlier ones. Readies are held until all workers are back or the grace has
passed, and a ready that an answer of another worker's answers gets exactly that. No iteration is lost, and none is done
twice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence

from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler.protocol import Answer

log = logging.getLogger(__name__)


class Recovery:
    """The scheduler's half; idle unless a worker turns out to be in the middle of a run.

    Args:
        expected: the workers of the run; once all are back, no ready is held any longer.
        grace: seconds to wait for them.
    """

    def __init__(self, expected: Collection[Worker], grace: float) -> None:
        self.holds = False
        """Are readies held now?"""
        self.until = math.inf
        """When the held readies may be decided: at once if all are back."""
        self.held: dict[Worker, int] = {}
        """Readies that are neither answered nor told to the policy, in the order in which they came."""
        self.answers: dict[Worker, dict[int, Answer]] = {}
        """Of the scheduler before this one, by the readies that they answer."""
        self._expected = frozenset(expected)
        self._grace = grace
        self._over = False
        self._back: set[Worker] = set()
        self._reported: dict[Worker, Sequence[Answer]] = {}

    def expect(self, workers: Collection[Worker]) -> None:
        """These are in the run now."""
        self._expected = frozenset(workers)
        self._end_if_all_are_back()

    def joins(self, worker: Worker, has_taken_part: bool, now: float) -> None:
        """A client is heard of for the first time, which joins or stays away. It may have taken part before."""
        self._back.add(worker)
        if has_taken_part and not self.holds and not self._over:
            self.holds, self.until = True, now + self._grace
            log.warning(
                "worker %s resumes a run that this scheduler did not start; it waits %g s for the others",
                worker,
                self._grace,
            )
        self._end_if_all_are_back()

    def _end_if_all_are_back(self) -> None:
        if self.holds and self._back >= self._expected:
            self.until = -math.inf

    def keep(self, answers: Sequence[Answer], reporter: Worker) -> None:
        """What a worker has heard of an earlier scheduler answers the readies of members that have not. It takes the
        place of what the worker reported before: each report is whole."""
        for member, iteration, answer in _readies(self._reported.pop(reporter, ()), reporter):
            kept = self.answers.get(member, {})
            if kept.get(iteration) is answer:
                del kept[iteration]
                if not kept:
                    del self.answers[member]
        if answers:
            self._reported[reporter] = answers
        for member, iteration, answer in _readies(answers, reporter):
            self.answers.setdefault(member, {})[iteration] = answer

    def answer_to(self, worker: Worker, iteration: int) -> Answer | None:
        """The group that answers this ready, if another member has heard of it; earlier ones are not asked for any
        more."""
        answers = self.answers.get(worker)
        if answers is None:
            return None
        answer = answers.get(iteration)
        later = {k: kept for k, kept in answers.items() if k > iteration}
        if later:
            self.answers[worker] = later
        else:
            del self.answers[worker]
        return answer

    def forget(self, worker: Worker) -> None:
        """``worker`` begins anew: its readies are others, even if their numbers are the same."""
        self.answers.pop(worker, None)

    def end(self) -> dict[Worker, int]:
        """The readies that were held; from now on none are."""
        self.holds, self.until, self._over = False, math.inf, True
        held, self.held = self.held, {}
        return held


def _readies(answers: Sequence[Answer], reporter: Worker) -> Iterator[tuple[Worker, int, Answer]]:
    """Yield what each answers: the member, its iteration, and the answer; but for those of ``reporter`` itself."""
    for answer in answers:
        for member, iteration in zip(answer.group.members, answer.iterations, strict=False):
            if iteration is not None and member != reporter:
                yield member, iteration, answer
