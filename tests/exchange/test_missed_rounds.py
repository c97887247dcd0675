"""Members of a round that have missed some get the means of these, and make the same base of them, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_sdpipe.exchange.encoded_mean import EncodedMean, SentMean
from lightning_sdpipe.exchange.outer_model import Nesterov
from lightning_sdpipe.exchange.outer_state import History, MadeBase, OuterState, OwnBase
from lightning_sdpipe.exchange.payloads import EightBit, Full, Payload
from lightning_sdpipe.policies import Group
from lightning_sdpipe.policies.decisions import Lineage
from lightning_sdpipe.policies.events import Worker
from tests.exchange.test_group_mean import values
from tests.exchange.threads import Crew, together

pytestmark = pytest.mark.usefixtures("short_pieces")
N, SIZE, PIECE = 3, 5000, 2000
EIGHT = EightBit(block=64)


class Run:
    """Rounds of workers in threads, whose models move by themselves."""

    def __init__(self, crew: Crew, payload: Payload, hosts: Sequence[str] | None = None) -> None:
        self.crew, self.hosts, self.sent = crew, hosts, [0] * N
        codecs = [OwnBase(payload, rank, Nesterov(), 0.0) for rank in range(N)]
        self.states = [OuterState(codec) for codec in codecs]
        self.models = [[10 * values(99, SIZE)] for _ in range(N)]
        for state, model in zip(self.states, self.models, strict=True):
            state.codec.begin(model)
            state.forget()

    def round(self, sequence: int, members: Sequence[int], move: float = 0.1) -> None:
        """Makes a round of these members; ``sent`` are the bytes of each in it."""
        bases = tuple(self.states[i].base for i in members)
        workers = tuple(Worker(0, i) for i in members)
        weights = (1 / len(members),) * len(members)
        group = Group(workers, weights, sequence, "everybody came", lineage=Lineage(bases, max(bases)))

        def work(rank: int) -> None:
            if rank not in members:
                return
            state, replicas = self.states[rank], self.crew.replicas(rank)
            self.models[rank][0].add_(move * values(100 * sequence + rank, SIZE))
            new = state.make(self.models[rank], group, EncodedMean(replicas, state.codec, self.hosts), replicas)
            state.adopt(new, self.models[rank])
            self.sent[rank] = replicas.traffic.bytes

        self.sent = [0] * N
        together(N, work)

    def state(self, rank: int) -> list[Tensor]:
        return [*self.models[rank], *self.states[rank].codec.state()]

    def check_equal(self) -> None:
        assert {state.base for state in self.states} == {self.states[0].base}
        for rank in range(1, N):
            for mine, others in zip(self.state(0), self.state(rank), strict=True):
                assert torch.equal(mine.nan_to_num(), others.nan_to_num())


@pytest.mark.parametrize("payload", [EIGHT, Full()], ids=str)
def test_one_that_is_behind_makes_the_newest_base_of_what_it_has_missed(crew: Crew, payload: Payload) -> None:
    run = Run(crew, payload)
    run.round(0, [0, 1, 2])
    run.round(1, [0, 1])
    usual = run.sent[0]
    run.round(2, [0, 1, 2])
    run.check_equal()
    state = 2 * 4 * SIZE
    assert run.sent[0] - 2 * usual < 0.6 * state, "a round in full is half of base and momentum"
    run.round(3, [1, 2])
    run.round(4, [0, 1, 2])  # one that was behind itself has what another one misses
    run.check_equal()


def test_what_is_no_number_is_missed_like_all_else(crew: Crew) -> None:
    run = Run(crew, EIGHT)
    run.round(0, [0, 1])
    run.models[0][0][7] = torch.nan
    run.round(1, [0, 1])
    run.round(2, [1], move=0.2)
    run.round(3, [0, 1, 2])
    run.check_equal()
    assert run.state(2)[1].isnan().any()


def test_one_that_has_missed_too_much_gets_the_base_itself(crew: Crew) -> None:
    run = Run(crew, EIGHT)
    for sequence in range(5):
        run.round(sequence, [0, 1])
    run.round(5, [0, 1, 2])
    run.check_equal()
    assert run.sent[0] > 2 * 4 * SIZE
    run.round(6, [0, 1, 2])
    run.check_equal()


def test_rounds_by_machines_are_not_kept(crew: Crew) -> None:
    run = Run(crew, EIGHT, hosts=["a", "a", "b"])
    run.round(0, [0, 1, 2])
    run.round(1, [0, 1])
    run.round(2, [0, 1, 2])
    run.check_equal()


def test_a_history_keeps_the_last_rounds_that_fit() -> None:
    history = History(limit=250)
    rounds = [MadeBase(i - 1, i, [[SentMean(100, torch.zeros(100, dtype=torch.uint8))]]) for i in range(4)]
    for made in rounds:
        history.add(made)
    assert history.since(3, 3) == []
    assert history.since(1, 3) == rounds[2:]
    assert history.since(0, 3) is None
    assert history.since(-(1 << 62), 3) is None
