import random

import numpy as np
import torch

from lightning_sdpipe.random_streams import RandomStreams, mix


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
        seed = streams.current
        within = []
        if runs:
            streams.enter(5)
            within = [drawn() for _ in range(draws_in_block)]
        streams.leave(5, seed)
        return [before, drawn(), *within]

    assert step(1)[:2] == step(4)[:2] == step(0, runs=False)
    assert step(2)[2] == step(1)[2]
    assert len({*step(1)}) == 3, "before, after and within the block they differ"


def test_restoring_the_state_of_torch_brings_back_the_stream() -> None:
    """Activation checkpointing restores no more than that before it recomputes."""
    streams = RandomStreams(torch.device("cpu"))
    streams.begin(1)
    state, seed = torch.get_rng_state(), streams.current
    streams.enter(2)
    first = drawn()
    streams.leave(2, seed)
    torch.set_rng_state(state)
    streams.enter(2)
    assert drawn() == first
