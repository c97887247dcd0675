"""Workers and a scheduler over a network that delays, repeats, reorders and loses, and a scheduler that dies.

Hypothesis moves the messages. Workers keep the client's rules: they repeat what is unanswered, join again when the
scheduler does not know them, and bring the answers that others could still ask for. They never wait for the members of
their groups, as if every exchange overlapped with training, so they may be any number of groups ahead. Then no
iteration is lost or doubled, and a group that anybody hears of is heard of by exactly its members.
"""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lightning_sdpipe.dealing.dealer import Dealer
from lightning_sdpipe.policies import PolicyConfig, Worker, registry
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client.recovery_report import HeardAnswers
from lightning_sdpipe.scheduler.log.event_log import REMEMBERED, Entry, differences
from lightning_sdpipe.scheduler.server.outbox import Addressed
from lightning_sdpipe.scheduler.server.service import SchedulerService
from lightning_sdpipe.scheduler.server.session import ACTIVE, State

FOR_EVER, SILENCE = 1e9, 8.0


class WorkerModel:
    """One worker that trains, and pauses now and then."""

    def __init__(self, worker: Worker, session: int) -> None:
        self.worker, self.session = worker, session
        self.number = 0
        self.joined = False
        self.wants_to_be_joined = True
        self.asked_first: int | None = None
        """The first number of the join or leave that is not acknowledged yet."""
        self.iteration = 0
        self.outstanding = False
        self.heard = HeardAnswers(worker)
        self.answers: dict[int, m.Answer] = {}

    def next(self) -> int:
        self.number += 1
        return self.number

    def speak(self) -> list[m.Request]:
        """Whatever is unanswered, again."""
        if self.joined != self.wants_to_be_joined:
            number = self.next()
            self.asked_first = self.asked_first or number
            if self.wants_to_be_joined:
                return [m.Join(self.worker, self.session, number, None, heard=self.heard.highest)]
            return [m.Leave(self.worker, self.session, number)]
        if self.outstanding:
            return [m.Ready(self.worker, self.session, self.next(), self.iteration)]
        return []

    def hear(self, reply: m.Reply) -> list[m.Request]:
        match reply:
            case m.Acknowledged(number) if self.asked_first is not None and number >= self.asked_first:
                self.joined, self.asked_first = self.wants_to_be_joined, None
                if self.joined:
                    self.heard.joined()
            case m.Unknown() if self.joined and self.wants_to_be_joined:
                highest, answers = self.heard.highest, self.heard.to_report()
                return [m.Join(self.worker, self.session, self.next(), None, True, highest, answers)]
            case m.Answer() if self.outstanding and reply.iteration_of(self.worker) == self.iteration:
                self.outstanding = False
                self.heard.hear(reply)
                self.answers[self.iteration] = reply
            case m.Refused():
                raise AssertionError(reply.reason)
        return []


class LossyNetwork(RuleBasedStateMachine):
    @initialize(
        config=st.sampled_from(
            [
                SemiDecentralized(window=1.0, connectivity=2),
                SemiDecentralized(window=0.0, connectivity=3),
                SemiDecentralized(window=1.0, connectivity=None, max_group=2),
                AllReduceModels(),
                ADPSGD(),
                NoSync(),
            ]
        ),
        stages=st.integers(1, 2),
        pipelines=st.integers(1, 4),
    )
    def start(self, config: PolicyConfig, stages: int, pipelines: int) -> None:
        self.now = 0.0
        self.config, self.mesh = config, (stages, pipelines)
        self.models = [
            WorkerModel(Worker(j, i), 100 + j * pipelines + i) for j in range(stages) for i in range(pipelines)
        ]
        self.by_worker = {model.worker: model for model in self.models}
        self.by_peer = {m.routing_id(model.worker): model for model in self.models}
        self.by_peer |= {m.heartbeat_id(model.worker): model for model in self.models}
        self.to_server: list[tuple[bytes, m.Request]] = []
        self.to_workers: list[Addressed] = []
        self.start_server()
        for model in self.models:  # the strategy's barrier: all join before any trains
            for request in model.speak():
                for peer, reply in self.serve(m.routing_id(model.worker), request):
                    self.by_peer[peer].hear(reply)
        assert all(model.joined for model in self.models)

    def start_server(self) -> None:
        """It waits until all are back, since all come back."""
        self.service = SchedulerService(
            self.config, *self.mesh, worker_timeout=SILENCE, recovery_grace=FOR_EVER, now=self.now
        )

    def replay(self) -> None:
        """What the scheduler's policy has heard makes it decide the same again."""
        entries = [Entry(*entry) for entry in self.service.log.recent]
        assert len(entries) < REMEMBERED
        assert list(differences(registry.build(self.config, *self.mesh), Dealer(*self.mesh), entries)) == []

    def serve(self, peer: bytes, request: m.Request) -> list[Addressed]:
        replies = self.service.handle(peer, request, self.now)
        self.validate()
        return replies

    def validate(self) -> None:
        """The sessions do not contradict themselves, nor what the policy knows."""
        self.service.validate()
        participants = self.service._driver._policy.participants  # type: ignore[attr-defined]
        for stage in range(self.mesh[0]):
            states = {s.worker.pipeline: s.state for s in self.service.groups.sessions.of_stage(stage)}
            assert participants.active[stage] == {i for i, state in states.items() if state in ACTIVE}
            assert set(participants.waiting[stage]) == {i for i, state in states.items() if state is State.WAITING}

    def send(self, model: WorkerModel, requests: Iterable[m.Request]) -> None:
        self.to_server += [(m.routing_id(model.worker), request) for request in requests]

    def train(self, model: WorkerModel) -> None:
        if model.joined and model.wants_to_be_joined and not model.outstanding:
            model.iteration += 1
            model.outstanding = True
            self.send(model, model.speak())

    def has_averaged(self, model: WorkerModel) -> bool:
        """All groups that the worker knows of are known to their members, so they can have averaged."""
        return all(
            self.by_worker[member].answers.get(iteration) == answer
            for answer in model.answers.values()
            for member, iteration in zip(answer.group.members, answer.iterations, strict=True)
            if iteration is not None
        )

    @rule(data=st.data())
    def somebody_finishes_an_iteration(self, data: st.DataObject) -> None:
        self.train(data.draw(st.sampled_from(self.models)))

    @rule(data=st.data())
    def somebody_pauses_or_comes_back(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(self.models))
        if model.joined == model.wants_to_be_joined and not model.outstanding and self.has_averaged(model):
            model.wants_to_be_joined = not model.joined
            if not model.wants_to_be_joined:
                model.heard.forget()
            self.send(model, model.speak())

    @rule(data=st.data())
    def somebody_asks_again(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(self.models))
        self.send(model, model.speak())

    @rule(data=st.data())
    def a_heart_beats(self, data: st.DataObject) -> None:
        self.beat(data.draw(st.sampled_from(self.models)))

    def beat(self, model: WorkerModel) -> None:
        self.to_server.append((m.heartbeat_id(model.worker), self.heartbeat(model)))

    def heartbeat(self, model: WorkerModel) -> m.Heartbeat:
        steps = m.Steps(model.iteration, 1, 1.0, 0.1) if model.iteration else None
        joined = model.joined and model.wants_to_be_joined
        return m.Heartbeat(model.worker, model.session, model.next(), joined, steps)

    @rule(data=st.data())
    def somebody_falls_silent(self, data: st.DataObject) -> None:
        """After a heartbeat, nothing of it arrives until it is lost; what it sent may still come later."""
        silent = data.draw(st.sampled_from(self.models))
        for model in self.models:
            self.to_workers += self.serve(m.heartbeat_id(model.worker), self.heartbeat(model))
        for _ in range(6):
            self.now += SILENCE / 4
            for model in self.models:
                if model is not silent:
                    self.to_workers += self.serve(m.heartbeat_id(model.worker), self.heartbeat(model))
            self.to_workers += self.service.tick(self.now)
        self.validate()

    @rule(data=st.data(), again=st.booleans())
    def a_message_reaches_the_scheduler(self, data: st.DataObject, again: bool) -> None:
        """Any that is under way: late and early ones, and some twice."""
        if self.to_server:
            at = data.draw(st.integers(0, len(self.to_server) - 1))
            peer, request = self.to_server[at] if again else self.to_server.pop(at)
            self.to_workers += self.serve(peer, request)

    @rule(data=st.data(), again=st.booleans())
    def a_message_reaches_a_worker(self, data: st.DataObject, again: bool) -> None:
        if self.to_workers:
            at = data.draw(st.integers(0, len(self.to_workers) - 1))
            peer, reply = self.to_workers[at] if again else self.to_workers.pop(at)
            self.deliver(peer, reply)

    def deliver(self, peer: bytes, reply: m.Reply) -> None:
        self.to_server += [(peer, request) for request in self.by_peer[peer].hear(reply)]

    @rule(data=st.data())
    def a_message_is_lost(self, data: st.DataObject) -> None:
        messages = data.draw(st.sampled_from([self.to_server, self.to_workers]))
        if messages:
            messages.pop(data.draw(st.integers(0, len(messages) - 1)))

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.to_workers += self.service.tick(self.now)
        self.validate()

    @rule()
    def the_scheduler_is_killed_and_started_again(self) -> None:
        """What was under way is lost with the connections."""
        self.to_server.clear()
        self.to_workers.clear()
        self.replay()
        self.start_server()

    @rule(data=st.data(), iterations=st.integers(1, 3))
    def the_scheduler_is_killed_while_it_answers(self, data: st.DataObject, iterations: int) -> None:
        """Some members hear of their groups, and go on to others, and some do not."""
        for _ in range(iterations):
            for model in self.models:
                self.train(model)
            while self.to_server:
                self.to_workers += self.serve(*self.to_server.pop(0))
            self.now += 1.0
            self.to_workers += self.service.tick(self.now)
            for peer, reply in self.to_workers:
                if data.draw(st.booleans(), label="arrives"):
                    self.deliver(peer, reply)
            self.to_workers.clear()
        self.the_scheduler_is_killed_and_started_again()

    @invariant()
    def a_group_is_the_same_for_all_who_heard_of_it(self) -> None:
        groups: dict[int, m.Answer] = {}
        for model in getattr(self, "models", []):
            assert list(model.answers) == list(range(1, len(model.answers) + 1))
            for iteration, answer in model.answers.items():
                assert answer.iteration_of(model.worker) == iteration
                assert groups.setdefault(answer.group.sequence, answer) == answer

    def teardown(self) -> None:
        """On a good day everybody trains on, since all that was left open is answered."""
        if not hasattr(self, "models"):
            return
        goal = max(model.iteration for model in self.models) + 2
        for _ in range(60 * goal):
            for model in self.models:
                model.wants_to_be_joined = True
                self.train(model)
                self.send(model, model.speak())
                self.beat(model)
            while self.to_server:
                self.to_workers += self.serve(*self.to_server.pop(0))
            self.now += 0.5
            self.to_workers += self.service.tick(self.now)
            while self.to_workers:
                self.deliver(*self.to_workers.pop(0))
            if all(len(model.answers) >= goal for model in self.models):
                break
        else:
            stuck = [(model.worker, model.iteration, model.outstanding) for model in self.models]
            raise AssertionError(f"not everybody was answered: {stuck}")
        self.a_group_is_the_same_for_all_who_heard_of_it()
        self.replay()
        for model in self.models:
            for answer in model.answers.values():
                for member, iteration in zip(answer.group.members, answer.iterations, strict=True):
                    there = self.by_worker[member].answers.get(iteration or 0, answer)
                    assert there == answer, f"{member} is in another group"


TestLossyNetwork = LossyNetwork.TestCase
TestLossyNetwork.settings = settings(
    max_examples=settings.default.max_examples // 2, stateful_step_count=40, deadline=None
)
