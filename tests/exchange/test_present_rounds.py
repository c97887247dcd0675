"""Means over the members that are there, by samples: alike on all, bit for bit, whatever broke on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.exchange import transfers
from lightning_sdpipe.exchange.collectives import SumInPlace
from lightning_sdpipe.exchange.moving import tag_of
from lightning_sdpipe.exchange.present_rounds import PresentRounds, Round
from lightning_sdpipe.policies import Group, Worker
from tests.exchange.threads import Crew, together

SHAPES = [(3,), (2, 2), (5,), (1,), (4,)]
SAMPLES = (3.0, 0.0, 2.0, 5.0)
N, CAP = 4, 24


def gradient(rank: int, number: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(SHAPES[number], generator=torch.Generator().manual_seed(10 * rank + number)).to(dtype)


def group(*pipelines: int, sequence: int = 0) -> Group:
    size = len(pipelines)
    return Group(tuple(Worker(0, i) for i in pipelines), (1 / size,) * size, sequence, "tested")


def given(source: int, *others: int) -> Group:
    """In which ``source`` hands the outcome of a round over."""
    members = tuple(Worker(0, i) for i in sorted((source, *others)))
    weights = tuple(float(worker.pipeline == source) for worker in members)
    return Group(members, weights, 9, "handed over", (Worker(0, source),))


def rounds(rank: int, dtype: torch.dtype = torch.float64, look: Callable[[], None] = lambda: None) -> PresentRounds:
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    made = PresentRounds(parameters, Worker(0, rank), CAP, True, look)
    made.weight, made.mark, made.batch = SAMPLES[rank], 7, (rank, rank + 1) if SAMPLES[rank] else None
    return made


def of(rank: int, dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
    """What ``rank`` has computed: nothing without a batch, and never anything for parameter 3."""
    return [gradient(rank, n, dtype) if n != 3 and SAMPLES[rank] else None for n in range(5)]


def expected(*members: int) -> list[Tensor | None]:
    """What one process computes on the batches of these."""
    total = sum(SAMPLES[rank] for rank in members)
    sums = [sum((SAMPLES[rank] * gradient(rank, n) for rank in members), torch.zeros(())) for n in range(5)]
    return [None if n == 3 else each / total for n, each in enumerate(sums)]


def check(found: list[Round], *members: int) -> None:
    for number, mean in enumerate(expected(*members)):
        values = [outcome.gradients[number] for outcome in found]
        if mean is None:
            assert values == [None] * len(found)
            continue
        assert all(torch.equal(value, values[0]) for value in values)  # type: ignore[arg-type]
        torch.testing.assert_close(values[0], mean)
    for outcome in found:
        assert outcome.members == members
        assert outcome.weight == sum(SAMPLES[rank] for rank in members)
        assert outcome.batches == tuple((rank, rank + 1) for rank in members if SAMPLES[rank])
        assert outcome.marks == dict.fromkeys(members, 7)
        assert outcome.nonfinite == ()


def test_members_that_have_batches_count_by_their_samples_and_others_give_zeros(crew: Crew) -> None:
    def work(rank: int) -> Round:
        made = rounds(rank)
        if rank != 2:  # whose members are known when its backward is over
            made.begin(group(0, 1, 2, 3), SumInPlace(crew.replicas(rank)))
        gradients = of(rank)
        if gradients[0] is not None:
            made.gradient_ready(0, gradients[0])
        made.complete(gradients)
        if rank == 2:
            made.begin(group(0, 1, 2, 3), SumInPlace(crew.replicas(rank)))
        return made.outcome()

    check(together(4, work), 0, 1, 2, 3)


def test_a_bucket_goes_out_as_soon_as_the_members_are_known() -> None:
    asked = 0

    def look() -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            made.begin(group(0), None)

    made = rounds(0, look=look)
    for n, under_way in enumerate([0, 2]):
        made.gradient_ready(n, gradient(0, n))
        assert sum(bucket.work is not None for bucket in made._buckets) == under_way
    made.complete(of(0))
    check([made.outcome()], 0)


def test_a_round_in_which_none_has_a_batch_has_no_gradients() -> None:
    made = rounds(1)
    made.complete(of(1))
    made.begin(group(1), None)
    outcome = made.outcome()
    assert (outcome.weight, outcome.gradients, outcome.batches) == (0.0, [None] * 5, ())


def test_a_broken_round_is_tried_again_with_the_same_gradients_among_others(crew: Crew) -> None:
    class Breaks(SumInPlace):
        def start(self, *_: Any) -> Any:
            raise WorkerFailedError("pipeline 3 is gone")

    def work(rank: int) -> Round | None:
        made = rounds(rank)
        made.begin(group(0, 1, 2, 3), Breaks(crew.replicas(rank)))
        made.complete(of(rank))
        with pytest.raises(WorkerFailedError):
            made.outcome()
        if rank == 3:
            return None
        made.begin_again()
        made.begin(group(0, 1, 2, sequence=1), SumInPlace(crew.replicas(rank)))
        return made.outcome()

    *found, _ = together(4, work)
    check(found, 0, 1, 2)


def test_a_mean_is_handed_over_bit_for_bit_though_the_optimizer_has_had_it(crew: Crew) -> None:
    everybody = group(0, 1, 2, 3)
    some = given(0, 1, 3)

    def work(rank: int) -> tuple[Round, Round | None]:
        made, mover = rounds(rank), SumInPlace(crew.replicas(rank))
        made.begin(everybody, mover)
        made.complete(of(rank))
        outcome = made.outcome()
        copies = [None if each is None else each.clone() for each in outcome.gradients]
        taken = None
        if rank == 0:
            torch._foreach_mul_([each for each in outcome.gradients if each is not None], 0.5)  # as clipping does
            made.hand_over(some, crew.replicas(rank))
        elif rank != 2:
            again = rounds(rank)
            again.complete(of(rank))
            again.begin_again()
            taken = again.take_over(everybody, some, crew.replicas(rank))
            assert again._kept is not None, "it could hand it over, too"
        return Round(copies, *[getattr(outcome, name) for name in Round.__annotations__ if name != "gradients"]), taken

    found = together(4, work)
    check([outcome for outcome, _ in found] + [taken for _, taken in found if taken is not None], 0, 1, 2, 3)


def test_another_round_than_the_one_that_is_lacking_is_not_taken_over(crew: Crew) -> None:
    """Nor can one be by a newcomer, which has the model after it and not its outcome."""

    def work(rank: int) -> None:
        made, replicas = rounds(rank), crew.replicas(rank)
        if rank == 0:
            made.hand_over(given(0, 1), replicas)
            transfers.begin({1: torch.tensor([4])}, {}, replicas, tag_of(given(0, 1))).wait()
        else:
            for _ in range(2):
                assert made.take_over(group(0, 1), given(0, 1), replicas) is None

    together(2, work)


def test_what_is_not_finite_is_named_and_half_precision_does_not_overflow_with_many_samples(crew: Crew) -> None:
    def work(rank: int) -> Round:
        made = rounds(rank, torch.float16)
        made.weight = 3000.0
        made.begin(group(0, 1), SumInPlace(crew.replicas(rank)))
        made.complete([torch.full(SHAPES[n], torch.inf if (n, rank) == (0, 1) else 30.0).half() for n in range(5)])
        return made.outcome()

    for outcome in together(2, work):
        assert outcome.nonfinite == (1,)
        assert outcome.gradients[2] is not None
        assert outcome.gradients[2].tolist() == [30.0] * 5
