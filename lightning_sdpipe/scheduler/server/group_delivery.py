"""Delivers groups and barrier results in elastic runs, with the process group that their members share.

A group or barrier result whose members share no process group yet is kept until they do. After some seconds the epoch
is announced anew, so that all make one. A kept group that loses a member goes to the others.

A group that breaks off is void. Where all must have its outcome, later groups see to that
(:mod:`~lightning_sdpipe.policies.rounds_of_all`); here a member that reports a missing outcome ends the exchange of the
others, which might otherwise wait for it for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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


@dataclass
class _KeptMet:
    met: Met
    until: float
    processes: dict[Worker, int]
    """The processes that passed the barrier."""


class GroupDelivery:
    """Delivery of groups and barrier results.

    Args:
        groups: answers readies.
        process_groups: the process groups of each worker, and the groups that wait for one.
        incarnations: those of the processes that are there.
        unreachable: called when workers have waited for a process group (True), or an exchange broke off (False).
        levels: tells workers that an exchange of theirs is stuck.
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
        self._levels, levels.stuck = levels, self._stuck
        groups.on_broken = self.broke
        self._exchanges = Stuck(limit)
        self._stuck_in: dict[Worker, int] = {}
        """Exchanges that are broken off, by the workers that have not left them."""
        self._met: list[_KeptMet] = []

    def goes(self, workers: Sequence[Worker]) -> None:
        """Forget these workers, which are gone with their pipeline."""
        for worker in workers:
            self._process_groups.forget(worker)
            self._exchanges.forget(worker)
            self._stuck_in.pop(worker, None)

    def deadline(self) -> float:
        """Time at which a worker has waited long for a process group, or in an exchange."""
        return min([self._exchanges.due, *(kept.until for kept in self._waiting())])

    def _waiting(self) -> list[KeptGroup | _KeptMet]:
        """Return all groups and barrier results that wait for a process group."""
        return [*self._process_groups.lacking, *self._met]

    def comes_back(self, worker: Worker, heard: int, now: float) -> None:
        """Note that ``worker`` is back, and has heard of groups up to that number of an earlier scheduler."""
        self._exchanges.comes_back(worker, heard, now)

    def beats(self, beat: e.Beat, now: float) -> None:
        """Note a worker's process groups and its exchange."""
        self._process_groups.holds(beat.worker, beat.holds)
        self._exchanges.hear(beat.worker, beat.exchange, beat.left, now)
        if beat.exchange is None or beat.exchange.sequence != self._stuck_in.get(beat.worker):
            self._stuck_in.pop(beat.worker, None)

    def remake(self, now: float) -> None:
        """Announce the epoch anew if a worker has waited long for a process group, once for all that do; and break off
        stuck exchanges."""
        waiting: list[tuple[float, int, Sequence[int]]] = []
        waiting += [(kept.until, kept.group.stage, kept.pipelines) for kept in self._process_groups.lacking]
        waiting += [(kept.until, kept.met.stage, kept.met.pipelines) for kept in self._met]
        if (first := min(waiting, key=itemgetter(0), default=None)) is not None and first[0] <= now:
            for kept in self._waiting():
                kept.until = now + REMAKE_AFTER
            self._unreachable(first[1], first[2], True, now)
        if self._exchanges.due <= now:
            for sequence, workers in self._exchanges.look(now, self._here):
                if sequence not in self._exchanges.given_up:  # else a member gave it up by itself
                    names = ", ".join(map(str, workers))
                    logger.warning("workers %s have been stuck in exchange %d, which is broken off", names, sequence)
                    self._unreachable(workers[0].stage, [worker.pipeline for worker in workers], False, now)
                self._stuck_in.update(dict.fromkeys(workers, sequence))
                self._levels.change(workers)

    def proceed(self, now: float) -> None:
        """Send out all groups and barrier results that can go."""
        kept_groups, takes_part = self._process_groups.kept, self._groups.sessions.takes_part
        for kept in list(kept_groups.values()):
            sequence = kept.group.sequence
            del kept_groups[sequence]
            source = kept.group.source
            gone = {w for w in kept.group.members if self.is_gone(w, kept.group.epoch)}
            there = {w for w in kept.group.members if w not in gone and (w == source or takes_part(w))}
            if there <= {source}:
                continue
            if source is not None and source in gone:  # the others report ready again when they find out
                self._groups.send(of_those(kept.group, {source, *there}))
            else:
                group = kept.group if there.issuperset(kept.group.members) else of_those(kept.group, there)
                self._say_or_keep(replace(kept, group=group))
        self._process_groups.come_together(self._here)
        self._met = [kept for kept in self._met if not self._say_met(kept)]
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

    def _stuck(self, worker: Worker) -> tuple[int, ...]:
        """Return the exchange that ``worker`` is to break off, if any."""
        return (self._stuck_in[worker],) if worker in self._stuck_in else ()

    def _say_or_keep(self, kept: KeptGroup) -> None:
        group = self._process_groups.with_epoch(kept.group)
        if group is None:
            self._process_groups.kept[kept.group.sequence] = kept
        else:
            self._groups.send(group)

    def _say_met(self, kept: _KeptMet) -> bool:
        there = [worker for worker, incarnation in kept.processes.items() if self._here.get(worker) == incarnation]
        epoch = self._process_groups.common(there)
        if epoch is not None:
            answer = e.HasMet(msgspec.structs.replace(kept.met, epoch=epoch))
            for worker in there:
                self._outbox.say(e.peer_of(worker, self._here[worker]), answer)
        return epoch is not None

    def broke(self, group: Group, now: float) -> None:
        """Note that a member did not get the outcome of ``group``, which all are to have."""
        if group.source is None and len(group.members) > 1:
            self._exchanges.gives_up(group.sequence, now)
