"""Desk of membership: passes what it hears to the core, and carries out what the core decides.

The desks of groups and leases carry out what membership means for them. Requests of training threads pass
:meth:`MembershipDesk.admits` first, since only members train; those that came too early are kept until they are
:meth:`~MembershipDesk.due`. In a fixed roster every enrolled process trains; batches are dealt when all have enrolled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from types import UnionType

from lightning_sdpipe.dealing.leases import Book, Books
from lightning_sdpipe.membership import members as w
from lightning_sdpipe.membership.elastic_config import MOST_PIPELINES
from lightning_sdpipe.membership.membership import Membership
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.log.status import MembersStatus
from lightning_sdpipe.scheduler.server.group_delivery import GroupDelivery
from lightning_sdpipe.scheduler.server.group_desk import GroupDesk
from lightning_sdpipe.scheduler.server.key_value_store import KeyValueStore
from lightning_sdpipe.scheduler.server.lease_desk import LeaseDesk
from lightning_sdpipe.scheduler.server.liveness import Levels, Liveness
from lightning_sdpipe.scheduler.server.outbox import DeferredRequests, Outbox
from lightning_sdpipe.scheduler.server.process_groups import ProcessGroupRegistry
from lightning_sdpipe.scheduler.server.row_desk import SpanDesk
from lightning_sdpipe.scheduler.server.setting_out import SettingOut

logger = logging.getLogger(__name__)

GONE_IN_STATUS = 64
"""Most starts that a status lists as gone for good: the newest."""
ENDED = "ended (its connection closed)"
RIVAL_GRACE = 0.5
"""Seconds for which a job may be heard of after another has claimed its number: its process may be about to end."""
BEATS_PER_LIMIT, LONGEST_BEAT = 8, 1.0


class MembershipDesk:
    """Keeps the processes of the run and their early requests.

    Args:
        membership: decides which pipelines are in the run.
        groups: loses the workers that are gone.
        leases: takes their batches back.
        process_groups: those of each worker, and the groups that wait for one.
        presence: the processes that are there.
        outbox: takes the answers.
        limit: seconds of silence after which a process is taken for dead.
        policy: values of the policy, which say how newcomers set out.
    """

    def __init__(
        self,
        membership: Membership,
        groups: GroupDesk,
        leases: LeaseDesk,
        process_groups: ProcessGroupRegistry,
        presence: Liveness,
        outbox: Outbox,
        limit: float,
        policy: PolicyConfig,
    ) -> None:
        self.membership = membership
        self.on_decided: Callable[[float, w.MemberEvent, list[w.MemberDecision]], None] = lambda *_: None
        self._groups, self._leases, self._outbox = groups, leases, outbox
        self._process_groups, self._presence = process_groups, presence
        self._beat, self._limit = min(LONGEST_BEAT, limit / BEATS_PER_LIMIT), limit
        self.present = presence.incarnations.keys()
        """Workers that are there."""
        self._store, self._early = KeyValueStore(), DeferredRequests()
        self._setting_out = SettingOut(membership, groups, process_groups, presence, self._early, policy)
        self.spans = SpanDesk(presence.incarnations, groups.rows.about, outbox)
        self._levels, here = Levels(membership, outbox), presence.incarnations
        groups.life = self._levels.life
        self._answers = GroupDelivery(groups, process_groups, here, self._unreachable, self._levels, outbox, limit)
        self._rival_since: dict[int, float] = {}
        self._told: dict[Worker, tuple[int, Book]] = {}
        """Start and book of each worker that resumed before the members were known."""
        self._update = -1
        """Updates of the furthest member; -1 if unknown."""

    # ------------------------------------------------------------------ inputs

    def status(self, now: float) -> MembersStatus | None:
        """Return the members of the run, if its pipelines come and go; None before any worker has enrolled."""
        core = self.membership
        if not self._process_groups.in_use and (core.terms.fixed or not core.ever):
            return None
        over, resumed = core.ending.over, core.ending.resumed
        buried = core.roster.buried(GONE_IN_STATUS)
        return MembersStatus(
            core.epoch.number,
            core.epoch.reason,
            next(iter(core.members), None),
            core.states(),
            core.ending.holds or self._presence.waits(now),
            {member.pipeline: member.incarnation for member in core.epoch.members},
            sorted(core.ever),
            [(member.pipeline, member.incarnation) for member in buried],
            over.reason if over is not None and over.failed else None,
            None if self._update < 0 else self._update,
            None if resumed is None else resumed.path,
            [core.roster.tombstone(member.pipeline, member.incarnation) or "" for member in buried],
        )

    def deadline(self) -> float:
        """Time at which :meth:`tick` is due."""
        return min(self.membership.deadline(), self._presence.next_look, self._answers.deadline())

    def tick(self, now: float) -> None:
        """Let time pass."""
        if self.membership.deadline() <= now:
            self._decide(w.Passed(), now)
        if self._presence.next_look <= now:
            core, presence = self.membership, self._presence
            fixed = core.terms.fixed
            members, replaced = ((), ()) if fixed else (core.members, core.roster.claimed)
            for worker, incarnation, seconds in presence.silent(now, members, replaced):
                if not fixed:
                    self._decide(w.Ended(worker, incarnation, f"was silent for {seconds:.1f} s", "silent"), now)
            if fixed:
                gone = presence.out_of_reach(now, self._groups.rows.about)
                if (ends := gone or presence.parted(self._groups.extent.num_workers)) is not None:
                    self._decide(w.Ended(ends[0], presence.incarnations[ends[0]], ends[1], "failed"), now)
        self._answers.remake(now)

    def handle(self, peer: bytes, request: e.Request, now: float) -> None:
        """Deal with a message about membership."""
        worker, incarnation, core = request.worker, request.incarnation, self.membership
        enrolled = isinstance(request, e.Enrol) or (isinstance(request, e.Beat) and request.enrolled)
        if self._groups.failure is not None and enrolled:
            self._outbox.say(peer, e.Now(0, over=self._groups.failure))
        elif isinstance(request, e.Enrol):
            self._comes(peer, request, now)
        elif self._presence.incarnations.get(worker) == incarnation:
            self._presence.hear(worker, now)
            if core.doubts(worker, incarnation):
                since = self._rival_since.setdefault(worker.pipeline, now)
                if now - since >= RIVAL_GRACE:
                    del self._rival_since[worker.pipeline]
                    self._decide(w.Heard(worker, incarnation), now)
            self._from_one_of_us(peer, request, now)
        else:
            self._from_a_stranger(peer, request, now)

    def process_ended(self, worker: Worker, incarnation: int, now: float) -> None:
        """Note that the connection of that process has closed."""
        self._decide(w.Ended(worker, incarnation, ENDED), now)

    def deliver(self, now: float) -> None:
        """Send the groups and barrier results that can go out now, and what has changed."""
        if not self.membership.recovering:
            self._answers.proceed(now)
        self._levels.tell()

    @property
    def held(self) -> int:
        """Number of readies that wait until all workers are back."""
        return self._early.count(m.Ready) if self.membership.recovering else 0

    # ------------------------------------------------- requests of training threads

    def admits(self, peer: bytes, request: m.Request, now: float) -> bool:
        """Return whether the service may deal now with the ``request`` of a worker that is in no groups. If not, keep
        or refuse it."""
        worker, incarnation, core = request.worker, request.incarnation, self.membership
        if isinstance(request, m.Hello) or (core.terms.fixed and self._groups.failure is not None):
            return True
        if (reason := core.roster.tombstone(worker.pipeline, incarnation)) is not None:
            self._outbox.say(peer, e.must_end(reason))
            return False
        if self._trains(worker, incarnation, isinstance(request, m.AskLease)):
            behind_its_join = isinstance(request, m.Ready) and worker in self._early  # else it is told to join again
            if not behind_its_join and (not isinstance(request, m.Join) or self._setting_out.may_begin(request, now)):
                return True
        elif self._presence.incarnations.get(worker) != incarnation:
            self._outbox.say(e.peer_of(worker, incarnation), e.Stranger(life=self._levels.life))
        self._early.keep(peer, request, now)
        return False

    def _trains(self, worker: Worker, incarnation: int, asks: bool = False) -> bool:
        """Return whether that process may be in groups, or ``asks`` for batches that it may have."""
        core = self.membership
        if not core.terms.fixed or asks:
            return not core.recovering and core.roster.is_member(worker.pipeline, incarnation)
        return core.is_here(worker, incarnation)

    def due(self, now: float) -> Iterator[tuple[bytes, m.Request | e.Enrol]]:
        """Yield the kept requests that can be dealt with, each once the effects of the one before are known: first
        those of workers that return, then those of workers that set out together."""
        workers = [] if self.membership.recovering else self._early.workers()
        for worker in workers:
            yield from self._due_of(worker, e.Enrol, (), now)
        together = self._setting_out.due()
        for worker in (worker for worker in workers if worker.stage in together):
            yield from self._due_of(worker, m.Join, together, now)
        for worker in workers:
            yield from self._due_of(worker, object, (), now)

    def _due_of(
        self, worker: Worker, kinds: type | UnionType, together: Collection[int], now: float
    ) -> Iterator[tuple[bytes, m.Request | e.Enrol]]:
        """Yield the first kept requests of ``worker``, as long as they are of these ``kinds``."""
        while (kept := self._early.first(worker)) is not None:
            peer, request = kept
            if not isinstance(request, kinds):
                return
            reason = self.membership.roster.tombstone(worker.pipeline, request.incarnation)
            begins = isinstance(request, m.Join | e.Enrol) and worker.stage not in together
            waits = begins and not self._setting_out.may_begin(request, now)
            asks = isinstance(request, m.AskLease)
            if reason is None and (waits or not self._trains(worker, request.incarnation, asks)):
                return
            self._early.pop(worker)
            if reason is None:
                yield peer, request
            else:
                self._outbox.say(peer, e.must_end(reason))

    # ------------------------------------------------------------------- coming

    def _comes(self, peer: bytes, request: e.Enrol, now: float) -> None:
        worker, incarnation, core = request.worker, request.incarnation, self.membership
        fixed, resumes = w.is_fixed(request.fingerprint), request.resumes
        extent = self._groups.extent
        if not (fixed or core.offered.fixed) and extent.num_pipelines <= worker.pipeline < MOST_PIPELINES:
            self._groups.widen(worker.pipeline + 1, now)
        was_here = self._presence.incarnations.get(worker) == incarnation
        if resumes is not None and resumes.book is not None and not core.epoch.number:
            self._told[worker] = incarnation, resumes.book
        if resumes is None:
            self._decide(w.Enrolled(worker, incarnation, request.fingerprint, request.heard_of), now)
        else:
            self._decide(w.Resumed(worker, incarnation, request.fingerprint, resumes.epoch, resumes.met), now)
            self._process_groups.holds(worker, resumes.holds)
        if core.is_here(worker, incarnation):
            self._presence.comes(worker, incarnation, now)
            if not was_here:
                if resumes is not None:
                    self._groups.number_from(resumes.heard + 1, now)
                    self._answers.comes_back(worker, resumes.heard, now)
                lines = self._presence.lines
                nonce = lines.give(worker, incarnation)
                self._levels.comes(worker, incarnation, e.Line(lines.port, nonce, self._beat, self._limit))
                self._levels.tell()  # so that its connection is there when it starts
            if resumes is not None:
                self._early.keep(peer, request, now)  # the rest is dealt with when all are back
            if resumes is None and fixed:
                self._outbox.say(peer, e.Start(core.epoch, fresh=True))
        if resumes is None and not core.roster.is_member(worker.pipeline, incarnation):
            known = core.epoch if core.epoch.number else None
            self._outbox.say(peer, e.Waits(request.number, core.waits_for(worker, incarnation), known))

    def _from_a_stranger(self, peer: bytes, request: e.Request, now: float) -> None:
        """Deal with a message of a process that has not enrolled here, or must no longer be here."""
        worker, incarnation = request.worker, request.incarnation
        reason = self.membership.roster.tombstone(worker.pipeline, incarnation)
        if isinstance(request, e.Depart):
            self._outbox.say(peer, e.Noted(request.number))
            self._decide(w.Departed(worker, incarnation, request.finished), now)  # it may claim another's number
        elif reason is not None:
            self._outbox.say(peer, e.must_end(reason))
        elif isinstance(request, e.Store):  # it may need the store to enrol; beats tell it if it must again
            self._store.handle(peer, request, self._outbox, now)
        elif not (isinstance(request, e.Beat) and not request.enrolled):  # else the process has yet to enrol
            self._outbox.say(peer, e.Stranger(life=self._levels.life))

    def _from_one_of_us(self, peer: bytes, request: e.Request, now: float) -> None:
        worker, incarnation, say, core = request.worker, request.incarnation, self._outbox.say, self.membership
        match request:
            case e.Beat(epoch=epoch):
                self._answers.beats(request, now)
                self._update = max(self._update, request.update)
                self._presence.awaits[worker] = request.awaits
                self._groups.rows.note(worker, request.doing, now)
                if request.misses:
                    self._decide(w.Misses(worker, incarnation, epoch, request.misses), now)
                say(peer, self.spans.note(request, peer, now))
                self._levels.hear(request)
                if self._trains(worker, incarnation):
                    if worker not in self._early:
                        self._groups.hear_beat(request, peer, now)
                    self._leases.hear_beat(request, now)
            case e.TellSnapshot(transfer=transfer, update=update):
                say(peer, e.Noted(request.number))
                self._decide(w.Snapshot(worker, incarnation, transfer, update), now)
            case e.TellReceived(transfer=transfer, update=update, missed=missed):
                self._decide(w.Received(worker, incarnation, transfer, update, missed), now)
                say(peer, e.Waits(request.number, core.waits_for(worker, incarnation)))
            case e.Meet(key=key, value=value):
                self._decide(w.Meets(worker, incarnation, key, value), now)
                if core.barriers.key(worker.stage, worker.pipeline) == key:
                    missing = core.barriers.missing(worker.stage, key, core.awaited(worker.stage))
                    names = ", ".join(str(Worker(worker.stage, i)) for i in missing) or "a common process group"
                    say(peer, e.Waits(request.number, f"it waits for {names} at {key}"))
            case e.Publish(path=path, update=update, done=done):
                if core.roster.is_member(worker.pipeline, incarnation) and not core.recovering:  # else it asks again
                    say(peer, e.Noted(request.number))
                    if done:
                        self._decide(w.Published(worker, incarnation, path, update), now)
            case e.Depart(finished=True) if core.recovering:
                return  # it asks again
            case e.Depart(finished=finished, failed=failed):
                say(peer, e.Noted(request.number))
                reason = failed[: m.MAX_REASON_CHARACTERS]
                event = w.Ended(worker, incarnation, reason, "failed") if failed else None
                if core.terms.fixed and finished:
                    self._groups.departs(worker, now)
                self._decide(event or w.Departed(worker, incarnation, finished), now)
                if core.terms.fixed and finished:
                    self._presence.leaves(worker)
                    self._levels.goes([worker])
                    self._early.forget([worker])
            case e.Store():
                self._store.handle(peer, request, self._outbox, now)

    # --------------------------------------------------------------- decisions

    def _decide(self, event: w.MemberEvent, now: float) -> None:
        decisions = self.membership.on(event, now)
        self.on_decided(now, event, decisions)
        for decision in decisions:
            self._carry_out(decision, now)
        core = self.membership
        if self._told and core.epoch.number and not core.recovering:
            told, self._told = sorted(self._told.items()), {}
            books = [(worker, book) for worker, (start, book) in told if core.roster.is_member(worker.pipeline, start)]
            if books:
                self._leases.deal(Books(tuple(books)), now)
        self._setting_out.follow(now)

    def _carry_out(self, decision: w.MemberDecision, now: float) -> None:
        say = self._outbox.say
        match decision:
            case w.Epoch():
                if not decision.members:
                    self._update = -1
                logger.info("epoch %d of membership: %s", decision.number, decision.reason)
                members = [member.pipeline for member in decision.members]
                self._leases.members_are(members, now)
                self._levels.change(self._presence.of(members))
            case w.Started(pipeline, epoch, fresh, checkpoint):
                self._tell([pipeline], e.Start(epoch, fresh, checkpoint))
            case w.Receive(pipeline=pipeline):
                self._tell([pipeline], e.Get(decision))
            case w.Donate(donor=donor):
                self._levels.change([Worker(0, donor)])
            case w.Abandoned(donor, transfer, void):
                if void:
                    logger.warning("%s of pipeline %d is void: %s", transfer, donor, void)
                self._levels.change([Worker(0, donor)])
            case w.Met():
                self._answers.met(decision, now)
            case w.Gone(pipeline, incarnation, reason, was_member, left):
                logger.warning("pipeline %d is gone: %s", pipeline, reason)
                gone = self._presence.goes(pipeline, incarnation)
                for worker in [] if self.membership.terms.fixed else gone:
                    say(e.peer_of(worker, incarnation), e.must_end(reason))
                self._levels.goes(gone)
                self._answers.goes(gone)
                self._early.forget(gone)
                self._rival_since.pop(pipeline, None)
                if was_member:
                    self._groups.lose(pipeline, left, now)
                    self._leases.forget_asks(pipeline)
            case w.Denied(worker, incarnation, reason, must_end):
                say(e.peer_of(worker, incarnation), e.must_end(reason) if must_end else e.Refused(0, reason))
            case w.Held(reason):
                logger.warning("%s", f"{reason}; training waits for more" if reason else "there are enough pipelines")
                self._levels.change(self._presence.of(self.membership.epoch.pipelines))
            case w.RunOver(reason, failed, worker):
                end = e.End(reason, True, failed, worker)
                over = e.Now(0, over=end)
                for each, incarnation in (self._presence.incarnations | self.membership.roster.processes()).items():
                    say(e.peer_of(each, incarnation), over)
                if failed:
                    self._groups.fail(end)

    def _tell(self, pipelines: Collection[int], message: e.Reply) -> None:
        for worker in self._presence.of(pipelines):
            self._outbox.say(e.peer_of(worker, self._presence.incarnations[worker]), message)

    def _unreachable(self, stage: int, pipelines: Sequence[int], waited: bool, now: float) -> None:
        self._decide(w.Unreachable(stage, tuple(pipelines), waited), now)
