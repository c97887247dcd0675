"""Workers and a scheduler over a network that delays, repeats, reorders and loses. That of an elastic run dies.

Hypothesis moves the messages. What workers say and believe is the client's own
:class:`~lightning_sdpipe.scheduler.client.conversation.Conversation`. They never wait for the members of
their groups, as if every exchange overlapped with training, so they may be any number of groups ahead. Then no
iteration is lost or doubled, and a group that anybody hears of is heard of by exactly its members. They are dealt
batches, too: each by exactly one pipeline, the same on all of its stages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lightning_sdpipe.dealing.leases import Lease, Segment
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.membership.members import FIXED
from lightning_sdpipe.meter import PHASES, MeterRow
from lightning_sdpipe.policies import PolicyConfig, Worker, registry
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client import conversation as c
from lightning_sdpipe.scheduler.log.event_log import Beginning, Does, Entry, Record, Updates
from lightning_sdpipe.scheduler.server.outbox import Addressed
from lightning_sdpipe.scheduler.server.service import SchedulerService
from lightning_sdpipe.scheduler.server.session import ACTIVE, State

SILENCE, RUN = 8.0, 7


class WorkerModel:
    """One worker that trains, at once what it is dealt, or with a lease in hand, and pauses now and then."""

    def __init__(self, worker: Worker, machine: LossyNetwork) -> None:
        self.worker, self.segment, self.prefetches = worker, machine.segment, machine.prefetches
        self.talk = c.Conversation(worker, RUN, clock=lambda: machine.now)
        self.leases: list[Lease] = []
        self.line, self.beats = m.routing_id(worker, RUN), e.peer_of(worker, RUN)
        self.iteration = 0
        self.answers: dict[int, m.Answer] = {}
        self.talk.ask(e.Enrol, {"model": "linear"} if machine.elastic else FIXED)

    @property
    def pauses(self) -> bool:
        return not (self.talk.joined or {m.Join, m.Leave} & self.talk._open.keys())

    @property
    def computes(self) -> bool:
        return self.talk.joined and m.Ready not in self.talk._open

    @property
    def asks(self) -> bool:
        return m.AskLease not in self.talk._open and not self.over

    @property
    def over(self) -> bool:
        return bool(self.leases) and self.leases[-1].over

    def beat(self, now: float) -> list[tuple[bytes, m.Request | e.Request]]:
        if self.talk.joined:
            self.talk.rows.add(self.iteration, MeterRow((1,) * len(PHASES), 0, 0, follows=True))
        return [(self.beats, request) for request in self.talk.due(now)]

    def ask(self, kind: c.Kind, *fields: object) -> list[m.Request]:
        self.talk.ask(kind, *fields)
        return self.talk.due_in_training(0.0)

    def again(self) -> list[m.Request]:
        return self.talk.due_in_training(math.inf)

    def hear(self, reply: m.Reply | e.Reply) -> None:
        for effect in self.talk.hear(reply):
            match effect:
                case c.Replied(m.Ready, m.Answer() as answer):
                    self.answers[self.iteration] = answer
                case c.Replied(m.AskLease, m.Dealt(lease=lease)):
                    self.leases.append(lease)
                    self.talk.leases.trained(sum(each.size for each in self.leases) - self.prefetches * lease.size)
                case c.EpochBegan(epoch):
                    self.talk.holds([epoch.number])
                case c.Replied(_, e.Noted() | e.Start()) | c.Connect() | c.Warned():
                    pass
                case _:
                    raise AssertionError(effect)


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
        depths=st.one_of(
            st.builds(lambda stages, pipelines: (stages,) * pipelines, st.integers(1, 2), st.integers(1, 4)),
            st.sampled_from([(1, 2), (1, 2, 2), (3, 1, 2)]),
        ),
        length=st.integers(1, 30),
        prefetches=st.booleans(),
        elastic=st.booleans(),
    )
    def start(
        self, config: PolicyConfig, depths: tuple[int, ...], length: int, prefetches: bool, elastic: bool
    ) -> None:
        self.elastic = elastic
        if elastic:  # groups that some members have not heard of are dropped there, so each is of one
            config, depths = NoSync(), (depths[0],) * len(depths)
        self.now, self.segment, self.prefetches = 0.0, Segment(1, 0, 3, 3 + length), prefetches
        self.config, self.mesh = config, (max(depths), len(depths))
        self.depths = depths if len({*depths}) > 1 else ()
        workers = [Worker(j, i) for j in range(max(depths)) for i, stages in enumerate(depths) if j < stages]
        self.models = [WorkerModel(worker, self) for worker in workers]
        self.by_worker = {model.worker: model for model in self.models}
        self.by_peer = {peer: model for model in self.models for peer in (model.line, model.beats)}
        self.to_server: list[tuple[bytes, m.Request | e.Request]] = []
        self.to_workers: list[Addressed] = []
        self.start_server()
        for turn in range(3):  # the strategy's barrier: all join before any trains
            for model in self.models:
                joins = [] if turn else model.ask(m.Join)
                for said in [*model.beat(self.now), *((model.line, request) for request in joins)]:
                    for peer, reply in self.serve(*said):
                        self.deliver(peer, reply)
        assert all(model.talk.joined for model in self.models)

    def start_server(self) -> None:
        """It waits until all are back, since all come back."""
        self.began, pipelines = self.now, self.mesh[1]
        elastic = ElasticConfig(pipelines, settle=0.0, recovery_grace=1e9)
        self.terms = terms = elastic if self.elastic else ElasticConfig.of_fixed(pipelines, self.depths)
        silence = 1e9 if self.elastic else SILENCE  # which loses none
        self.service = SchedulerService(self.config, *self.mesh, worker_timeout=silence, elastic=terms, now=self.now)
        self.service.lines.answers = lambda *_: True  # type: ignore[method-assign]
        self.entries: list[Entry] = []
        self.service.log.write = self.note  # type: ignore[method-assign]

    def note(self, line: Entry | Updates | Does | Beginning) -> None:
        if isinstance(line, Entry):
            self.entries.append(line)

    def replay(self) -> None:
        """What the scheduler's policy has heard makes it decide the same again."""
        beginning = Beginning(registry.to_plain(self.config), *self.mesh, self.began, "now", self.terms)
        assert list(Record(beginning, self.entries, []).differences()) == []

    def serve(self, peer: bytes, request: m.Request | e.Request) -> list[Addressed]:
        replies = self.service.handle(peer, request, self.now)
        self.validate()
        return replies

    def validate(self) -> None:
        """The sessions do not contradict themselves, nor what the policy knows."""
        self.service.validate()
        self.service.members.membership.validate()
        participants = self.service._driver._policy.participants  # type: ignore[attr-defined]
        for stage in range(self.mesh[0]):
            states = {s.worker.pipeline: s.state for s in self.service.groups.sessions.of_stage(stage)}
            assert participants.active[stage] == {i for i, state in states.items() if state in ACTIVE}
            assert set(participants.waiting[stage]) == {i for i, state in states.items() if state is State.WAITING}

    def send(self, model: WorkerModel, requests: Iterable[m.Request]) -> None:
        self.to_server += [(model.line, request) for request in requests]

    def train(self, model: WorkerModel) -> None:
        if model.computes:
            model.iteration += 1
            self.send(model, model.ask(m.Ready, model.iteration))

    def has_averaged(self, model: WorkerModel) -> bool:
        """All groups that the worker knows of are known to their members, so they can have averaged."""
        return all(
            self.by_worker[worker].answers.get(iteration) == answer
            for answer in model.answers.values()
            for member, iteration in zip(answer.group.members, answer.iterations, strict=True)
            if iteration is not None
            for worker in self.of(member)
        )

    def of(self, member: Worker) -> list[Worker]:
        """The workers that are in a group by ``member``."""
        return [Worker(j, member.pipeline) for j in range(self.depths[member.pipeline])] if self.depths else [member]

    @rule(data=st.data())
    def somebody_finishes_an_iteration(self, data: st.DataObject) -> None:
        self.train(data.draw(st.sampled_from(self.models)))

    @rule(data=st.data())
    def somebody_asks_for_batches(self, data: st.DataObject) -> None:
        self.ask_for_batches(data.draw(st.sampled_from(self.models)))

    def ask_for_batches(self, model: WorkerModel) -> None:
        if model.asks:
            self.send(model, model.ask(m.AskLease, self.segment, len(model.leases)))

    @rule(data=st.data())
    def somebody_pauses_or_comes_back(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(self.models))
        if model.pauses:
            self.send(model, model.ask(m.Join))
        elif model.computes and self.has_averaged(model):
            self.send(model, model.ask(m.Leave))

    @rule(data=st.data())
    def somebody_asks_again(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(self.models))
        self.send(model, model.again())

    @rule(data=st.data())
    def a_heart_beats(self, data: st.DataObject) -> None:
        self.beat(data.draw(st.sampled_from(self.models)))

    def beat(self, model: WorkerModel) -> None:
        self.to_server += model.beat(self.now)

    @rule(data=st.data())
    def somebody_falls_silent(self, data: st.DataObject) -> None:
        """After a heartbeat, nothing of it arrives for long, as it is stopped; what it sent may still come later."""
        silent = data.draw(st.sampled_from(self.models))
        if self.elastic:
            return  # its pipeline would be lost
        for turn in range(7):
            for model in self.models:
                if model is not silent or not turn:
                    for said in model.beat(self.now):
                        self.to_workers += self.serve(*said)
            self.to_workers += self.service.tick(self.now)
            self.now += SILENCE / 4
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

    def deliver(self, peer: bytes, reply: m.Reply | e.Reply) -> None:
        self.by_peer[peer].hear(reply)

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
        """What was under way is lost with the connections; leases may have come, and be read only later."""
        if not self.elastic:
            return
        self.to_server.clear()
        self.to_workers = [(peer, reply) for peer, reply in self.to_workers if isinstance(reply, m.Dealt)]
        self.replay()
        self.start_server()

    @invariant()
    def a_group_is_the_same_for_all_who_heard_of_it(self) -> None:
        groups: dict[int, m.Answer] = {}
        for model in getattr(self, "models", []):
            assert list(model.answers) == list(range(1, len(model.answers) + 1))
            for iteration, answer in model.answers.items():
                assert m.iteration_of(model.worker, answer) == iteration
                assert groups.setdefault(answer.group.sequence, answer) == answer

    @invariant()
    def no_batch_is_dealt_twice_and_stages_agree(self) -> None:
        batches: Counter[tuple[int, int]] = Counter()
        for pipeline in {model.worker.pipeline for model in getattr(self, "models", [])}:
            lists = [model.leases for model in self.models if model.worker.pipeline == pipeline]
            longest = max(lists, key=len)
            assert all(leases == longest[: len(leases)] for leases in lists)
            batches.update((lease.home, n) for lease in longest for n in range(lease.start, lease.stop))
        assert max(batches.values(), default=1) == 1
        if hasattr(self, "models") and all(model.over for model in self.models):
            assert len(batches) == self.mesh[1] * (self.segment.stop - self.segment.start)

    def teardown(self) -> None:
        """On a good day everybody trains on, since all that was left open is answered, until every batch is trained."""
        if not hasattr(self, "models"):
            return
        goal = max(model.iteration for model in self.models) + 2
        for _ in range(200 + 60 * goal):
            for model in self.models:
                self.ask_for_batches(model)
                if model.pauses:
                    self.send(model, model.ask(m.Join))
                self.train(model)
                self.send(model, model.again())
                self.beat(model)
            while self.to_server:
                self.to_workers += self.serve(*self.to_server.pop(0))
            self.now += 0.5
            self.to_workers += self.service.tick(self.now)
            while self.to_workers:
                self.deliver(*self.to_workers.pop(0))
            if all(len(model.answers) >= goal and model.over for model in self.models):
                break
        else:
            stuck = [(model.worker, model.iteration, model.computes, model.leases) for model in self.models]
            raise AssertionError(f"not everybody was answered: {stuck}")
        self.a_group_is_the_same_for_all_who_heard_of_it()
        self.no_batch_is_dealt_twice_and_stages_agree()
        self.replay()
        for model in self.models:
            for answer in model.answers.values():
                for member, iteration in zip(answer.group.members, answer.iterations, strict=True):
                    for worker in self.of(member):
                        there = self.by_worker[worker].answers.get(iteration or 0, answer)
                        assert there == answer, f"{worker} is in another group"


TestLossyNetwork = LossyNetwork.TestCase
TestLossyNetwork.settings = settings(
    max_examples=settings.default.max_examples // 2, stateful_step_count=40, deadline=None
)
