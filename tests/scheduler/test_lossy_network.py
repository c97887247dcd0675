"""Workers and a scheduler over a network that delays, repeats, reorders and loses, and a scheduler that dies.

Hypothesis moves the frames. Workers keep the client's rules: they repeat what is unanswered, join again when
the scheduler does not know them, and go on only when every member of their group has heard of it, as averaging
makes them. Then no iteration is lost or doubled, and a group is heard of by exactly its members.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lightning_sdpipe.policies import Worker
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.policies.registry import build
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler import messages as m
from lightning_sdpipe.scheduler.service import SchedulerService

GRACE, TIMEOUT = 10.0, 1000.0


class WorkerModel:
    """One worker that joins once and trains."""

    def __init__(self, worker: Worker, session: int) -> None:
        self.worker, self.session = worker, session
        self.number = 0
        self.joined = False
        self.iteration = 0
        self.outstanding = False
        self.last: m.Answer | None = None
        self.answers: dict[int, m.Answer] = {}

    def next(self) -> int:
        self.number += 1
        return self.number

    def speak(self) -> list[bytes]:
        """Whatever is unanswered, again."""
        if not self.joined:
            return [m.encode(m.Join(self.worker, self.session, self.next()))]
        if self.outstanding:
            return [m.encode(m.Ready(self.worker, self.session, self.next(), self.iteration))]
        return []

    def hear(self, frame: bytes) -> list[bytes]:
        reply = m.decode_reply(frame)
        match reply:
            case m.Acknowledged():
                self.joined = True
            case m.Unknown() if self.joined:
                rejoin = m.Join(self.worker, self.session, self.next(), True, self.last)
                return [m.encode(rejoin)]
            case m.Answer() if self.outstanding and reply.iteration_of(self.worker) == self.iteration:
                self.outstanding = False
                self.last = self.answers[self.iteration] = reply
            case m.Refused():
                raise AssertionError(reply.reason)
        return []


class LossyNetwork(RuleBasedStateMachine):
    @initialize(
        spec=st.sampled_from(
            [
                SemiDecentralized(window=1.0, connectivity=2),
                SemiDecentralized(window=0.0, connectivity=3),
                AllReduceModels(),
                ADPSGD(),
                NoSync(),
            ]
        ),
        stages=st.integers(1, 2),
        pipelines=st.integers(1, 4),
    )
    def start(self, spec: PolicyConfig, stages: int, pipelines: int) -> None:
        self.now = 0.0
        self.spec, self.shape = spec, (stages, pipelines)
        self.models = [
            WorkerModel(Worker(j, i), 100 + j * pipelines + i) for j in range(stages) for i in range(pipelines)
        ]
        self.by_identity = {m.routing_id(model.worker): model for model in self.models}
        self.by_identity |= {m.heartbeat_id(model.worker): model for model in self.models}
        self.to_server: list[tuple[bytes, bytes]] = []
        self.to_workers: list[tuple[bytes, bytes]] = []
        self.start_server()
        for model in self.models:  # the strategy's barrier: all join before any trains
            self.exchange(model.speak(), model)
        assert all(model.joined for model in self.models)

    def start_server(self) -> None:
        policy = build(self.spec, *self.shape)
        self.service = SchedulerService(
            policy, len(self.models), worker_timeout=TIMEOUT, recovery_grace=GRACE, now=self.now
        )

    def exchange(self, frames: list[bytes], model: WorkerModel) -> None:
        """On a good day."""
        for frame in frames:
            for identity, reply in self.service.handle(m.routing_id(model.worker), frame, self.now):
                self.by_identity[identity].hear(reply)

    def send(self, model: WorkerModel, frames: list[bytes]) -> None:
        self.to_server += [(m.routing_id(model.worker), frame) for frame in frames]

    def may_go_on(self, model: WorkerModel) -> bool:
        """Averaging takes all members."""
        if model.last is None:
            return True
        return all(
            any(
                answer.group.sequence == model.last.group.sequence
                for answer in self.by_identity[m.routing_id(member)].answers.values()
            )
            for member in model.last.group.members
        )

    def train(self, model: WorkerModel) -> None:
        if not model.outstanding and self.may_go_on(model):
            model.iteration += 1
            model.outstanding = True
            self.send(model, model.speak())

    @rule(data=st.data())
    def somebody_finishes_an_iteration(self, data: st.DataObject) -> None:
        self.train(data.draw(st.sampled_from(self.models)))

    @rule(data=st.data())
    def somebody_asks_again(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(self.models))
        self.send(model, model.speak())

    @rule(data=st.data())
    def a_heart_beats(self, data: st.DataObject) -> None:
        self.beat(data.draw(st.sampled_from(self.models)))

    def beat(self, model: WorkerModel) -> None:
        beat = m.Heartbeat(model.worker, model.session, model.next(), model.joined, False)
        self.to_server.append((m.heartbeat_id(model.worker), m.encode(beat)))

    @rule(data=st.data(), again=st.booleans())
    def a_frame_reaches_the_scheduler(self, data: st.DataObject, again: bool) -> None:
        """Any that is under way: late and early ones, and some twice."""
        if self.to_server:
            at = data.draw(st.integers(0, len(self.to_server) - 1))
            identity, frame = self.to_server[at] if again else self.to_server.pop(at)
            self.to_workers += self.service.handle(identity, frame, self.now)

    @rule(data=st.data(), again=st.booleans())
    def a_frame_reaches_a_worker(self, data: st.DataObject, again: bool) -> None:
        if self.to_workers:
            at = data.draw(st.integers(0, len(self.to_workers) - 1))
            identity, frame = self.to_workers[at] if again else self.to_workers.pop(at)
            self.deliver(identity, frame)

    def deliver(self, identity: bytes, frame: bytes) -> None:
        model = self.by_identity[identity]
        self.to_server += [(identity, answer) for answer in model.hear(frame)]

    @rule(data=st.data())
    def a_frame_is_lost(self, data: st.DataObject) -> None:
        frames = data.draw(st.sampled_from([self.to_server, self.to_workers]))
        if frames:
            frames.pop(data.draw(st.integers(0, len(frames) - 1)))

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.to_workers += self.service.tick(self.now)

    @rule()
    def the_scheduler_is_killed_and_started_again(self) -> None:
        """What was under way is lost with the connections."""
        self.to_server.clear()
        self.to_workers.clear()
        self.start_server()

    @rule(data=st.data())
    def the_scheduler_is_killed_while_it_answers(self, data: st.DataObject) -> None:
        """Some members of a group hear of it and some do not."""
        for model in self.models:
            self.train(model)
        while self.to_server:
            self.to_workers += self.service.handle(*self.to_server.pop(0), self.now)
        self.now += 1.0
        self.to_workers += self.service.tick(self.now)
        for identity, frame in self.to_workers:
            if data.draw(st.booleans(), label="arrives"):
                self.deliver(identity, frame)
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
                self.train(model)
                self.send(model, model.speak())
                self.beat(model)
            while self.to_server:
                self.to_workers += self.service.handle(*self.to_server.pop(0), self.now)
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


TestLossyNetwork = LossyNetwork.TestCase
TestLossyNetwork.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
