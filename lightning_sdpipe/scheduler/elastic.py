"""The scheduler's half of an elastic run: who is in it, which groups they share, and what becomes of those that broke.

It stands beside the service: messages of membership come here, and what they mean for policies, leases and sessions
goes to the service, as a :class:`Run`. Requests of sessions pass :meth:`Elastic.admits` first, since nobody trains who
is no member, and groups pass :meth:`Elastic.dressed`, which names the process group that their members share.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

import msgspec

from lightning_sdpipe.policies import members as w
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.membership import MOST_PIPELINES, Membership
from lightning_sdpipe.policies.policy import RefusedEvent
from lightning_sdpipe.scheduler import elastic_messages as e
from lightning_sdpipe.scheduler import messages as m
from lightning_sdpipe.scheduler.regrouping import Broken, Regrouping
from lightning_sdpipe.scheduler.rendezvous import Full, Rendezvous
from lightning_sdpipe.scheduler.transport import Transport

logger = logging.getLogger(__name__)

REMAKE_AFTER = 5.0
"""Seconds that an answer waits for a process group before the epoch is announced anew."""
RIVAL_GRACE = 0.5
"""Seconds that a job may be heard of after another has claimed its number, as a process that is about to end is."""
BEATS_PER_LIMIT = 8
LONGEST_BEAT = 1.0


class Run(Protocol):
    """What membership changes in the rest of the scheduler."""

    def say(self, peer: bytes, message: m.Reply | e.Reply) -> None:
        """Send it when this input is dealt with."""

    def ignore(self, kind: str, peer: bytes, detail: str) -> None:
        """Count a message that changes nothing."""

    def widen(self, num_pipelines: int, now: float) -> None:
        """There may be so many pipelines.

        Raises:
            RefusedEvent: the policy is for fewer.
        """

    def members_are(self, pipelines: Collection[int], now: float) -> None:
        """These train; all others have returned their leases."""

    def lose(self, pipeline: int, left: bool, now: float) -> None:
        """Policies and the dealer hear that it is gone."""

    def hold(self, reason: str, now: float) -> None:
        """Nobody is answered while there is a reason."""

    def again(self, peer: bytes, request: m.Request, now: float) -> None:
        """A request that was kept is due."""

    def go_out(self, group: Group) -> None:
        """A group that was kept is due."""

    def regroup(self, group: Group, members: Sequence[Worker], weights: Sequence[float], now: float) -> Group:
        """The policy makes a group of those that are left of ``group``."""

    def next_sequence(self) -> int:
        """Of the next group."""

    def active_in(self, stage: int) -> list[Worker]:
        """Whose session takes part."""

    def fail(self, failure: m.Failure) -> None:
        """The run is over."""


class _Kept:
    """A group that has been decided, and whose members do not share a process group yet."""

    def __init__(self, group: Group, now: float) -> None:
        self.group = group
        self.until = now + REMAKE_AFTER
        self.answer: Callable[[Group], None] | None = None
        """How to say it, where it is no answer to readies."""


class Elastic:
    """Args:
    membership: decides who is in the run.
    run: the rest of the scheduler.
    limit: seconds of silence after which a process is taken for dead.
    now: the time.
    """

    def __init__(self, membership: Membership, run: Run, limit: float, now: float) -> None:
        self.membership = membership
        self.rendezvous = Rendezvous()
        self.lifeline_port = 0
        """0 until somebody listens for lifelines."""
        self.on_decided: Callable[[float, w.MemberEvent, list[w.MemberDecision]], None] = lambda *_: None
        self._run = run
        self._limit = limit
        self._transport = Transport()
        self._regrouping = Regrouping()
        self._here: dict[Worker, int] = {}
        """Incarnations of the processes that were heard of, and"""
        self._heard: dict[Worker, float] = {}
        """when that was."""
        self._lines: OrderedDict[bytes, tuple[Worker, int]] = OrderedDict()
        self._rival_since: dict[int, float] = {}
        self._since: dict[int, int] = {}
        """Of each member: the first group that it can be in."""
        self._early: dict[Worker, list[tuple[bytes, m.Request]]] = {}
        """What sessions said before their pipeline was a member, or had a process group: the last of each kind."""
        self._early_since: dict[Worker, float] = {}
        self._kept: dict[int, _Kept] = {}
        self._kept_met: list[tuple[w.Met, float]] = []
        self._capacity = membership._num_pipelines
        self._num_stages = membership._num_stages
        self._next_look = math.inf

    # ------------------------------------------------------------------ inputs

    @property
    def in_use(self) -> bool:
        """Has anybody enrolled?"""
        return bool(self._here)

    def deadline(self) -> float:
        """When :meth:`tick` is due."""
        due = min(self.membership.deadline(), self._next_look)
        for kept in self._kept.values():
            due = min(due, kept.until)
        for _, until in self._kept_met:
            due = min(due, until)
        return due

    def tick(self, now: float) -> None:
        """Time passed."""
        if self.membership.deadline() <= now:
            self._decide(w.Passed(), now)
        if self._next_look <= now:
            self._look_for_the_silent(now)
        late = [(k.group.stage, [x.pipeline for x in k.group.members], k) for k in self._kept.values()]
        for stage, pipelines, kept in late:
            if kept.until <= now:
                kept.until = now + REMAKE_AFTER
                self._decide(w.Unreachable(stage, tuple(pipelines)), now)
        for place, (met, until) in enumerate(self._kept_met):
            if until <= now:
                self._kept_met[place] = met, now + REMAKE_AFTER
                self._decide(w.Unreachable(met.stage, met.pipelines), now)
        self._proceed(now)

    def handle(self, peer: bytes, request: e.Request, now: float) -> None:
        """A message about membership."""
        worker, incarnation = request.worker, request.incarnation
        if peer != e.peer_of(worker, incarnation):
            self._run.ignore("impersonating", peer, f"it speaks for worker {worker}")
            return
        if isinstance(request, e.Enrol | e.Resume):
            self._comes(peer, request, now)
        elif not self.membership.is_here(worker, incarnation) and not self.membership.recovering:
            self._from_a_stranger(peer, request, now)
        else:
            self._heard[worker] = now
            if self.membership.doubts(worker, incarnation):
                since = self._rival_since.setdefault(worker.pipeline, now)
                if now - since >= RIVAL_GRACE:
                    del self._rival_since[worker.pipeline]
                    self._decide(w.Heard(worker, incarnation), now)
            self._from_a_member(peer, request, now)
        self._proceed(now)

    def line_ended(self, nonce: bytes, now: float) -> None:
        """The connection of the process that was given ``nonce`` is closed."""
        worker, incarnation = self._lines.pop(nonce, (None, 0))
        if worker is not None:
            self._decide(w.Died(worker, incarnation, "ended (its connection closed)"), now)
            self._proceed(now)

    # ------------------------------------------------------- requests of sessions

    def admits(self, peer: bytes, request: m.Request, now: float) -> bool:
        """May the service deal with ``request`` now? If not, it is kept, or refused."""
        worker, incarnation, core = request.worker, request.session, self.membership
        if isinstance(request, m.Hello | m.AskFailure | m.AskMissing):
            return True
        reason = core.tombstone(worker.pipeline, incarnation)
        if reason is not None:
            self._run.say(peer, e.MustEnd(reason))
            return False
        if isinstance(request, m.Failed):
            if not core.is_here(worker, incarnation):
                return not self.in_use
            self._run.say(peer, m.Abort(m.Failure(worker, request.reason)))
            self._decide(w.Failed(worker, incarnation, request.reason), now)
            self._proceed(now)
            return False
        is_join = isinstance(request, m.Join)
        if not (isinstance(request, m.Join) and request.elastic) and not self.in_use and worker not in self._early:
            return True  # an ordinary run, or one whose workers are still to come back
        if isinstance(request, m.Join) and not request.elastic:
            refusal = (
                "it serves an elastic run, and this worker has not enrolled; set SDPIPE_PIPELINE, or give it a "
                "scheduler of its own"
            )
            self._run.say(peer, m.Refused(request.number, refusal))
            return False
        if core.is_member(worker.pipeline, incarnation) and not core.recovering:
            if not is_join or self._shares_a_group(worker, now):
                return True
        elif isinstance(request, m.Heartbeat):
            self._run.say(peer, m.Pulse(None))
            return False
        self._keep_early(peer, request, now)
        return False

    def dressed(self, group: Group, now: float) -> Group | None:
        """``group`` with the epoch whose process group its members share; None if it is kept until they do."""
        if not self.in_use:
            return group
        epoch = self.membership.epoch.number if len(group.members) == 1 else self._transport.common(group.members)
        if epoch is not None:
            return msgspec.structs.replace(group, epoch=epoch)
        self._kept[group.sequence] = _Kept(group, now)
        return None

    # ----------------------------------------------------------------- coming

    def _comes(self, peer: bytes, request: e.Enrol | e.Resume, now: float) -> None:
        worker, incarnation, core = request.worker, request.incarnation, self.membership
        try:
            self._widen(worker.pipeline, now)
        except RefusedEvent as error:
            self._run.say(peer, e.Denial(str(error)))
            return
        first = not core.is_here(worker, incarnation)
        if isinstance(request, e.Enrol):
            self._decide(w.Enrolled(worker, incarnation, request.fingerprint), now)
        else:
            self._decide(w.Resumed(worker, incarnation, request.fingerprint, request.epoch, request.met), now)
            self._transport.holds(worker, request.holds)
        if core.is_here(worker, incarnation) or core.recovering:
            self._here[worker], self._heard[worker] = incarnation, now
            if self._next_look == math.inf:
                self._next_look = now + self._limit
            if first:
                self._give_line(peer, worker, incarnation)
        if isinstance(request, e.Enrol) and not core.is_member(worker.pipeline, incarnation):
            self._run.say(peer, e.Waits(request.number, self._waits_for(worker, incarnation)))

    def _waits_for(self, worker: Worker, incarnation: int) -> str:
        core = self.membership
        if core.recovering:
            return "the scheduler was started again and waits for the members of the run"
        if core.doubts(worker, 0) or not core.is_here(worker, incarnation):
            return f"another job claims pipeline {worker.pipeline}; it is looked whether that one still lives"
        states = core.states()
        if core.epoch.members:
            return f"pipeline {worker.pipeline} {states.get(worker.pipeline, 'waits')}"
        return core.missing()

    def _widen(self, pipeline: int, now: float) -> None:
        if self._capacity <= pipeline < MOST_PIPELINES:
            self._run.widen(pipeline + 1, now)
            self._capacity = pipeline + 1

    def _give_line(self, peer: bytes, worker: Worker, incarnation: int) -> None:
        nonce = secrets.token_bytes(16)
        self._lines[nonce] = worker, incarnation
        while len(self._lines) > 4 * MOST_PIPELINES:
            self._lines.popitem(last=False)
        self._run.say(peer, e.Line(self.lifeline_port, nonce, min(LONGEST_BEAT, self._limit / BEATS_PER_LIMIT)))

    def _from_a_stranger(self, peer: bytes, request: e.Request, now: float) -> None:
        """Its process has not enrolled here, or is no longer to be here."""
        worker, incarnation = request.worker, request.incarnation
        reason = self.membership.tombstone(worker.pipeline, incarnation)
        if isinstance(request, e.Depart):
            self._run.say(peer, e.Noted(request.number))
            self._decide(w.Departed(worker, incarnation, request.finished), now)  # it may claim another's number
        elif reason is not None:
            self._run.say(peer, e.MustEnd(reason))
        else:
            self._run.say(peer, e.Stranger())

    def _from_a_member(self, peer: bytes, request: e.Request, now: float) -> None:
        worker, incarnation, say = request.worker, request.incarnation, self._run.say
        match request:
            case e.Beat(holds=holds, epoch=epoch):
                self._transport.holds(worker, holds)
                say(peer, e.Noted(request.number))
                core = self.membership
                if epoch < core.epoch.number and core.is_member(worker.pipeline, incarnation) and not core.recovering:
                    say(peer, e.NewEpoch(core.epoch))
            case e.TellSnapshot(transfer=transfer, update=update, state=state):
                self._decide(w.Snapshot(worker, incarnation, transfer, update, state), now)
            case e.TellReceived(transfer=transfer, missed=""):
                self._decide(w.Received(worker, incarnation, transfer), now)
            case e.TellReceived(transfer=transfer, missed=missed):
                self._decide(w.Missed(worker, incarnation, transfer, missed), now)
            case e.Meet(key=key, value=value):
                self._decide(w.Meets(worker, incarnation, key, value), now)
                meetings = self.membership.meetings
                if meetings.key(worker.stage, worker.pipeline) == key:
                    missing = meetings.missing(worker.stage, key, self.membership.awaited())
                    names = ", ".join(str(Worker(worker.stage, i)) for i in missing) or "a common process group"
                    say(peer, e.Waits(request.number, f"it waits for {names} at {key}"))
            case e.AskRegroup():
                self._ask_regroup(peer, request, now)
            case e.TellCompleted(sequence=sequence):
                self._regrouping.completed(worker, sequence)
            case e.Depart(finished=finished, failed=failed):
                say(peer, e.Noted(request.number))
                event = w.Failed(worker, incarnation, failed) if failed else None
                self._decide(event or w.Departed(worker, incarnation, finished), now)
            case e.Put() | e.Fetch() | e.Add() | e.Remove():
                self._store(peer, request, now)

    def _store(self, peer: bytes, request: e.Put | e.Fetch | e.Add | e.Remove, now: float) -> None:
        store, say, number = self.rendezvous, self._run.say, request.number
        try:
            match request:
                case e.Put(key=key, value=value):
                    answered = store.put(key, value)
                    say(peer, e.Noted(number))
                case e.Add(key=key, amount=amount):
                    total, answered = store.add(key, amount, (peer, number))
                    say(peer, e.Sum(number, total))
                case e.Remove(key=key):
                    answered = []
                    say(peer, e.Sum(number, int(store.remove(key))))
                case e.Fetch(keys=keys, waits=waits):
                    answered = []
                    values = store.wait((peer, number), keys, now) if waits else store.get(keys)
                    if values is not None:
                        say(peer, e.Values(number, values))
        except Full as error:
            self._run.ignore("refused", peer, str(error))
            say(peer, e.Denial(f"the key-value store refuses {error}", number))
            return
        for (asker, asked), found in answered:
            say(asker, e.Values(asked, found))

    # --------------------------------------------------------------- decisions

    def _decide(self, event: w.MemberEvent, now: float) -> None:
        decisions = self.membership.on(event, now)
        self.on_decided(now, event, decisions)
        for decision in decisions:
            self._carry_out(decision, now)

    def _carry_out(self, decision: w.MemberDecision, now: float) -> None:
        run = self._run
        match decision:
            case w.Epoch():
                logger.info("epoch %d: %s", decision.number, decision.reason)
                members = [member.pipeline for member in decision.members]
                for pipeline in members:
                    self._since.setdefault(pipeline, run.next_sequence())
                run.members_are(members, now)
                self._tell(members, e.NewEpoch(decision))
            case w.Started(pipeline, epoch, fresh):
                self._tell([pipeline], e.Start(epoch, fresh))
            case w.Receive(pipeline=pipeline):
                self._tell([pipeline], e.Get(decision))
            case w.Donate(donor=donor):
                self._tell([donor], e.Give(decision))
            case w.Abandoned(donor=donor, transfer=transfer):
                self._tell([donor], e.Drop(transfer))
            case w.Met():
                self._kept_met.append((decision, now + REMAKE_AFTER))
            case w.Gone():
                self._goes(decision, now)
            case w.Denied(worker, incarnation, reason):
                run.say(e.peer_of(worker, incarnation), e.Denial(reason))
            case w.Ended(worker, incarnation, reason):
                run.say(e.peer_of(worker, incarnation), e.MustEnd(reason))
            case w.Held(reason):
                logger.warning("%s", f"{reason}; training waits for more" if reason else "there are enough")
                run.hold(reason, now)
            case w.RunOver(reason, failed):
                self._tell(sorted({worker.pipeline for worker in self._here}), e.Over(reason, failed))
                if failed:
                    run.fail(m.Failure(None, reason))

    def _tell(self, pipelines: Iterable[int], message: e.Reply, stage: int | None = None) -> None:
        wanted = set(pipelines)
        for worker, incarnation in self._here.items():
            if worker.pipeline in wanted and stage in (None, worker.stage):
                self._run.say(e.peer_of(worker, incarnation), message)

    def _goes(self, gone: w.Gone, now: float) -> None:
        logger.warning("pipeline %d is gone: %s", gone.pipeline, gone.reason)
        for worker, incarnation in list(self._here.items()):
            if worker.pipeline == gone.pipeline and incarnation == gone.incarnation:
                self._run.say(e.peer_of(worker, incarnation), e.MustEnd(gone.reason))
                del self._here[worker]
                self._heard.pop(worker, None)
                self._early.pop(worker, None)
                self._transport.forget(worker)
                self._regrouping.goes(worker)
        for nonce, (worker, incarnation) in list(self._lines.items()):
            if worker.pipeline == gone.pipeline and incarnation == gone.incarnation:
                del self._lines[nonce]
        self._rival_since.pop(gone.pipeline, None)
        if gone.was_member:
            self._since.pop(gone.pipeline, None)
            self._run.lose(gone.pipeline, gone.left, now)

    # ----------------------------------------------------------- what was kept

    def _shares_a_group(self, worker: Worker, now: float) -> bool:
        """Does ``worker`` share a process group with those of its stage that take part, or has it waited for long?"""
        others = [other for other in self._run.active_in(worker.stage) if other != worker]
        waited = now - self._early_since.get(worker, now)
        return not others or waited >= REMAKE_AFTER or self._transport.common([worker, *others]) is not None

    def _keep_early(self, peer: bytes, request: m.Request, now: float) -> None:
        kept = self._early.setdefault(request.worker, [])
        kept[:] = [(at, other) for at, other in kept if type(other) is not type(request)]
        kept.append((peer, request))
        self._early_since.setdefault(request.worker, now)

    def _proceed(self, now: float) -> None:
        """What was kept, and is due."""
        core = self.membership
        if core.recovering:
            return
        for worker in list(self._early):
            requests = self._early[worker]
            _, first = requests[0]
            if core.is_member(worker.pipeline, first.session):
                if isinstance(first, m.Join) and not self._shares_a_group(worker, now):
                    continue
            elif core.tombstone(worker.pipeline, first.session) is None:
                continue
            del self._early[worker]
            for peer, request in requests:
                self._run.again(peer, request, now)
            self._early_since.pop(worker, None)
        for sequence, kept in list(self._kept.items()):
            if sequence in self._kept:
                self._try_kept(kept, now)
        self._try_kept_met()
        for broken in list(self._regrouping.settled(self._is_gone)):
            self._settle(broken, now)

    def _try_kept(self, kept: _Kept, now: float) -> None:
        group = kept.group
        there = [worker for worker in group.members if not self._is_gone(worker, group.sequence)]
        if len(there) < len(group.members):
            del self._kept[group.sequence]
            if there:
                weights = [x for x, worker in zip(group.weights, group.members, strict=True) if worker in there]
                self._go_out(self._run.regroup(group, there, weights, now), kept.answer, now)
            return
        epoch = self._transport.common(group.members)
        if epoch is not None:
            del self._kept[group.sequence]
            (kept.answer or self._run.go_out)(msgspec.structs.replace(group, epoch=epoch))

    def _go_out(self, group: Group, answer: Callable[[Group], None] | None, now: float) -> None:
        dressed = self.dressed(group, now)
        if dressed is None:
            self._kept[group.sequence].answer = answer
        else:
            (answer or self._run.go_out)(dressed)

    def _try_kept_met(self) -> None:
        waiting = []
        for met, until in self._kept_met:
            there = [Worker(met.stage, i) for i in met.pipelines if Worker(met.stage, i) in self._here]
            alone = len(met.pipelines) == 1 or len(there) <= 1
            epoch = self.membership.epoch.number if alone else self._transport.common(there)
            if epoch is None:
                waiting.append((met, until))
            else:
                answer = e.HasMet(msgspec.structs.replace(met, epoch=epoch))
                self._tell(met.pipelines, answer, met.stage)
        self._kept_met = waiting

    # ------------------------------------------------------------- broken groups

    def _is_gone(self, worker: Worker, sequence: int) -> bool:
        """Is the process gone that was ``worker`` when the group ``sequence`` went out?"""
        return worker not in self._here or self._since.get(worker.pipeline, math.inf) > sequence

    def _ask_regroup(self, peer: bytes, request: e.AskRegroup, now: float) -> None:
        worker, group = request.worker, request.group
        self._transport.holds(worker, request.holds)
        answered = self._regrouping.outcome(worker, group.sequence)
        if answered is not None:
            self._run.say(peer, answered)  # type: ignore[arg-type]
            return
        if worker not in group.members or len(group.members) < 2:
            self._run.say(peer, e.Denial(f"worker {worker} alone, or no member, cannot say that {group} broke"))
            return
        if self._regrouping.hear(worker, group, request.together):
            for other in group.members:
                if other != worker and not self._is_gone(other, group.sequence):
                    self._run.say(e.peer_of(other, self._here[other]), e.Broke(group.sequence))
        broken = self._regrouping.open[group.sequence]
        undecided = broken.undecided(self._is_gone)
        if undecided:
            names = ", ".join(map(str, undecided))
            self._run.say(peer, e.Waits(request.number, f"group {group.sequence} broke; it waits to hear of {names}"))

    def _settle(self, broken: Broken, now: float) -> None:
        group = broken.group
        if broken.together and broken.done:
            source = min(broken.done).pipeline
            self._answer_regroup(group, e.Skip(group.sequence, source), broken.said)
            return
        members, weights = broken.weights()
        if not members:
            return
        everybody_lives = not any(self._is_gone(worker, group.sequence) for worker in group.members)
        if everybody_lives:
            self._decide(w.Unreachable(group.stage, tuple(worker.pipeline for worker in members)), now)
        again = self._run.regroup(group, members, weights, now)

        def answer(dressed: Group) -> None:
            there = [worker for worker in dressed.members if worker in self._here]
            self._answer_regroup(group, e.Regroup(group.sequence, dressed), there)

        self._go_out(again, answer, now)

    def _answer_regroup(self, group: Group, message: e.Reply, workers: Iterable[Worker]) -> None:
        to = tuple(workers)
        self._regrouping.remember(group.sequence, message, to)
        for worker in to:
            if worker in self._here:
                self._run.say(e.peer_of(worker, self._here[worker]), message)

    # ------------------------------------------------------------------ silence

    def _look_for_the_silent(self, now: float) -> None:
        late = now - self._next_look
        if late > self._limit / 4:
            # We were away ourselves: first hear what has come meanwhile.
            logger.warning("the scheduler was held up for %.1f s; nobody is called lost for that", late)
            self._heard = dict.fromkeys(self._heard, now)
        for worker, heard in list(self._heard.items()):
            if now - heard >= self._limit and worker in self._here:
                self._decide(w.Died(worker, self._here[worker], f"was silent for {now - heard:.1f} s"), now)
        oldest = min(self._heard.values(), default=math.inf)
        self._next_look = oldest + self._limit if oldest < math.inf else math.inf
