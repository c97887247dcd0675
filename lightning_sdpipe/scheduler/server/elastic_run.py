"""What membership changes in the service: leases come back, policies hear of losses, readies are held."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from lightning_sdpipe.dealing.leases import Expected, Returned
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Broken, Left, Lost, Regrouped, Widened, Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.server.policy_driver import PolicyFailed
from lightning_sdpipe.scheduler.server.session import FALLS_SILENT, LEAVES

if TYPE_CHECKING:
    from lightning_sdpipe.scheduler.server.service import SchedulerService

logger = logging.getLogger(__name__)


class ElasticService:
    """The :class:`~lightning_sdpipe.scheduler.server.membership_desk.ServiceOfMembers` of ``service``, of which it is a
    part."""

    def __init__(self, service: SchedulerService) -> None:
        self._service = service
        self._present: set[int] | None = None
        """Pipelines that may hold leases; None before the first members are known."""

    def say(self, peer: bytes, message: m.Reply | e.Reply) -> None:
        self._service._say(peer, message)

    def ignore(self, kind: str, peer: bytes, detail: str) -> None:
        self._service.ignore(kind, peer, detail)

    def widen(self, num_pipelines: int, now: float) -> None:
        service = self._service
        service._decider.widen(Widened(num_pipelines), now)
        service._capacity = num_pipelines
        service.overview.widen(num_pipelines)

    def members_are(self, pipelines: Collection[int], now: float) -> None:
        service = self._service
        service._recovery.expect(len(pipelines) * service._mesh[0])
        if self._present is None:
            self._present = set(range(max(service._capacity, service._decider.dealer.num_known)))
            for pipeline in sorted(i for i in pipelines if i >= service._mesh[1]):
                service._deal(Expected(pipeline), now)
        for pipeline in sorted(self._present - set(pipelines)):
            service._deal(Returned(pipeline), now)
        self._present = set(pipelines)

    def lose(self, pipeline: int, left: bool, now: float) -> None:
        service = self._service
        for session in service._sessions:
            if session.worker.pipeline == pipeline and session.active:
                service._let_time_pass(now)
                event = (Left if left else Lost)(session.worker)
                decisions = service._decider.tell(event, now)
                service._recovery.held.pop(session.worker, None)
                session.move(LEAVES if left else FALLS_SILENT)
                session.answer = None
                service._carry_out(decisions, now)
        for worker in [worker for worker in service._asking if worker.pipeline == pipeline]:
            del service._asking[worker]

    def again(self, peer: bytes, request: m.Request, now: float) -> None:
        self._service._dispatch(peer, request, now)

    def go_out(self, group: Group) -> None:
        self._service._send_group(group)

    def regroup(self, group: Group, members: Sequence[Worker], weights: Sequence[float], now: float) -> Group:
        service = self._service
        if group.sequence < self.next_sequence():
            service._carry_out(service._decider.tell(Broken(group.sequence), now), now)
        decisions = service._decider.tell(Regrouped(group.sequence, tuple(members), tuple(weights)), now)
        if len(decisions) != 1 or decisions[0].members != tuple(members):
            raise PolicyFailed(
                f"group {group.sequence}, which broke, and decided {decisions} where its members {list(members)} were "
                "to try again: a policy for elastic runs derives from GroupPolicy, or answers Regrouped with that one "
                "group"
            )
        return decisions[0]

    def next_sequence(self) -> int:
        return self._service._decider.next_sequence

    def takes_part(self, worker: Worker) -> bool:
        session = self._service._sessions.get(worker)
        return session is not None and session.active

    def active_in(self, stage: int) -> list[Worker]:
        return [session.worker for session in self._service._sessions.of_stage(stage) if session.active]

    def fail(self, failure: m.Failure) -> None:
        self._service._fail(failure)
