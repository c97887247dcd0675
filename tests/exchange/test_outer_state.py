"""Bases that are made in rounds, and handed over to workers that have missed some."""

from __future__ import annotations

import pytest
import torch

from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.outer_model import Nesterov
from lightning_sdpipe.exchange.outer_state import OuterRoundsModel, OuterState
from lightning_sdpipe.exchange.payloads import EightBit
from lightning_sdpipe.policies import Group, Worker
from tests.exchange.test_group_mean import values
from tests.exchange.threads import Crew, together

SIZE = 500


def test_one_that_has_brought_nothing_to_the_newest_base_gets_it_bit_for_bit_and_keeps_its_own_training() -> None:
    crew = Crew(3)
    given = Group((Worker(0, 0), Worker(0, 2)), (1.0, 0.0), 9, "handed over", (Worker(0, 0),))

    def work(rank: int) -> tuple[OuterState, torch.Tensor]:
        codec, model = OuterRoundsModel(EightBit(block=64), rank, Nesterov(), 0.0), 10 * values(99, SIZE)
        codec.begin([model])
        state, replicas = OuterState(codec), crew.replicas(rank)
        for sequence in range(2):
            model.add_(0.1 * values(100 * sequence + rank, SIZE))
            if rank < 2:
                group = Group((Worker(0, 0), Worker(0, 1)), (0.5, 0.5), sequence, "everybody came")
                new = state.make([model], group, EncodedMean(replicas, codec), replicas)
                state.adopt(new, [model])
        if rank == 0:
            state.hand_over(given, replicas)
        elif rank == 2:
            before, own = codec.outer[0].base.clone(), model.clone()
            assert not state.adopt(state.take_over(0, given, replicas), [model])
            torch.testing.assert_close(model, own - before + codec.outer[0].base)
        return state, model

    (first, one), (second, other), (third, _) = together(3, work)
    assert first.rounds == second.rounds == third.rounds == 2
    assert torch.equal(one, other)
    for mine, *others in zip(*(state.codec.state() for state in (first, second, third)), strict=True):
        assert all(torch.equal(mine, theirs) for theirs in others)


@pytest.mark.parametrize("made_again", [False, True])
def test_the_base_of_a_round_that_broke_off_keeps_what_was_brought_to_it_once(made_again: bool) -> None:
    """One that has left while the round was begun may be missing where it was made again by others."""
    crew, started = Crew(2), 10 * values(99, SIZE)
    given = Group((Worker(0, 0), Worker(0, 1)), (1.0, 0.0), 9, "handed over", (Worker(0, 0),))

    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        codec, model = OuterRoundsModel(EightBit(block=64), rank, Nesterov(), 0.0), started.clone()
        codec.begin([model])
        state, replicas = OuterState(codec), crew.replicas(rank)
        model.add_(values(rank, SIZE))
        own = model.clone()
        alone = Group((Worker(0, rank),), (1.0,), 7 if rank == 1 or not made_again else 8, "everybody came")
        new = state.make([model], alone, EncodedMean(replicas, codec), replicas)
        if rank == 0:
            state.adopt(new, [model])
            state.hand_over(given, replicas)
        else:  # whose exchange has broken off
            assert state.adopt(state.take_over(0, given, replicas), [model]) != made_again
        return own, model

    (_, base), (own, model) = together(2, work)
    torch.testing.assert_close(model, own - started + base if made_again else base)
