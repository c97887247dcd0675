"""Gradient means over real processes, with replicas that have nothing to add."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.gradient_rounds import GradientRounds
from lightning_sdpipe.topology.groups import Replicas
from tests.exchange.threads import Crew
from tests.workers import run_workers

SHAPES = [(3,), (2, 2), (5,), (1,), (4,)]
SAMPLES = (3.0, 1.0, 2.0)
"""Of each rank, in the last round."""
CAP = 24  # bytes: buckets of two or three of the parameters above


def gradient(rank: int, number: int, turn: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + 10 * rank + number)
    return torch.randn(SHAPES[number], generator=generator).to(dtype)


def buckets(dtype: torch.dtype = torch.float32, replicas: Replicas | None = None) -> GradientRounds:
    """Of all processes, unless ``replicas`` are given."""
    world: Any = dist.group.WORLD
    replicas = replicas or Replicas(world, range(dist.get_world_size()), 0, dist.get_rank())
    return GradientRounds([nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES], replicas, CAP)


def rounds(rank: int, dtype: torch.dtype) -> list[Any]:
    """Four rounds: in the order of the numbers, out of order with gaps, without rank 2, and by samples."""
    means, outcomes = buckets(dtype), []
    everything: list[Tensor | None] = [gradient(rank, n, 0, dtype) for n in range(5)]
    for n in range(5):
        means.gradient_ready(n, everything[n])  # type: ignore[arg-type]
    means.complete(everything)
    outcomes.append(means.wait())

    # nobody has a gradient for 1, and rank 1 none for 3
    some = [None if n == 1 or (n == 3 and rank == 1) else gradient(rank, n, 1, dtype) for n in range(5)]
    if some[4] is not None and rank == 0:
        means.gradient_ready(4, some[4])
    means.complete(some)
    outcomes.append(means.wait())

    here = [gradient(rank, n, 2, dtype) if rank != 2 else None for n in range(5)]
    means.complete(here, trains=rank != 2)
    outcomes.append(means.wait())

    means.weight = SAMPLES[rank]
    means.complete([gradient(rank, n, 3, dtype) for n in range(5)])
    outcomes.append(means.wait())
    return [(outcome.gradients, outcome.members) for outcome in outcomes]


@pytest.mark.parametrize(
    ("sizes", "expected", "early"), [([1] * 12, [3, 3, 3, 3], 12), ([1, 1], [1, 1], 1), ([40, 20, 40], [1, 2], 3)]
)
def test_the_backward_hides_some_of_a_small_model_too(sizes: list[int], expected: list[int], early: int) -> None:
    parameters = [nn.Parameter(torch.empty(mib * 2**18)) for mib in sizes]
    group: Any = None
    means = GradientRounds(parameters, Replicas(group, range(2), 0, 0), 25 * 2**20)
    assert [len(bucket.numbers) for bucket in means._buckets] == expected
    assert means.early == range(early), "the last bucket, if it is small, is sent at the end with the flags"


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replicas_get_the_mean_over_those_that_train(dtype: torch.dtype) -> None:
    """Flags go with the last bucket's gradients, or by themselves where these cannot hold them."""
    by_rank = run_workers(3, rounds, dtype)
    absences: list[set[tuple[int, int]]] = [set(), {(r, 1) for r in range(3)} | {(1, 3)}, {(2, n) for n in range(5)}]
    for turn, absent in enumerate([*absences, set()]):
        members = 2 if turn == 2 else 3
        for number in range(5):
            weights = SAMPLES if turn == 3 else (1.0,) * 3
            total = sum(weights) if turn == 3 else members
            there = [weights[r] * gradient(r, number, turn, dtype) for r in range(3) if (r, number) not in absent]
            for gradients, counted in (outcomes[turn] for outcomes in by_rank):
                assert counted == members
                if there:
                    error = {"rtol": 0, "atol": 1e-6 if dtype is torch.float32 else 0.03}
                    torch.testing.assert_close(gradients[number], torch.stack(there).sum(0) / total, **error)
                else:
                    assert gradients[number] is None
                assert gradients[number] is None or torch.equal(gradients[number], by_rank[0][turn][0][number])


def start_early(rank: int) -> list[int]:
    """How many buckets are under way after each gradient."""
    means, under_way = buckets(), []
    gradients: list[Tensor | None] = [gradient(rank, n, 0) for n in range(5)]
    for n in (2, 0, 1, 3, 4):
        means.gradient_ready(n, gradients[n])  # type: ignore[arg-type]
        under_way.append(sum(bucket.work is not None for bucket in means._buckets))
    means.complete(gradients)
    kept = means.wait().gradients[0]
    before = kept.clone()  # type: ignore[union-attr]
    means.complete([None] * 5)  # a further round must leave the last one's gradients alone
    means.wait()
    assert torch.equal(before, kept)  # type: ignore[arg-type]
    return under_way


@pytest.mark.distributed
def test_a_full_bucket_starts_at_once_but_never_before_the_one_ahead_of_it() -> None:
    # buckets: 0 and 1 (28 bytes), 2 and 3 (24 bytes), 4, which goes with the flags
    assert run_workers(2, start_early) == [[0, 0, 1, 2, 2]] * 2


def test_what_cannot_be_averaged_is_refused() -> None:
    means = buckets(replicas=Crew(1).replicas(0))
    with pytest.raises(ConfigurationError, match="sparse gradient"):
        means.gradient_ready(0, torch.zeros(3).to_sparse())
    for n in (0, 1):
        means.gradient_ready(n, torch.zeros(SHAPES[n]))
    with pytest.raises(ConfigurationError, match="changed after it had been sent"):
        means.gradient_ready(0, torch.zeros(SHAPES[0]))
