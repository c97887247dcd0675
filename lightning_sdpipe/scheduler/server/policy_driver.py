"""The only place where the policy and the dealer are told of events: each event is checked, decided and logged."""

from __future__ import annotations

import logging
import math

from lightning_sdpipe.dealing.dealer import Dealer
from lightning_sdpipe.dealing.leases import Lease, LeaseEvent
from lightning_sdpipe.policies.decisions import Decision, check_group
from lightning_sdpipe.policies.events import Event, Restarted, Widened
from lightning_sdpipe.policies.policy import Policy, RefusedEvent
from lightning_sdpipe.policies.sync_graph import SyncGraph
from lightning_sdpipe.scheduler.log.event_log import Entry, EventLog
from lightning_sdpipe.scheduler.log.status import Overview

log = logging.getLogger(__name__)


class PolicyFailed(Exception):
    """The policy raised, or decided what cannot be carried out."""


class PolicyDriver:
    """Drives ``policy`` and ``dealer``, and writes ``event_log``; ``overview`` sees what the policy decides. Once the
    policy has failed, nothing is decided any more."""

    def __init__(self, policy: Policy, dealer: Dealer, event_log: EventLog, overview: Overview) -> None:
        self._policy = policy
        self.dealer = dealer
        self._log, self._overview = event_log, overview
        self.next_sequence = 0
        """Lowest sequence that the next group may have."""
        self.failed = False
        self.deadline = math.inf
        """Time at which the policy is to be told the time."""

    def tell(self, event: Event, now: float) -> list[Decision]:
        """Return the groups that follow from ``event``.

        Raises:
            RefusedEvent: the event breaks a rule of the protocol; nothing has changed.
            PolicyFailed: the policy raised something else, or made an illegal decision.
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
        self._overview.on(now, event, decisions)
        self._log.write(Entry(now, event, decisions))
        return decisions

    def deal(self, event: LeaseEvent, now: float) -> list[Lease]:
        """Return the leases that follow from ``event``.

        Raises:
            RefusedEvent: the event breaks a rule; nothing has changed.
        """
        if self.failed:
            return []
        leases = self.dealer.on(event, now)
        self._log.write(Entry(now, event, leases=leases))
        return leases

    def widen(self, event: Widened, now: float) -> None:
        """Tell policy and dealer that there may be more pipelines than were planned.

        Raises:
            RefusedEvent: the policy allows no more; nothing has changed.
        """
        self.tell(event, now)
        self.dealer.on(event, now)

    def number_from(self, sequence: int, now: float) -> list[Decision]:
        """Number new groups from ``sequence`` on; an earlier scheduler formed those below."""
        if sequence <= self.next_sequence:
            return []
        self.next_sequence = sequence
        return self.tell(Restarted(sequence), now)

    def sync_graph(self, stage: int) -> SyncGraph:
        """Return the policy's sync-graph of ``stage``, or else one of all its decisions."""
        try:
            graph = self._policy.sync_graph(stage) if hasattr(self._policy, "sync_graph") else None
        except Exception:  # a look at a run must not end it
            log.exception("the policy cannot give its sync-graph")
            graph = None
        return graph if isinstance(graph, SyncGraph) else self._overview.graphs[stage]

    def fail(self) -> None:
        """Decide nothing any more."""
        self.failed, self.deadline = True, math.inf
