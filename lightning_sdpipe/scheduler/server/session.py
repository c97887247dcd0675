"""What the scheduler knows of one start of a worker, from its first join to the next start of that worker.

    state      | joins      is ready   gets a group   leaves   falls silent
    -----------+-----------------------------------------------------------
    AWAY       | COMPUTING                            AWAY
    COMPUTING  |            WAITING                   AWAY     LOST
    WAITING    |                       COMPUTING      AWAY     LOST
    LOST       | COMPUTING                            AWAY

Where the table is empty, the input is illegal: :meth:`Session.move` raises and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum

from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m


class State(Enum):
    """Of a session; the policy counts the worker among the active in the middle two."""

    AWAY = "away"
    COMPUTING = "computing"
    WAITING = "waiting"
    LOST = "lost"

    __hash__ = object.__hash__  # Enum's own is Python code, and every signal looks states up


class Input(Enum):
    """What changes the state of a session."""

    JOINS = "joins"
    IS_READY = "is ready"
    GETS_GROUP = "gets a group"
    LEAVES = "leaves"
    FALLS_SILENT = "falls silent"

    __hash__ = object.__hash__


# Under short names, since an Enum looks its members up slowly before Python 3.12, and each signal needs several.
AWAY, COMPUTING, WAITING, LOST = State
JOINS, IS_READY, GETS_GROUP, LEAVES, FALLS_SILENT = Input

TRANSITIONS: dict[State, dict[Input, State]] = {
    AWAY: {JOINS: COMPUTING, LEAVES: AWAY},
    COMPUTING: {IS_READY: WAITING, LEAVES: AWAY, FALLS_SILENT: LOST},
    WAITING: {GETS_GROUP: COMPUTING, LEAVES: AWAY, FALLS_SILENT: LOST},
    LOST: {JOINS: COMPUTING, LEAVES: AWAY},
}

ACTIVE = frozenset({COMPUTING, WAITING})


class IllegalInput(ValueError):
    """The table of transitions has no such entry; the session is as it was before."""


class ReceivedRequests:
    """Which requests of a session have come: each counts once, and a leave outdates what was sent before it."""

    __slots__ = ("_last", "left_at")

    def __init__(self) -> None:
        self._last: dict[bytes, int] = {}
        self.left_at = -1
        """The number of the last leave, which may overtake what the other socket sent."""

    def is_new(self, number: int, peer: bytes) -> bool:
        """Numbers grow on each socket of the worker; False for what was seen before."""
        if number <= self._last.get(peer, -1):
            return False
        self._last[peer] = number
        return True


class Session:
    """One start; ``id`` is its incarnation."""

    __slots__ = (
        *("answer", "answered", "heard", "id", "invitations", "iteration", "member_peer", "peer", "received"),
        *("state", "worker"),
    )

    def __init__(self, worker: Worker, id: int, now: float) -> None:
        self.worker = worker
        self.id = id
        self.peer, self.member_peer = m.routing_id(worker, id), e.peer_of(worker, id)
        self.state = AWAY
        self.iteration: int | None = None
        """Of the last ready that was accepted."""
        self.answer: m.Answer | None = None
        """To that ready; None until it is decided."""
        self.answered: int | None = None
        """The last iteration that was answered since it joined."""
        self.invitations = 0
        """To groups that it was a passive member of."""
        self.received = ReceivedRequests()
        self.heard = now
        """When anything of it came last."""

    @property
    def active(self) -> bool:
        """Does the policy count on the worker?"""
        return self.state in ACTIVE

    def move(self, input: Input) -> None:
        """Change the state as the table says.

        Raises:
            IllegalInput: it says nothing; nothing has changed.
        """
        after = TRANSITIONS[self.state].get(input)
        if after is None:
            raise IllegalInput(f"worker {self.worker} {input.value} while it is {self.state.value}")
        self.state = after

    def is_ready(self, iteration: int) -> None:
        """The ready of ``iteration`` was accepted."""
        self.move(IS_READY)
        self.iteration = iteration
        self.answer = None

    def is_answered(self, answer: m.Answer) -> None:
        """``answer`` is the answer to its ready."""
        self.move(GETS_GROUP)
        self.answer, self.answered = answer, self.iteration

    def validate(self) -> None:
        """Raise AssertionError if what this session knows contradicts itself."""
        if self.state is WAITING:
            assert self.iteration is not None, self
            assert self.answer is None, self
        if self.answer is not None:
            assert m.iteration_of(self.worker, self.answer) == self.iteration, self
        if self.state is AWAY:
            assert self.answer is None, self

    def __repr__(self) -> str:
        return f"Session({self.worker}, {self.state.value}, iteration={self.iteration}, answer={self.answer})"


class Sessions:
    """The current session of each worker that ever joined."""

    def __init__(self) -> None:
        self._current: dict[Worker, Session] = {}

    def begin(self, worker: Worker, id: int, now: float) -> Session:
        """A new start of ``worker`` takes the place of an older one."""
        session = self._current[worker] = Session(worker, id, now)
        return session

    def is_socket_of(self, peer: bytes, worker: Worker, id: int) -> bool:
        """May ``peer`` speak for ``worker`` in that session?"""
        session = self._current.get(worker)
        if session is not None and session.id == id:
            return peer in (session.peer, session.member_peer)
        return peer in (m.routing_id(worker, id), e.peer_of(worker, id))

    def of(self, worker: Worker, id: int) -> Session | None:
        """The session ``id`` of ``worker``, if it is the current one."""
        session = self._current.get(worker)
        return session if session is not None and session.id == id else None

    def get(self, worker: Worker) -> Session | None:
        """The current session of ``worker``, if it ever joined."""
        return self._current.get(worker)

    def __getitem__(self, worker: Worker) -> Session:
        return self._current[worker]

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._current.values()))

    def of_stage(self, stage: int) -> list[Session]:
        """By pipeline."""
        return sorted((s for s in self if s.worker.stage == stage), key=lambda session: session.worker)

    def active_in(self, stage: int) -> list[Worker]:
        """Return the workers of ``stage`` that the policy counts on, by pipeline."""
        return [session.worker for session in self.of_stage(stage) if session.active]

    def takes_part(self, worker: Worker) -> bool:
        """Does the policy count on ``worker``?"""
        session = self._current.get(worker)
        return session is not None and session.active

    def validate(self) -> None:
        """Raise AssertionError if they contradict each other or themselves."""
        for worker, session in self._current.items():
            session.validate()
            assert session.worker == worker, session


class ReportedAnswers:
    """Of the scheduler before this one: groups that some of their members have not heard of.

    That one may have died when only some members of a group had heard of it; they may be averaging and wait for the
    others, and with an exchange that overlaps training they may even be groups ahead. So a worker brings every answer
    that another member could still ask for: for each other worker, the last one that the two shared, since members of a
    later group have heard of the earlier ones. A ready that one of them answers gets exactly that: no iteration is
    lost, and none is done twice. ``beside`` are the workers for which a member stands besides itself.
    """

    def __init__(self, beside: Callable[[Worker], Sequence[Worker]] = lambda member: ()) -> None:
        self.answers: dict[Worker, dict[int, m.Answer]] = {}
        """By the readies that they answer."""
        self._beside = beside
        self._reported: dict[Worker, Sequence[m.Answer]] = {}

    def keep(self, answers: Sequence[m.Answer], reporter: Worker) -> None:
        """What a worker has heard of an earlier scheduler answers the readies of members that have not. It takes the
        place of what the worker reported before: each report is whole."""
        for member, iteration, answer in self._readies(self._reported.pop(reporter, ()), reporter):
            kept = self.answers.get(member, {})
            if kept.get(iteration) is answer:
                del kept[iteration]
                if not kept:
                    del self.answers[member]
        if answers:
            self._reported[reporter] = answers
        for member, iteration, answer in self._readies(answers, reporter):
            self.answers.setdefault(member, {})[iteration] = answer

    def answer_to(self, worker: Worker, iteration: int) -> m.Answer | None:
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

    def _readies(self, answers: Sequence[m.Answer], reporter: Worker) -> Iterator[tuple[Worker, int, m.Answer]]:
        """Yield what each answers: the worker, its iteration, and the answer; but for those of ``reporter`` itself."""
        for answer in answers:
            for member, iteration in zip(answer.group.members, answer.iterations, strict=False):
                if iteration is None:
                    continue
                for worker in (member, *self._beside(member)):
                    if worker != reporter:
                        yield worker, iteration, answer
