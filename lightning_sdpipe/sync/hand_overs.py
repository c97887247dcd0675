"""Results of groups that broke off: a member that has one hands it over, or those without it try again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.sync.peers import Peers
from lightning_sdpipe.topology.groups import Replicas

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class HandOvers:
    """Gives the results of one worker's groups to members that lack them, and receives those that this worker lacks.

    Args:
        peers: the replicas.
        give: sends the result of the group of that number to the other members of a group, over replicas; returns False
            if it is not kept, and raises WorkerFailedError if one of them is gone.
    """

    def __init__(self, peers: Peers, give: Callable[[int, Group, Replicas], bool]) -> None:
        self._client, self._epochs, self._give = peers.client, peers.epochs, give
        self.retried = self.taken = 0
        """Number of groups that were tried again, and of those whose result was handed over."""
        self._given: set[tuple[int, int]] = set()
        peers.hands_over = self.hand_over

    def ask(self, group: Group, take: Callable[[int, Group, Group, Replicas], _Result]) -> tuple[_Result | None, Group]:
        """Return what ``take`` makes of the result of ``group``, if a member has it; else the members that try again.

        ``take`` is called with the source, the broken group, the group in which the source sends, and its replicas.
        """
        while True:
            self._epochs.wait_for_newest()
            again = self._client.regroup(group)
            if again.source < 0:
                self.retried += 1
                return None, again.group
            self._epochs.use(again.group)
            try:
                result = take(again.source, group, again.group, self._epochs.replicas(again.group))
            except WorkerFailedError as error:
                log.info("the result of group %d did not come: %s", group.sequence, str(error).splitlines()[0])
                self._epochs.give_up(again.group)
                self._epochs.use(None)
            else:
                self.taken += 1
                return result, group

    def hand_over(self, sequence: int, group: Group) -> None:
        """Give the other members of ``group`` the result of the group ``sequence``, which this worker has. Does not
        wait; any thread may call it, and again."""
        if (sequence, group.epoch) not in self._given:
            self._given.add((sequence, group.epoch))
            threading.Thread(target=self._hand, args=[sequence, group], name="handing over", daemon=True).start()

    def _hand(self, sequence: int, group: Group) -> None:
        try:
            if not self._give(sequence, group, self._epochs.replicas(group)):
                log.warning("the result of group %d is asked for, and not kept any more", sequence)
        except WorkerFailedError as error:  # members that did not get it ask again
            log.info("the result of group %d was not taken: %s", sequence, str(error).splitlines()[0])
