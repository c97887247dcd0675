"""Batches that are dealt over a network that delays, repeats, reorders and loses, by a scheduler that dies.

Hypothesis moves the messages. What workers say and believe is the client's own
:class:`~lightning_sdpipe.scheduler.client.conversation.Conversation`. Each batch is trained by exactly
one pipeline, the same on all of its stages.
"""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lightning_sdpipe.dealing.leases import Lease, Segment
from lightning_sdpipe.membership.members import FIXED
from lightning_sdpipe.policies import Worker
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client import conversation as c
from lightning_sdpipe.scheduler.server.outbox import Addressed
from lightning_sdpipe.scheduler.server.service import SchedulerService

RUN = 7


class WorkerModel:
    """A worker that trains what it is dealt at once."""

    def __init__(self, worker: Worker, segment: Segment, machine: LossyDealing) -> None:
        self.worker, self.segment = worker, segment
        self.leases: list[Lease] = []
        self.started = False
        self.talk = c.Conversation(worker, RUN, clock=lambda: machine.now)
        self.line, self.beats = m.routing_id(worker, RUN), e.peer_of(worker, RUN)
        self.talk.ask(e.Enrol, FIXED)

    @property
    def over(self) -> bool:
        return bool(self.leases) and self.leases[-1].over

    def speak(self, now: float) -> list[tuple[bytes, m.Request | e.Request]]:
        """The ask that is unanswered, again, or the next; beats only, once there is none."""
        said: list[tuple[bytes, m.Request | e.Request]] = [(self.beats, request) for request in self.talk.due(now)]
        if self.started and not self.over:
            if m.AskLease not in self.talk._open:
                self.talk.ask(m.AskLease, self.segment, len(self.leases))
            said += [(self.line, request) for request in self.talk.due_in_training(math.inf)]
        return said

    def hear(self, reply: m.Reply | e.Reply) -> None:
        for effect in self.talk.hear(reply):
            match effect:
                case c.Replied(m.AskLease, m.Dealt(lease=lease)):
                    self.leases.append(lease)
                    self.talk.leases.trained(sum(lease.size for lease in self.leases))
                case c.Replied(_, e.Start()):
                    self.started = True
                case c.EpochBegan() | c.Connect():
                    pass
                case _:
                    raise AssertionError(effect)


class LossyDealing(RuleBasedStateMachine):
    @initialize(stages=st.integers(1, 2), pipelines=st.integers(1, 3), length=st.integers(1, 30))
    def start(self, stages: int, pipelines: int, length: int) -> None:
        self.now = 0.0
        self.mesh, self.segment = (stages, pipelines), Segment(1, 0, 3, 3 + length)
        self.models = [WorkerModel(Worker(j, i), self.segment, self) for j in range(stages) for i in range(pipelines)]
        self.by_peer = {peer: model for model in self.models for peer in (model.line, model.beats)}
        self.to_server: list[tuple[bytes, m.Request | e.Request]] = []
        self.to_workers: list[Addressed] = []
        self.service = SchedulerService(NoSync(), *self.mesh)

    def serve(self, at: int, again: bool) -> None:
        peer, request = self.to_server[at] if again else self.to_server.pop(at)
        self.to_workers += self.service.handle(peer, request, self.now)
        self.service.validate()
        assert self.service.failure is None

    def deliver(self, at: int, again: bool) -> None:
        peer, reply = self.to_workers[at] if again else self.to_workers.pop(at)
        self.by_peer[peer].hear(reply)

    @rule(data=st.data(), seconds=st.sampled_from([0.0, 0.1, 2.0]))
    def somebody_asks(self, data: st.DataObject, seconds: float) -> None:
        self.now += seconds
        self.to_server += data.draw(st.sampled_from(self.models)).speak(self.now)

    @rule(data=st.data(), again=st.booleans())
    def a_message_reaches_the_scheduler(self, data: st.DataObject, again: bool) -> None:
        if self.to_server:
            self.serve(data.draw(st.integers(0, len(self.to_server) - 1)), again)

    @rule(data=st.data(), again=st.booleans())
    def a_message_reaches_a_worker(self, data: st.DataObject, again: bool) -> None:
        if self.to_workers:
            self.deliver(data.draw(st.integers(0, len(self.to_workers) - 1)), again)

    @rule(data=st.data())
    def a_message_is_lost(self, data: st.DataObject) -> None:
        messages = data.draw(st.sampled_from([self.to_server, self.to_workers]))
        if messages:
            messages.pop(data.draw(st.integers(0, len(messages) - 1)))

    @rule()
    def all_is_well_for_a_while(self) -> None:
        for model in self.models:
            self.to_server += model.speak(self.now)
        while self.to_server:
            self.serve(0, again=False)
        self.to_workers += self.service.tick(self.now)
        while self.to_workers:
            self.deliver(0, again=False)

    @rule()
    def the_scheduler_is_killed_and_started_again(self) -> None:
        """What was under way is lost with the connections; leases may have come, and be read only later."""
        self.to_server.clear()
        self.to_workers = [(peer, reply) for peer, reply in self.to_workers if isinstance(reply, m.Dealt)]
        self.service = SchedulerService(NoSync(), *self.mesh, now=self.now)

    @invariant()
    def no_batch_is_dealt_twice_and_stages_agree(self) -> None:
        stages, pipelines = getattr(self, "mesh", (0, 0))
        batches: Counter[tuple[int, int]] = Counter()
        for pipeline in range(pipelines):
            lists = [model.leases for model in self.models if model.worker.pipeline == pipeline]
            longest = max(lists, key=len)
            assert all(leases == longest[: len(leases)] for leases in lists)
            batches.update((lease.home, n) for lease in longest for n in range(lease.start, lease.stop))
        assert max(batches.values(), default=1) == 1
        if stages and all(model.over for model in self.models):
            assert len(batches) == pipelines * (self.segment.stop - self.segment.start)

    def teardown(self) -> None:
        """On a good day everything is trained, and everybody hears so."""
        if not hasattr(self, "models"):
            return
        for _ in range(200):
            self.now += 1.0
            self.all_is_well_for_a_while()
            if all(model.over for model in self.models):
                break
        else:
            raise AssertionError(f"not over: {[(model.worker, model.leases) for model in self.models]}")
        self.no_batch_is_dealt_twice_and_stages_agree()


TestLossyDealing = LossyDealing.TestCase
TestLossyDealing.settings = settings(
    max_examples=settings.default.max_examples // 2, stateful_step_count=40, deadline=None
)
