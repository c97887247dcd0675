"""Delivers groups and barrier results in elastic runs, with the process group that their members share.

A group or barrier result whose members share no process group yet is kept until they do. After some seconds the epoch
is announced anew, so that all make one. A kept group that loses a member goes to the members that are left.

A group of models that breaks off is no group any more, and nothing is said of it here. The result of a round, of
gradients or of an outer optimizer, is to be with all members, or with none. Its outcome is decided when each member is
gone, has the result, or has reported that it lacks it. A member that has it hands it over, bit for bit, in a process
group that it shares with those without it; they ask again if that breaks, too. If none has it, they retry.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

import msgspec

from lightning_sdpipe.membership.failure_detection import Stuck
from lightning_sdpipe.membership.members import Met
from lightning_sdpipe.policies.decisions import Group, of_those
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler.server.group_desk import GroupDesk
from lightning_sdpipe.scheduler.server.liveness import Levels
from lightning_sdpipe.scheduler.server.outbox import Outbox
from lightning_sdpipe.scheduler.server.process_groups import REMAKE_AFTER, KeptGroup, ProcessGroupRegistry

logger = logging.getLogger(__name__)

REMEMBERED = 256
"""Broken groups whose outcome can still be asked for."""
MOST_OPEN = 64
"""Most undecided broken groups of one worker; a worker is in a few groups at once."""


@dataclass
class BrokenGroup:
    """A group whose result at least one member did not get."""

    group: Group
    said: set[Worker] = field(default_factory=set)
    """Members that try again."""
    done: set[Worker] = field(default_factory=set)
    """Members that have the result."""

    def undecided(self, is_gone: Callable[[Worker, int], bool]) -> list[Worker]:
        """Return the members that may still report one or the other."""
        known, epoch = self.said | self.done, self.group.epoch
        return [worker for worker in self.group.members if worker not in known and not is_gone(worker, epoch)]

    def weights(self) -> tuple[tuple[Worker, ...], tuple[float, ...]]:
        """Return the members that try again, and their weights."""
        pairs = [pair for pair in zip(self.group.members, self.group.weights, strict=True) if pair[0] in self.said]
        return tuple(worker for worker, _ in pairs), tuple(weight for _, weight in pairs)


class Regrouping:
    """Broken groups by sequence, and what their members were answered."""

    def __init__(self) -> None:
        self.open: dict[int, BrokenGroup] = {}
        self.decided: OrderedDict[int, None] = OrderedDict()
        """Groups of which it is decided which members try again, though perhaps not yet in which process group."""
        self._outcomes: OrderedDict[int, dict[Worker, e.Again]] = OrderedDict()
        self._asked: dict[Worker, set[int]] = {}
        self._numbers: dict[tuple[Worker, int], int] = {}
        """Number of each worker's newest request about a group, as long as it is remembered."""

    def is_repeated(self, worker: Worker, sequence: int, number: int) -> bool:
        """Return whether ``worker`` has reported that before, in the request ``number`` or a later one."""
        before = self._numbers.get((worker, sequence), -1)
        self._numbers[worker, sequence] = max(before, number)
        while len(self._numbers) > REMEMBERED * MOST_OPEN:
            del self._numbers[next(iter(self._numbers))]
        return number <= before

    def hear(self, worker: Worker, group: Group) -> BrokenGroup | None:
        """Return the broken group that ``worker`` reports; None if it reports more groups than it can be in."""
        others = [sequence for sequence, broken in self.open.items() if worker in broken.said]
        if group.sequence not in others and len(others) >= MOST_OPEN:
            return None
        broken = self.open.setdefault(group.sequence, BrokenGroup(group))
        broken.done.discard(worker)
        broken.said.add(worker)
        return broken

    def ask(self, workers: Sequence[Worker], sequence: int) -> None:
        """Ask ``workers`` whether they have the result."""
        for worker in workers:
            self._asked.setdefault(worker, set()).add(sequence)

    def waits_for(self, worker: Worker) -> tuple[int, ...]:
        """Return the groups of which ``worker`` still has to report."""
        if worker not in self._asked:
            return ()
        opened = ((sequence, self.open.get(sequence)) for sequence in sorted(self._asked[worker]))
        left = tuple(i for i, broken in opened if broken and worker not in broken.said and worker not in broken.done)
        self._asked[worker] = {*left}
        return left

    def completed(self, worker: Worker, sequence: int) -> None:
        """Note that ``worker`` has the result of that group."""
        broken = self.open.get(sequence)
        if broken is not None and worker not in broken.said:
            broken.done.add(worker)

    def outcome(self, worker: Worker, sequence: int) -> e.Again | None:
        """Return what ``worker`` was answered."""
        return self._outcomes.get(sequence, {}).get(worker)

    def forget(self, worker: Worker, sequence: int) -> None:
        """Reopen the decision, since ``worker`` did not get the result that it was to be handed."""
        self.decided.pop(sequence, None)
        self._outcomes.get(sequence, {}).pop(worker, None)

    def remember(self, sequence: int, answer: e.Again, workers: Sequence[Worker]) -> None:
        """Remember the answer that ``workers`` got."""
        self._outcomes.setdefault(sequence, {}).update(dict.fromkeys(workers, answer))
        while len(self._outcomes) > REMEMBERED:
            self._outcomes.popitem(last=False)

    def decided_before(self, sequence: int, group: Group) -> None:
        """Note an earlier scheduler's decision on which members retry that group: all members are to hear the same."""
        self.open.pop(sequence, None)
        self._is_decided(sequence)
        self.remember(sequence, e.Again(sequence, group), group.members)

    def _is_decided(self, sequence: int) -> None:
        self.decided[sequence] = None
        while len(self.decided) > REMEMBERED:
            self.decided.popitem(last=False)

    def goes(self, worker: Worker) -> None:
        """Forget ``worker``, whose process is gone."""
        self._asked.pop(worker, None)
        for sequence, broken in list(self.open.items()):
            broken.said.discard(worker)
            broken.done.discard(worker)
            if not broken.said:  # another member that lacks the result reports that itself
                del self.open[sequence]

    def settled(
        self, is_gone: Callable[[Worker, int], bool], takes_part: Callable[[Worker], bool]
    ) -> Iterator[BrokenGroup]:
        """Yield the groups that can be decided, and close them. A restarted scheduler may hear of a group from a worker
        whose session has still to join."""
        for sequence, broken in list(self.open.items()):
            if not broken.undecided(is_gone) and all(takes_part(worker) for worker in broken.said):
                del self.open[sequence]
                self._is_decided(sequence)
                yield broken


@dataclass
class _HandedOver:
    """A broken group whose result some members have; until ``until`` they share no process group with the others."""

    broken: BrokenGroup
    until: float


@dataclass
class _KeptMet:
    met: Met
    until: float
    processes: dict[Worker, int]
    """The processes that passed the barrier."""


class GroupDelivery:
    """Delivery of groups and barrier results.

    Args:
        groups: answers readies, and has the policy make groups anew.
        process_groups: the process groups of each worker, and the groups that wait for one.
        incarnations: those of the processes that are there.
        unreachable: called outside of answers when workers share no process group, or (False) an exchange broke off.
        levels: tells workers that a group of theirs broke.
        outbox: takes the other answers.
        limit: seconds in which an exchange must move.
    """

    def __init__(
        self,
        groups: GroupDesk,
        process_groups: ProcessGroupRegistry,
        incarnations: Mapping[Worker, int],
        unreachable: Callable[[int, Sequence[int], bool, float], None],
        levels: Levels,
        outbox: Outbox,
        limit: float,
    ) -> None:
        self._groups, self._process_groups, self._outbox = groups, process_groups, outbox
        self._here, self._unreachable = incarnations, unreachable
        self._levels, levels.broken = levels, self._broken
        self._regrouping = Regrouping()
        self._stuck = Stuck(limit)
        self._stuck_in: dict[Worker, int] = {}
        """Exchanges that are broken off, by the workers that have not left them."""
        self._met: list[_KeptMet] = []
        self._handed: dict[int, _HandedOver] = {}

    def goes(self, workers: Sequence[Worker]) -> None:
        """Forget these workers, which are gone with their pipeline."""
        for worker in workers:
            self._process_groups.forget(worker)
            self._regrouping.goes(worker)
            self._stuck.forget(worker)
            self._stuck_in.pop(worker, None)

    def deadline(self) -> float:
        """Time at which a worker has waited long for a process group, or in an exchange."""
        return min([self._stuck.due, *(kept.until for kept in self._waiting())])

    def _waiting(self) -> list[KeptGroup | _KeptMet | _HandedOver]:
        """Return all groups and barrier results that wait for a process group."""
        return [*self._process_groups.lacking, *self._met, *self._handed.values()]

    def beats(self, beat: e.Beat, now: float) -> None:
        """Note a worker's process groups and its exchange."""
        self._process_groups.holds(beat.worker, beat.holds)
        self._stuck.hear(beat.worker, beat.exchange, beat.left, now)
        if beat.exchange is None or beat.exchange.sequence != self._stuck_in.get(beat.worker):
            self._stuck_in.pop(beat.worker, None)

    def remake(self, now: float) -> None:
        """Announce the epoch anew if a worker has waited long for a process group, once for all that do; and have stuck
        exchanges broken off."""
        waiting: list[tuple[float, int, Sequence[int]]] = []
        waiting += [(kept.until, kept.group.stage, kept.pipelines) for kept in self._process_groups.lacking]
        waiting += [(kept.until, kept.met.stage, kept.met.pipelines) for kept in self._met]
        for handed in self._handed.values():
            said = sorted(worker.pipeline for worker in handed.broken.said)
            waiting.append((handed.until, handed.broken.group.stage, said))
        if (first := min(waiting, key=itemgetter(0), default=None)) is not None and first[0] <= now:
            for kept in self._waiting():
                kept.until = now + REMAKE_AFTER
            self._unreachable(first[1], first[2], True, now)
        if self._stuck.due <= now:
            for sequence, workers in self._stuck.look(now, self._here):
                names = ", ".join(map(str, workers))
                self._unreachable(workers[0].stage, [worker.pipeline for worker in workers], False, now)
                logger.warning("workers %s have been stuck in exchange %d, which is broken off", names, sequence)
                self._stuck_in.update(dict.fromkeys(workers, sequence))
                self._levels.change(workers)

    def proceed(self, now: float) -> None:
        """Answer all that can be answered."""
        kept_groups, takes_part = self._process_groups.kept, self._groups.sessions.takes_part
        for kept in list(kept_groups.values()):
            sequence = kept.group.sequence
            del kept_groups[sequence]
            there = [w for w in kept.group.members if not self.is_gone(w, kept.group.epoch) and takes_part(w)]
            if len(there) == len(kept.group.members):
                self._say_or_keep(kept)
            elif there and kept.broken is None and kept.group.lineage is None:
                self._say_or_keep(replace(kept, group=of_those(kept.group, there)))
            elif there:
                weights = [x for x, w in zip(kept.group.weights, kept.group.members, strict=True) if w in there]
                again = self._groups.regroup(kept.group, there, weights, now)
                self._say_or_keep(self._process_groups.keepable(again, now, kept.broken))
        self._process_groups.come_together(self._here)
        self._met = [kept for kept in self._met if not self._say_met(kept)]
        for broken in list(self._regrouping.settled(self.is_gone, takes_part)):
            self._settle(broken, now)
        for sequence, handed in list(self._handed.items()):
            if self._hand_over(handed.broken, now):
                del self._handed[sequence]
        lacking = [(kept.group.stage, kept.pipelines) for kept in kept_groups.values()]
        lacking += [(kept.met.stage, [*kept.met.pipelines]) for kept in self._met]
        for stage, pipelines in lacking:
            if self._process_groups.gave_up([Worker(stage, i) for i in pipelines]):  # no other one will come by itself
                self._unreachable(stage, pipelines, False, now)
                break

    # ------------------------------------------------------------------ groups

    def met(self, met: Met, now: float) -> None:
        """Note the result of a barrier."""
        if any(kept.met == met for kept in self._met):
            return
        workers = [Worker(met.stage, i) for i in met.pipelines]
        processes = {w: self._here[w] for w in workers if w in self._here and self._process_groups.was_member(w)}
        self._met.append(_KeptMet(met, now + REMAKE_AFTER, processes))

    def is_gone(self, worker: Worker, epoch: int) -> bool:
        """Return whether the process that was ``worker`` in the epoch of a group is gone."""
        return worker not in self._here or not self._process_groups.was_member(worker, epoch)

    def _say_or_keep(self, kept: KeptGroup) -> None:
        group = self._process_groups.with_epoch(kept.group)
        if group is None:
            self._process_groups.kept[kept.group.sequence] = kept
        elif kept.broken is None:
            self._groups.send(group)
        else:
            self._tell_outcome(kept.broken, e.Again(kept.broken.sequence, group), group.members)

    def _say_met(self, kept: _KeptMet) -> bool:
        there = [worker for worker, incarnation in kept.processes.items() if self._here.get(worker) == incarnation]
        epoch = self._process_groups.common(there)
        if epoch is not None:
            answer = e.HasMet(msgspec.structs.replace(kept.met, epoch=epoch))
            for worker in there:
                self._outbox.say(e.peer_of(worker, self._here[worker]), answer)
        return epoch is not None

    # ------------------------------------------------------------- broken groups

    def broke(self, request: e.AskRegroup, now: float) -> e.Reply | None:
        """Note that a worker did not get the result of a group, and return the immediate answer."""
        worker, group = request.worker, request.group
        repeated = self._regrouping.is_repeated(worker, group.sequence, request.number)
        if not repeated:
            self._process_groups.holds(worker, request.holds)
        answered = self._regrouping.outcome(worker, group.sequence)
        if answered is not None and answered.source >= 0 and not repeated:
            self._regrouping.forget(worker, group.sequence)  # the result did not come
        elif answered is not None:
            if answered.source >= 0:  # the source may not have heard
                self._tell(answered, Worker(group.stage, answered.source))
            return answered
        if group.sequence in self._regrouping.decided:
            return e.Waits(request.number, "it waits for a process group of those that try again")
        if worker not in group.members or len(group.members) < 2:
            reason = f"worker {worker} is no member of {group}, or the only one, so it cannot have broken"
            return e.Refused(request.number, reason)
        broken = self._regrouping.hear(worker, group)
        if broken is None:
            reason = f"worker {worker} says of more than {MOST_OPEN} groups at once that they broke"
            return e.Refused(request.number, reason)
        undecided = broken.undecided(self.is_gone)
        if not undecided:
            return None
        self._regrouping.ask(undecided, group.sequence)
        self._levels.change(undecided)  # each time, since one may have begun that exchange after it was told
        names = ", ".join(map(str, undecided))
        return e.Waits(request.number, f"group {group.sequence} broke; it waits to hear of {names}")

    def _broken(self, worker: Worker) -> tuple[int, ...]:
        """Return the broken groups that ``worker`` is told of."""
        stuck = (self._stuck_in[worker],) if worker in self._stuck_in else ()
        return (*self._regrouping.waits_for(worker), *stuck)

    def regrouped(self, before: Sequence[tuple[int, Group]], now: float) -> None:
        """Note the groups that a returning worker retries, as an earlier scheduler has decided."""
        for sequence, group in before:
            self._regrouping.decided_before(sequence, group)
            self._groups.number_from(group.sequence + 1, now)

    def completed(self, worker: Worker, sequence: int) -> None:
        """Note that ``worker`` has the result of that group."""
        self._regrouping.completed(worker, sequence)

    def _settle(self, broken: BrokenGroup, now: float) -> None:
        group = broken.group
        if broken.said and not any(self.is_gone(worker, group.epoch) for worker in group.members):
            self._unreachable(group.stage, sorted(worker.pipeline for worker in broken.said), False, now)
        if broken.done:
            self._handed[group.sequence] = _HandedOver(broken, now + REMAKE_AFTER)
            return
        broken.said -= {worker for worker in broken.said if self.is_gone(worker, group.epoch)}  # put out
        members, weights = broken.weights()
        if not members:
            return
        again = self._groups.regroup(group, members, weights, now)
        self._say_or_keep(self._process_groups.keepable(again, now, group))

    def _hand_over(self, broken: BrokenGroup, now: float) -> bool:
        """Let a member with the result give it to those without, if they share a process group. Return whether nothing
        is left to do."""
        group = broken.group
        for part in (broken.said, broken.done):
            part -= {worker for worker in part if self.is_gone(worker, group.epoch)}
        if not broken.said:
            return True
        if not broken.done:
            self._settle(broken, now)
            return True
        source = min(broken.done)
        members = tuple(sorted({source, *broken.said}))
        epoch = self._process_groups.common(members)
        if epoch is None:
            return False
        weights = tuple(float(worker == source) for worker in members)
        given = Group(members, weights, group.sequence, group.reason, epoch=epoch)
        again = e.Again(group.sequence, given, source.pipeline)
        self._tell(again, source)
        self._tell_outcome(group, again, sorted(broken.said))
        return True

    def _tell(self, message: e.Again, worker: Worker) -> None:
        if worker in self._here:
            self._outbox.say(e.peer_of(worker, self._here[worker]), message)

    def _tell_outcome(self, group: Group, message: e.Again, workers: Sequence[Worker]) -> None:
        self._regrouping.remember(group.sequence, message, workers)
        for worker in workers:
            self._tell(message, worker)
