import random

import numpy as np
import torch

from lightning_sdpipe.random_streams import AFTER, WITHIN, RandomStreams, Stream, mix


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_seeds_depend_on_every_number_and_on_their_order() -> None:
    keys = [(), (0,), (0, 0), (1, 2), (2, 1), (-1, 2), (1, 2, 3), (2**63, 1)]
    seeds = {mix(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**62 for seed in seeds)


def test_what_a_block_draws_does_not_matter_to_what_follows() -> None:
    streams = RandomStreams(torch.device("cpu"))

    def step(draws_in_block: int, runs: bool = True) -> list[tuple[float, float, float]]:
        streams.begin(7, 3)
        before = drawn()
        seed = streams.current()
        within = []
        if runs:
            streams.begin(seed, 5, WITHIN)
            within = [drawn() for _ in range(draws_in_block)]
        streams.begin(seed, 5, AFTER)
        return [before, drawn(), *within]

    assert step(1)[:2] == step(4)[:2] == step(0, runs=False)
    assert step(2)[2] == step(1)[2]
    assert len({*step(1)}) == 3, "before, after and within the block they differ"


def test_restoring_the_state_of_torch_brings_back_the_stream() -> None:
    """Activation checkpointing restores no more than that before it recomputes."""
    streams = RandomStreams(torch.device("cpu"))
    streams.begin(1)
    state, seed = torch.get_rng_state(), streams.current()
    streams.begin(seed, 2, WITHIN)
    first = drawn()
    streams.begin(seed, 2, AFTER)
    torch.set_rng_state(state)
    streams.begin(streams.current(), 2, WITHIN)
    assert drawn() == first


def test_whether_anything_was_drawn_from_a_stream() -> None:
    streams = RandomStreams(torch.device("cpu"))
    for draw in (lambda: torch.rand(2), random.random, np.random.rand):
        streams.begin(4)
        assert not streams.drawn_from()
        streams.begin(4)
        draw()
        assert streams.drawn_from()


def test_a_stream_goes_on_where_it_ended() -> None:
    def numbers(breaks: int) -> list[tuple[float, float, float]]:
        stream, found = Stream(5), []
        for _ in range(breaks):
            with stream.drawn():
                found += [drawn() for _ in range(12 // breaks)]
            np.random.seed(1), random.seed(1), torch.manual_seed(1)
        return found

    assert numbers(1) == numbers(3) == numbers(12)
    assert len(set(numbers(4))) == 12
