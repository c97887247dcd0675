"""A worker's side of an elastic run: how it comes, meets the others, tries again, gives its state, and goes.

In short, for one worker (stage j of pipeline i, ``incarnation`` drawn by its pipeline's first stage, equal on all)::

    client = MembershipClient(address, Worker(j, i), incarnation, credentials=keys, told=Told(epoch=..., broke=...))
    answer = client.enrol({"version": ..., "model": ..., "seed": ...})      # waits: Start, or Receive
    while isinstance(answer, Receive):                     # get the state from pipeline answer.donor, and then
        answer = client.received(answer.transfer)          # waits: Start, or another Receive;
        # or client.missed(answer.transfer, why), likewise, if it did not come. client.is_current(transfer) says
        # whether there is still somebody who gives it.
    answer.epoch, answer.fresh                             # training may begin; fresh: nobody could give a state

    client.epoch                                           # the newest: .number, .pipelines (sorted: ranks), .leader
    client.holds([3, 4])                                   # epochs of whose members this worker has a process group
    client.held_up                                         # why no turn may begin now: too few pipelines; or ""
    client.donation_due(update)                            # after every update, cheap: a Donate to snapshot for now
    client.donation, client.snapshot_taken(transfer, n)    # or, where stages agree among themselves when to take it
    client.meet(key, value)                                # waits for all replicas of the stage: Met
    client.completed(sequence)                             # the result of that group is in the model; cheap
    client.broken(group, together=False)                   # it is not: waits for a Group to try again in, or Skip
    client.put / fetch / wait / add / remove               # the key-value store; keys "room/name"
    client.depart(finished=True); client.failed(reason); client.close()

``told`` is called in the client's thread, and must return quickly: ``epoch(Epoch)`` for each new one,
``broke(sequence)`` when another member did not get the result of a group (wake up whoever waits in it),
``dropped(transfer)`` when nobody waits for a snapshot any more, ``ended(reason)`` when this process must end,
``over(reason, failed)`` when the run has.

Every method may be called from any thread. Whatever waits ends after its timeout with a SchedulerError that says what
the scheduler was waiting for, with :class:`MustEndError` when this process was declared lost, or with
:class:`RunOverError`. Groups of readies and leases come from
:class:`~lightning_sdpipe.scheduler.client.client.SchedulerClient`, made with ``incarnation=`` of the same number; their
``Group.epoch`` names a process group that all members hold. ``SchedulerClient.serves`` is (M, N) after its ``greet``.

A scheduler that is started again hears of the run from its members by itself.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import zmq

from lightning_sdpipe.errors import MustEndError, RefusedError, SchedulerError, WorkerFailedError
from lightning_sdpipe.membership.members import Donate, Epoch, Exchanging, Met, Receive
from lightning_sdpipe.membership.stuck import MEETINGS
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler.client.client_thread import ClientThread
from lightning_sdpipe.scheduler.client.connection import Connection
from lightning_sdpipe.scheduler.credentials import WorkerKeys
from lightning_sdpipe.scheduler.membership_protocol import Skip, Start

__all__ = [
    "Callbacks",
    "CancelledError",
    "MembershipClient",
    "MustEndError",
    "Receive",
    "RunOverError",
    "Skip",
    "Start",
]

GLANCE = 0.02
"""Seconds between looks whether a wait is still needed."""
REMEMBERED = 1024
"""Groups of which it is known that their result is in the model."""
TAKEN = 64
"""Last snapshots that are remembered."""
MET = 8
"""Last meetings, and groups that were to try again, that are reported to a scheduler which was started again."""


class RunOverError(WorkerFailedError):
    """The run is over: ``failed``, or all have finished."""

    def __init__(self, reason: str, failed: bool) -> None:
        super().__init__(reason)
        self.failed = failed


class CancelledError(SchedulerError):
    """What was waited for is not needed any more."""


def _nothing(*_: object) -> None:
    return None


@dataclass(frozen=True)
class Callbacks:
    """What is called in the client's thread; see the module's text."""

    epoch: Callable[[Epoch], None] = _nothing
    broke: Callable[[int], None] = _nothing
    dropped: Callable[[str], None] = _nothing
    ended: Callable[[str], None] = _nothing
    over: Callable[[str, bool], None] = _nothing


Key: TypeAlias = tuple[str, str | int]


class _Ask:
    """A request that waits for its answer, and is repeated until that has come."""

    def __init__(self, key: Key, request: e.Request) -> None:
        self.key = key
        self.request = request
        self.reply: e.Reply | None = None
        self.error: Exception | None = None
        self.waits_for = ""


class MembershipClient:
    """Speaks for one process; see the module's text.

    Args:
        address: of the scheduler.
        worker: this one.
        incarnation: of its pipeline's job, above 0.
        timeout: seconds that a wait lasts at most, unless a method is given another.
        credentials: the worker's keys; None on loopback.
        told: what is called when something happens.
    """

    def __init__(
        self,
        address: str,
        worker: Worker,
        incarnation: int,
        *,
        timeout: float = 60.0,
        credentials: WorkerKeys | None = None,
        told: Callbacks | None = None,
    ) -> None:
        self.address, self.worker, self.incarnation = address, worker, incarnation
        self._timeout = timeout
        self._told = told or Callbacks()
        self._changed = threading.Condition()
        """Guards all that follows."""
        self._number = 0
        self._asks: dict[Key, _Ask] = {}
        self._fingerprint: dict[str, str] = {}
        self._enrolled = self._member = False
        self._epoch = Epoch(0, (), "nobody has come yet")
        self._since = 0
        """The number of the first one of which this process was a member."""
        self._holds: tuple[int, ...] = ()
        self._exchange: Exchanging | None = None
        self._left = (-1, -1)
        self._misses: tuple[int, tuple[int, ...]] = (0, ())
        """Of the epoch of that number."""
        self._holds_up = ""
        self._met: deque[Met] = deque(maxlen=MET)
        self._regrouped: deque[tuple[int, Group]] = deque(maxlen=MET)
        self._receive: Receive | None = None
        self._donate: dict[int, Donate] = {}
        """Snapshots to take, by the newcomer that they are for."""
        self._taken: deque[tuple[str, int]] = deque(maxlen=TAKEN)
        self._donations: dict[int, int] = {}
        """The number of the newest of each newcomer that was heard of."""
        self._update = -1
        self._updates = -1
        self._newest: tuple[str, int] | None = None
        """The checkpoint that this worker wrote last."""
        self._completed: OrderedDict[int, None] = OrderedDict()
        self._asked_for: set[int] = set()
        self._told_last: dict[Key, e.Request] = {}
        """What has been told, of which nobody has said that it was heard."""
        self._end: Exception | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            connection = Connection(self._context, address, credentials, e.peer_of(worker, incarnation))
        except BaseException:
            self._context.term()
            raise
        self._line = ClientThread(connection, address, self._beat, self._unanswered, self._hear)
        self._line.start()

    # ------------------------------------------------------------ coming and going

    def enrol(self, fingerprint: Mapping[str, str], timeout: float | None = None) -> Start | Receive:
        """Wait until the run has begun with this worker's pipeline (:class:`Start`), or a member is about to give it
        its state (:class:`Receive`). ``fingerprint`` must be equal on all workers of a run.

        Raises:
            SchedulerError: it was refused, with what was found and expected, or waited in vain, with what is missing.
        """
        with self._changed:
            self._fingerprint, self._enrolled = dict(fingerprint), True
        request = self._make(e.Enrol, self._fingerprint)
        return self._start_or_receive(request, timeout, "training to begin with its pipeline")

    def received(self, transfer: str, timeout: float | None = None) -> Start | Receive:
        """The state of ``transfer`` is here; waits until all stages have it, or for another one if one does not."""
        request = self._make(e.TellReceived, transfer)
        return self._start_or_receive(request, timeout, f"the other stages to have the state of {transfer}", transfer)

    def missed(self, transfer: str, reason: str, timeout: float | None = None) -> Start | Receive:
        """The state of ``transfer`` did not come; waits for another member to give its own."""
        request = self._make(e.TellReceived, transfer, reason or "it did not come")
        return self._start_or_receive(request, timeout, f"another state than that of {transfer}", transfer)

    def is_current(self, transfer: str) -> bool:
        """Is that still the state that this worker is to receive?"""
        with self._changed:
            return self._receive is not None and self._receive.transfer == transfer

    def depart(self, *, finished: bool, timeout: float | None = None) -> None:
        """This process ends: its training has ``finished``, or it was told to. Returns when the scheduler knows."""
        with self._changed:
            self._enrolled = self._member = False
        request = self._make(e.Depart, finished)
        self._ask(("number", request.number), request, timeout, "the scheduler to hear that it departs")

    def failed(self, reason: str) -> None:
        """This process ends, since an exception was raised: ``reason`` is its type and text. Never raises."""
        try:
            with self._changed:
                self._enrolled = self._member = False
            request = self._make(e.Depart, False, reason[:800])
            self._ask(("number", request.number), request, 1.0, "the scheduler to hear of its failure")
        except (SchedulerError, WorkerFailedError):  # the failure that is being reported matters more
            return

    def close(self) -> None:
        """End the thread and free the sockets; safe to call twice. The scheduler takes the process for ended."""
        self._line.close()
        self._context.term()

    # ------------------------------------------------------------------ membership

    @property
    def epoch(self) -> Epoch:
        """The newest epoch of membership that was heard of."""
        with self._changed:
            return self._epoch

    @property
    def held_up(self) -> str:
        """Why no turn may begin now; empty if one may.

        Raises:
            WorkerFailedError: the process must end, or the run is over.
        """
        with self._changed:
            if self._end is not None:
                raise self._end
            return self._holds_up

    def holds(self, epochs: Iterable[int]) -> None:
        """This worker has process groups of these epochs, and of no others (any more)."""
        with self._changed:
            self._holds = tuple(sorted(epochs))
        self._line.beat_now()

    def exchanges(self, exchange: Exchanging | None) -> None:
        """This worker is in ``exchange`` now, or in none; cheap."""
        with self._changed:
            before, self._exchange = self._exchange, exchange
            if before is not None and (exchange is None or exchange.sequence != before.sequence):
                groups, meetings = self._left
                of_meeting = before.sequence >= MEETINGS
                self._left = (groups, before.sequence) if of_meeting else (before.sequence, meetings)

    def misses(self, epoch: int, pipelines: Iterable[int]) -> None:
        """In that epoch, which tries (:attr:`~lightning_sdpipe.membership.members.Epoch.tries`), this worker cannot
        reach those of its stage in ``pipelines``."""
        with self._changed:
            self._misses = epoch, tuple(sorted(pipelines))
        self._line.beat_now()

    @property
    def limit(self) -> float:
        """Seconds after which a transfer that does not move is given up, as the scheduler said."""
        return min(self._timeout, self._line.limit)

    @property
    def donation(self) -> Donate | None:
        """The transfer that this worker is to take a snapshot for, whatever update was proposed: for a pipeline whose
        stages agree among themselves when they take it, and then say :meth:`snapshot_taken`."""
        with self._changed:
            return next(iter(self._donate.values()), None)

    def snapshot_taken(self, transfer: str, update: int) -> None:
        """This worker has its snapshot for ``transfer``, taken when it, and all other stages, had made ``update``
        updates. Returns when the scheduler knows."""
        with self._changed:
            self._donate = {i: donate for i, donate in self._donate.items() if donate.transfer != transfer}
            self._taken.append((transfer, update))  # it may be asked for only after another stage has heard of it
        self._tell(("snapshot", transfer), e.TellSnapshot, transfer, update, "taken")
        self.fetch(["snapshot/heard"])  # messages of a worker are heard in order

    def donation_due(self, update: int) -> Donate | None:
        """This worker has made ``update`` updates; which transfer it is to take a snapshot for, now, before the next.

        Call it after each update. A later one for the same newcomer replaces it (``told.dropped``).
        """
        past: list[Donate] = []
        with self._changed:
            self._update = update
            due = [donate for donate in self._donate.values() if donate.at_update <= update]
            now = next((donate for donate in due if donate.at_update == update), None)
            for donate in due:
                if donate is now or donate.at_update < update:
                    del self._donate[donate.pipeline]
                if donate.at_update < update:
                    past.append(donate)
        for donate in past:
            self._tell(("snapshot", donate.transfer), e.TellSnapshot, donate.transfer, update, "past")
        if now is not None:
            self._tell(("snapshot", now.transfer), e.TellSnapshot, now.transfer, update, "taken")
        return now

    @property
    def update(self) -> int:
        """How many updates this worker has made, for people; set it at each."""
        return self._updates

    @update.setter
    def update(self, update: int) -> None:
        self._updates = update

    def publish(self, path: str, update: int) -> None:
        """Returns if this worker may put a checkpoint of the state after ``update`` updates at ``path``.

        Raises:
            MustEndError: the run goes on without this process.
            SchedulerError: the scheduler says nothing.
        """
        request = self._make(e.Publish, path, update, False)
        self._ask(("number", request.number), request, None, f"the scheduler to let it write {path}")

    def published(self, path: str, update: int) -> None:
        """That checkpoint is in its place."""
        with self._changed:
            self._newest = path, update
        self._tell(("published", ""), e.Publish, path, update, True)

    # -------------------------------------------------------------- meeting, trying again

    def meet(self, key: str, value: bytes = b"", timeout: float | None = None) -> Met:
        """Wait for all replicas of this worker's stage at ``key``; whoever dies is not waited for.

        Keys are new each time, and equal on all of them. ``value`` is small (at most some kilobytes) and goes to all:
        ``Met.values``, in the order of ``Met.pipelines``. ``Met.past``: they have met there already, without this one.
        """
        request = self._make(e.Meet, key, value)
        reply = self._ask(("meet", key), request, timeout, f"the others at {key}")
        assert isinstance(reply, e.HasMet)
        return reply.met

    def completed(self, sequence: int) -> None:
        """The result of the group ``sequence`` is in the model."""
        with self._changed:
            asked = sequence in self._asked_for
            self._settle(sequence)
        if asked:
            self._tell(("completed", sequence), e.TellCompleted, sequence)

    def broken(self, group: Group, *, together: bool = False, timeout: float | None = None) -> Group | Skip:
        """The result of ``group`` did not come; say first what process groups are left (:meth:`holds`).

        Waits until each other member is gone, has it, or has said the same. Returns a group of those that are left
        without, to try again in (perhaps only of this worker); or :class:`Skip`, if all members were to have the result
        or none (``together``) and ``Skip.source`` has it: take that pipeline's state instead.
        """
        with self._changed:
            holds = self._holds
        request = self._make(e.AskRegroup, group, holds, together)
        what = f"the other members of group {group.sequence} to try again"
        reply = self._ask(("regroup", group.sequence), request, timeout, what)
        with self._changed:
            self._settle(group.sequence)
        assert isinstance(reply, e.Regroup | e.Skip)
        return reply.group if isinstance(reply, e.Regroup) else reply

    # --------------------------------------------------------------------- key-value store

    def put(self, key: str, value: bytes, timeout: float | None = None) -> None:
        """Set ``key`` for everybody."""
        request = self._make(e.Put, key, value)
        self._ask(("number", request.number), request, timeout, f"the scheduler to keep {key}")

    def fetch(self, keys: Sequence[str], timeout: float | None = None) -> tuple[bytes | None, ...]:
        """The values of ``keys`` as they are; None where there is none."""
        request = self._make(e.Fetch, tuple(keys), False)
        what = f"the scheduler to say what is at {', '.join(keys)}"
        reply = self._ask(("number", request.number), request, timeout, what)
        assert isinstance(reply, e.Values)
        return reply.values

    def wait(
        self, keys: Sequence[str], timeout: float | None = None, cancelled: Callable[[], bool] | None = None
    ) -> tuple[bytes, ...]:
        """The values of ``keys``, when all are there.

        Raises:
            CancelledError: ``cancelled`` said so, which is looked at often.
        """
        request = self._make(e.Fetch, tuple(keys), True)
        what = f"another worker to set {', '.join(keys)}"
        reply = self._ask(("number", request.number), request, timeout, what, cancelled)
        assert isinstance(reply, e.Values)
        return tuple(value for value in reply.values if value is not None)

    def add(self, key: str, amount: int, timeout: float | None = None) -> int:
        """Add to the number at ``key``, 0 at first; the sum."""
        request = self._make(e.Add, key, amount)
        reply = self._ask(("number", request.number), request, timeout, f"the scheduler to add to {key}")
        assert isinstance(reply, e.Sum)
        return reply.value

    def remove(self, key: str, timeout: float | None = None) -> bool:
        """Forget ``key``; was it there?"""
        request = self._make(e.Remove, key)
        reply = self._ask(("number", request.number), request, timeout, f"the scheduler to forget {key}")
        assert isinstance(reply, e.Sum)
        return reply.value > 0

    # -------------------------------------------------------------------------- asking

    def _make(self, kind: Callable[..., e.Request], *fields: object) -> e.Request:
        with self._changed:
            self._number += 1
            return kind(self.worker, self.incarnation, self._number, *fields)

    def _send(self, request: e.Request) -> None:
        self._line.send(request)

    def _tell(self, key: Key, kind: Callable[..., e.Request], *fields: object) -> None:
        """Says it until it was heard."""
        request = self._make(kind, *fields)
        with self._changed:
            self._told_last[key] = request
        self._send(request)

    def _start_or_receive(
        self, request: e.Request, timeout: float | None, what: str, after: str = ""
    ) -> Start | Receive:
        reply = self._ask(("enrol", after), request, timeout, what)
        assert isinstance(reply, e.Start | e.Get)
        return reply if isinstance(reply, e.Start) else reply.receive

    def _ask(
        self,
        key: Key,
        request: e.Request,
        timeout: float | None,
        what: str,
        cancelled: Callable[[], bool] | None = None,
    ) -> e.Reply:
        seconds = self._timeout if timeout is None else timeout
        ask = _Ask(key, request)
        with self._changed:
            if self._end is not None and not isinstance(request, e.Depart):
                raise self._end
            if key in self._asks:
                raise SchedulerError(f"worker {self.worker} already waits for {what}, in another thread")
            self._asks[key] = ask
        try:
            self._send(request)
            with self._changed:
                until = time.monotonic() + seconds
                while ask.reply is None and ask.error is None and (left := until - time.monotonic()) > 0:
                    self._changed.wait(left if cancelled is None else min(left, GLANCE))
                    if cancelled is not None and cancelled():
                        raise CancelledError(f"worker {self.worker} need no longer wait for {what}")
        finally:
            with self._changed:
                del self._asks[key]
        if ask.error is not None:
            raise ask.error
        if ask.reply is None:
            said = f"the scheduler at {self.address} says: {ask.waits_for}" if ask.waits_for else self._line.silence()
            raise SchedulerError(f"worker {self.worker} waited {seconds:g} s for {what}; {said}")
        return ask.reply

    # ------------------------------------------------------------------- the line's thread

    def _beat(self) -> e.Request:
        with self._changed:
            self._number += 1
            holds, epoch = self._holds, self._epoch.number
            held, (missed_in, missed) = bool(self._holds_up), self._misses
            misses = missed if missed_in == epoch else ()
            exchange, left, number = self._exchange, self._left, self._number
            fields = self.worker, self.incarnation, number, holds, epoch, self._enrolled, held, exchange, left, misses
            return e.Beat(*fields, self._updates)

    def _unanswered(self) -> list[e.Request]:
        with self._changed:
            asks = [ask.request for ask in self._asks.values() if ask.reply is None and ask.error is None]
            return [*asks, *self._told_last.values()]

    def _answer(self, key: Key, reply: e.Reply) -> bool:
        """Hands ``reply`` to the thread that waits for it, if there is one."""
        ask = self._asks.get(key)
        if ask is None or ask.reply is not None:
            return False
        ask.reply = reply
        self._changed.notify_all()
        return True

    def _fail(self, error: Exception, number: int = 0) -> None:
        for ask in self._asks.values():
            if number in (0, ask.request.number) and (number or ask.key[0] != "number"):
                ask.error = error
        self._changed.notify_all()

    def _settle(self, sequence: int) -> None:
        self._asked_for.discard(sequence)
        self._completed[sequence] = None
        while len(self._completed) > REMEMBERED:
            self._completed.popitem(last=False)

    def _hear(self, reply: e.Reply) -> None:
        """In the line's thread."""
        match reply:
            case e.Noted(number=number) | e.Values(number=number) | e.Sum(number=number):
                with self._changed:
                    self._told_last = {key: told for key, told in self._told_last.items() if told.number != number}
                    self._answer(("number", number), reply)
            case e.Waits(number=number, reason=reason):
                with self._changed:
                    for ask in self._asks.values():
                        if ask.request.number == number:
                            ask.waits_for = reason
            case e.Start(epoch=epoch):
                with self._changed:
                    self._member, self._receive = True, None
                    self._answer_enrolment(reply)
                self._hear_epoch(epoch)
            case e.Get(receive=receive):
                with self._changed:
                    self._receive = receive
                    self._answer_enrolment(reply)
            case e.NewEpoch(epoch=epoch):
                self._hear_epoch(epoch)
            case e.Give(donate=donate):
                self._hear_donate(donate)
            case e.Drop(transfer=transfer):
                with self._changed:
                    self._donate = {i: donate for i, donate in self._donate.items() if donate.transfer != transfer}
                self._told.dropped(transfer)
            case e.Hold(reason=reason):
                with self._changed:
                    self._holds_up = reason
                    self._changed.notify_all()
            case e.HasMet(met=met):
                with self._changed:
                    if self._answer(("meet", met.key), reply):
                        self._met.append(met)
            case e.Regroup(sequence=sequence) | e.Skip(sequence=sequence):
                with self._changed:
                    if self._answer(("regroup", sequence), reply) and isinstance(reply, e.Regroup):
                        self._regrouped.append((sequence, reply.group))
            case e.Broke(sequence=sequence):
                self._hear_broke(sequence)
            case e.Denial(reason=reason, number=number):
                with self._changed:
                    self._fail(RefusedError(f"the scheduler at {self.address} refused: {reason}"), number)
            case e.MustEnd(reason=reason):
                if self._must_end(MustEndError(self.worker.pipeline, reason)):
                    self._told.ended(reason)
            case e.Over(reason=reason, failed=failed):
                if self._must_end(RunOverError(reason, failed)):
                    self._told.over(reason, failed)
            case e.Stranger():
                self._introduce()

    def _answer_enrolment(self, reply: e.Start | e.Get) -> None:
        after = reply.receive.transfer if isinstance(reply, e.Get) else None
        for kind, transfer in list(self._asks):
            if kind == "enrol" and transfer != after:
                self._answer((kind, transfer), reply)

    def _must_end(self, error: Exception) -> bool:
        with self._changed:
            first = self._end is None
            self._end = self._end or error
            self._fail(self._end)
            for ask in self._asks.values():
                if not isinstance(ask.request, e.Depart):
                    ask.error = self._end
            return first

    def _hear_epoch(self, epoch: Epoch) -> None:
        with self._changed:
            if epoch.number <= self._epoch.number:
                return
            self._epoch = epoch
            if not self._since and any(member.incarnation == self.incarnation for member in epoch.members):
                self._since = epoch.number
            self._changed.notify_all()
        self._told.epoch(epoch)

    def _hear_donate(self, donate: Donate) -> None:
        with self._changed:
            if donate.number < self._donations.get(donate.pipeline, 0):
                return
            self._donations[donate.pipeline] = donate.number
            replaced = self._donate.pop(donate.pipeline, None)
            past, update = self._update >= donate.at_update, self._update
            taken = dict(self._taken).get(donate.transfer)
            if taken is not None:  # another stage had heard of it before
                past, update = False, taken
            elif not past:
                self._donate[donate.pipeline] = donate
        if replaced is not None and replaced.transfer != donate.transfer:
            self._told.dropped(replaced.transfer)
        state = "taken" if taken is not None else "past" if past else "pending"
        self._tell(("snapshot", donate.transfer), e.TellSnapshot, donate.transfer, update, state)

    def _hear_broke(self, sequence: int) -> None:
        with self._changed:
            known = sequence in self._completed
            if not known:
                self._asked_for.add(sequence)
        if known:
            self._tell(("completed", sequence), e.TellCompleted, sequence)
        else:
            self._told.broke(sequence)

    def _introduce(self) -> None:
        """The scheduler does not know this process: it was started again."""
        with self._changed:
            fingerprint, member, enrolled = self._fingerprint, self._member, self._enrolled
            epoch, holds, since = self._epoch, self._holds, self._since
            met, regrouped = tuple(self._met), tuple(self._regrouped)
            self._told_last.clear()  # which was for the scheduler before
            self._donations.clear()
        if member:
            self._send(self._make(e.Resume, fingerprint, epoch, holds, met, since, regrouped))
            if self._newest is not None:
                self.published(*self._newest)
        elif enrolled:
            self._send(self._make(e.Enrol, fingerprint))
        for request in self._unanswered():
            self._send(request)
