"""The one place where the policy and the dealer hear of events: each is checked, decided and logged."""

from __future__ import annotations

import logging
import math

from lightning_sdpipe.dealing.dealer import Dealer
from lightning_sdpipe.dealing.leases import Lease, LeaseEvent
from lightning_sdpipe.policies.decisions import Decision, check_group
from lightning_sdpipe.policies.events import Event, Restarted, Widened
from lightning_sdpipe.policies.policy import Policy, RefusedEvent
from lightning_sdpipe.policies.sync_graph import SyncGraph
from lightning_sdpipe.scheduler.log.event_log import EventLog

log = logging.getLogger(__name__)


class PolicyFailed(Exception):
    """The policy raised, or decided what cannot be carried out."""


class PolicyDriver:
    """Drives ``policy`` and ``dealer``, and keeps ``event_log``. Once one has failed nothing is decided any more."""

    def __init__(self, policy: Policy, dealer: Dealer, event_log: EventLog) -> None:
        self._policy = policy
        self.dealer = dealer
        self._log = event_log
        self.next_sequence = 0
        """Of the next group, at least."""
        self.failed = False
        self.deadline = math.inf
        """When time is due to pass for the policy."""

    def tell(self, event: Event, now: float) -> list[Decision]:
        """What follows from ``event``.

        Raises:
            RefusedEvent: the event breaks a rule of the protocol; nothing has changed.
            PolicyFailed: the policy raised something else, or decided what cannot be.
        """
        if self.failed:
            return []
        try:
            decisions = self._policy.on(event, now)
            for group in decisions:
                check_group(group, self.next_sequence)
                self.next_sequence = group.sequence + 1
            deadline = self._policy.deadline()
        except RefusedEvent:
            raise
        except Exception as error:
            self.fail()
            raise PolicyFailed(f"{event}: {type(error).__name__}: {error}") from error
        self.deadline = math.inf if deadline is None else deadline
        self._log.record(now, event, decisions)
        return decisions

    def deal(self, event: LeaseEvent, now: float) -> list[Lease]:
        """The leases that follow from ``event``.

        Raises:
            RefusedEvent: the event breaks a rule; nothing has changed.
        """
        if self.failed:
            return []
        leases = self.dealer.on(event, now)
        self._log.record_leases(now, event, leases)
        return leases

    def widen(self, event: Widened, now: float) -> None:
        """There may be more pipelines than were planned.

        Raises:
            RefusedEvent: the policy is for those; nothing has changed.
        """
        self.tell(event, now)
        self.dealer.on(event, now)

    def number_from(self, sequence: int, now: float) -> list[Decision]:
        """Groups below ``sequence`` have been; the scheduler that formed them is no more."""
        if sequence <= self.next_sequence:
            return []
        self.next_sequence = sequence
        return self.tell(Restarted(sequence), now)

    def sync_graph(self, stage: int) -> SyncGraph | None:
        """What the policy knows of meetings, if it keeps account."""
        try:
            graph = self._policy.sync_graph(stage) if hasattr(self._policy, "sync_graph") else None
        except Exception:  # to look at a run must not end it
            log.exception("the policy cannot say who met whom")
            return None
        return graph if isinstance(graph, SyncGraph) else None

    def fail(self) -> None:
        """Decide nothing any more."""
        self.failed, self.deadline = True, math.inf
