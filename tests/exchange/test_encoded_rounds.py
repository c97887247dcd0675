"""Gradients averaged by encoded messages, in threads: what a round of full precision does, they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe.errors import NonFiniteError, WorkerFailedError
from lightning_sdpipe.exchange.background import Background
from lightning_sdpipe.exchange.collectives import SumInPlace
from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.encoded_rounds import EncodedPresentRounds, EncodedRounds, momentum_to_send
from lightning_sdpipe.exchange.payloads import EightBit, Full, Half, OneBit, Payload
from lightning_sdpipe.exchange.present_rounds import Round
from lightning_sdpipe.exchange.references import CommonReference
from lightning_sdpipe.optim import FrozenVariance
from lightning_sdpipe.policies import Group, Worker
from tests.exchange.test_group_mean import values
from tests.exchange.threads import Crew, together

N = 3
SHAPES = [(3,), (2, 200), (5,), (70,)]
CAP = 700  # bytes: three buckets


@pytest.fixture(scope="module")
def crews() -> tuple[Crew, Crew]:
    return Crew(N), Crew(N)


def gradient(rank: int, number: int, turn: int) -> Tensor:
    size = int(torch.tensor(SHAPES[number]).prod())
    return values(1000 * turn + 10 * rank + number, size).view(SHAPES[number])


def run(
    crews: tuple[Crew, Crew],
    payload: Payload,
    work: Callable[[int, EncodedRounds], object],
    scales: Sequence[float] = (1.0,) * N,
    dtype: torch.dtype = torch.float32,
) -> list[Any]:
    def start(rank: int) -> object:
        parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
        replicas, beside = crews[0].replicas(rank), crews[1].replicas(rank)
        mover = EncodedMean(beside, CommonReference(payload, beside.pipeline))
        return work(rank, EncodedRounds(parameters, replicas, mover, CAP, True, 20.0, lambda: scales[rank]))

    return together(N, start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("payload", [Full(), Half(), EightBit(block=64)], ids=repr)
def test_rounds_average_over_those_that_train_and_drop_what_nobody_used(
    crews: tuple[Crew, Crew], payload: Payload, dtype: torch.dtype
) -> None:
    def work(rank: int, rounds: EncodedRounds) -> list[object]:
        outcomes: list[object] = []
        for turn, trains in enumerate([True, rank != 1, True]):
            mine = [gradient(rank, number, turn).to(dtype) if number != 2 else None for number in range(4)]
            if turn == 0:
                for number, grad in enumerate(mine):
                    if grad is not None:
                        rounds.gradient_ready(number, grad)
            rounds.complete(mine if trains else [None] * 4, trains)
            outcomes.append(rounds.wait())
        return outcomes

    by_rank = run(crews, payload, work, dtype=dtype)
    for turn in range(3):
        there = [rank for rank in range(N) if turn != 1 or rank != 1]
        for rank in range(N):
            averaged = by_rank[rank][turn]
            assert averaged.members == len(there)
            assert averaged.gradients[2] is None, "nobody used it"
            for number in (0, 1, 3):
                mean = torch.stack([gradient(other, number, turn) for other in there]).mean(0)
                found, first = averaged.gradients[number], by_rank[0][turn].gradients[number]
                assert found.dtype == dtype
                assert torch.equal(found, first), "replicas would drift apart"
                torch.testing.assert_close(found.float(), mean, rtol=0.03, atol=0.05)


def test_who_is_not_finite_is_known_to_all(crews: tuple[Crew, Crew]) -> None:
    def work(rank: int, rounds: EncodedRounds) -> list[int]:
        mine: list[Tensor | None] = [gradient(rank, number, 0) for number in range(4)]
        if rank == 2:
            assert mine[1] is not None
            mine[1][0, 7] = float("inf")
        rounds.complete(mine)
        outcome = rounds.wait()
        assert outcome.gradients[1] is not None
        assert not outcome.gradients[1].isfinite().all(), "a loss scaler has to see it"
        return outcome.nonfinite

    assert run(crews, EightBit(), work) == [[2]] * N


def test_residuals_follow_the_loss_scale(crews: tuple[Crew, Crew]) -> None:
    """Gradients that are sent twice as large from the third round on: the sum of means is that of the gradients, in
    terms of one scale, but for what is left out."""
    scales = [1.0, 1.0, 8.0, 8.0, 0.5, 0.5] * 4

    def work(rank: int, rounds: EncodedRounds) -> Tensor:
        total = torch.zeros(SHAPES[1])
        for turn, factor in enumerate(scales):
            now[rank] = factor
            rounds.complete([factor * gradient(rank, number, 0) for number in range(4)])
            mean = rounds.wait().gradients[1]
            assert mean is not None
            total += mean / scales[turn]
        return total / len(scales)

    now = [1.0] * N
    mean = torch.stack([gradient(rank, 1, 0) for rank in range(N)]).mean(0)
    for average in run(crews, OneBit(block=64), work, now):
        assert (average - mean).norm() < 0.3 * mean.norm(), "feedback has sent nearly everything by now"


@pytest.mark.parametrize("payload", [OneBit(64, feedback=True, momentum=0.9, after=3)], ids=repr)
def test_one_bit_adam_takes_the_mean_momentum_for_its_own(crews: tuple[Crew, Crew], payload: Payload) -> None:
    """Until ``after`` it is Adam with mean gradients; then its first moment is the mean of what was sent."""

    def work(rank: int, rounds: EncodedRounds) -> list[Tensor]:
        own = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        optimizer = FrozenVariance(torch.optim.Adam(own, lr=0.1), after=3)
        for turn in range(6):
            rounds.complete([gradient(rank, number, turn) for number in range(4)])
            for parameter, mean in zip(own, rounds.wait().gradients, strict=True):
                parameter.grad = mean
            optimizer.step()
        numbers = rounds._layout
        for bucket, members in enumerate(numbers):
            momentum = torch.cat([optimizer.state[own[number]]["exp_avg"].view(-1) for number in members])
            torch.testing.assert_close(momentum, rounds._momenta[bucket], rtol=1e-4, atol=1e-6)
        return [parameter.detach() for parameter in own]

    by_rank = run(crews, payload, work)
    for other in by_rank[1:]:
        assert all(torch.equal(a, b) for a, b in zip(by_rank[0], other, strict=True))


def test_full_precision_of_the_momentum_is_the_mean_gradient(crews: tuple[Crew, Crew]) -> None:
    """With all bits of float64 the gradient that is handed on is the mean, to its last bits."""

    class Exact(Full):
        momentum = 0.9
        after = 1

    def work(rank: int, rounds: EncodedRounds) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for turn in range(4):
            rounds.complete([gradient(rank, number, turn).double() for number in range(4)])
            found += rounds.wait().gradients
        return found

    for found in run(crews, Exact(), work, dtype=torch.float64):
        for index, mean in enumerate(found):
            turn, number = divmod(index, 4)
            exact = torch.stack([gradient(rank, number, turn).double() for rank in range(N)]).mean(0)
            assert (mean - exact).abs().max() <= 1e-14


def test_gradients_of_sixteen_bits_make_a_momentum_of_thirty_two() -> None:
    sent = momentum_to_send(torch.zeros(3), torch.ones(3, dtype=torch.bfloat16), 0.9)
    torch.testing.assert_close(sent, torch.full((3,), 0.1))


def test_what_a_message_cannot_hold_is_said(crews: tuple[Crew, Crew]) -> None:
    def work(rank: int, rounds: EncodedRounds) -> None:
        rounds.complete([torch.full(shape, 3e5) for shape in SHAPES])
        with pytest.raises(NonFiniteError, match=r"beyond the range of Half\(dtype='float16'\)"):
            rounds.wait()

    run(crews, Half(), work)


def test_a_sum_beyond_float16_is_no_gradient_beyond_it(crews: tuple[Crew, Crew]) -> None:
    def work(rank: int, rounds: EncodedRounds) -> None:
        rounds.complete([torch.full(shape, 6e4, dtype=torch.float16) for shape in SHAPES])
        assert all(mean is not None and bool(mean.isfinite().all()) for mean in rounds.wait().gradients)

    run(crews, Half(), work, dtype=torch.float16)


def of_present(rank: int, payload: Payload) -> EncodedPresentRounds:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    thread = Background("averaging gradients", 20.0)
    return EncodedPresentRounds(parameters, Worker(0, rank), CAP, True, lambda: None, payload, thread, lambda: 1.0)


def members(*pipelines: int, sequence: int = 0, epoch: int = 1) -> Group:
    workers = tuple(Worker(0, i) for i in pipelines)
    return Group(workers, (1 / len(workers),) * len(workers), sequence, "tested", epoch=epoch)


def offer(
    rounds: EncodedPresentRounds,
    rank: int,
    gradients: Sequence[Tensor | None],
    group: Group,
    mover: SumInPlace,
    hosts: Mapping[int, str] | None = None,
) -> None:
    """Offers the gradients of ``rank``, which has no batch if there are none."""
    rounds.weight = float(any(each is not None for each in gradients))
    rounds.begin(group, mover, hosts)
    rounds.complete(gradients)


ON_TWO_HOSTS = {0: "a", 1: "b", 2: "a"}
ROUNDING = Half(), EightBit(block=64, feedback=True), OneBit(64)


@pytest.mark.parametrize(
    ("payload", "hosts"),
    [(Full(), ON_TWO_HOSTS), *((payload, hosts) for payload in ROUNDING for hosts in (None, ON_TWO_HOSTS))],
    ids=repr,
)
def test_those_present_have_equal_bits_and_over_time_everything_arrives(
    crews: tuple[Crew, Crew], payload: Payload, hosts: Mapping[int, str] | None
) -> None:
    """Also where one has no batch in every other round, and keeps what it has left out."""
    turns = 30

    def work(rank: int) -> list[list[Tensor | None]]:
        rounds, found = of_present(rank, payload), []
        for turn in range(turns):
            trains = rank != 1 or turn % 2 == 0
            mine = [gradient(rank, number, 0) if trains and number != 2 else None for number in range(4)]
            offer(rounds, rank, mine, members(0, 1, 2, sequence=turn), SumInPlace(crews[0].replicas(rank)), hosts)
            outcome = rounds.outcome()
            assert outcome.weight == 2 + (turn % 2 == 0)
            found.append([None if each is None else each.clone() for each in outcome.gradients])
        return found

    by_rank = together(N, work)
    for turn in range(turns):
        assert by_rank[0][turn][2] is None
        assert all(torch.equal(found[turn][n], by_rank[0][turn][n]) for found in by_rank for n in (0, 1, 3))
    for number in (1, 3):
        whole = torch.stack([gradient(rank, number, 0) for rank in range(N)]).mean(0)
        some = torch.stack([gradient(rank, number, 0) for rank in (0, 2)]).mean(0)
        sent, expected = torch.stack([of_turn[number] for of_turn in by_rank[0]]).mean(0), (whole + some) / 2
        assert (sent - expected).norm() < 0.3 * expected.norm()


class Breaks(SumInPlace):
    """Does not add up the flags, after all buckets have been averaged."""

    def start(self, *_: Any) -> Any:
        raise WorkerFailedError("pipeline 2 is gone")


def residuals(rounds: EncodedPresentRounds) -> list[Tensor]:
    return [feedback.residual for feedback in rounds.coding._residuals.values()]


def test_a_broken_round_is_made_again_of_gradients_alone_or_handed_over_bit_for_bit(crews: tuple[Crew, Crew]) -> None:
    payload = OneBit(64)

    def work(rank: int) -> tuple[list[Round], bool]:
        rounds, adds, found = of_present(rank, payload), SumInPlace(crews[0].replicas(rank)), []
        mine = [gradient(rank, number, 0) for number in range(4)]
        offer(rounds, rank, mine, members(0, 1, 2), adds)
        rounds.outcome()
        offer(rounds, rank, mine, members(0, 1, 2, sequence=1), Breaks(crews[0].replicas(rank)))
        with pytest.raises(WorkerFailedError, match="pipeline 2 is gone"):
            rounds.outcome()
        rounds.begin_again()
        forgotten = not residuals(rounds)
        if rank < 2:
            rounds.begin(members(0, 1, sequence=2, epoch=2), SumInPlace(crews[1].replicas(rank)))
            outcome = rounds.outcome()
            found.append(replace(outcome, gradients=[each.clone() for each in outcome.gradients if each is not None]))
        given = Group((Worker(0, 0), Worker(0, 2)), (1.0, 0.0), 3, "handed over", (Worker(0, 0),), epoch=3)
        if rank == 0:
            rounds.hand_over(given, crews[1].replicas(rank))
        if rank == 2:
            taken = rounds.take_over(members(0, 1, sequence=2, epoch=2), given, crews[1].replicas(rank))
            assert taken is not None
            found.append(taken)
        return found, forgotten

    def fresh(rank: int) -> Round:
        rounds = of_present(rank, payload)
        mine = [gradient(rank, number, 0) for number in range(4)]
        offer(rounds, rank, mine, members(0, 1), SumInPlace(crews[0].replicas(rank)))
        return rounds.outcome()

    by_rank = together(N, work)
    assert all(forgotten for _, forgotten in by_rank)
    expected = together(2, fresh)[0]
    for (outcome,), _ in by_rank:
        assert outcome.weight == 2
        assert all(torch.equal(a, b) for a, b in zip(outcome.gradients, expected.gradients, strict=True))


@pytest.mark.parametrize("others", [members(0, 1, sequence=1), members(0, 1, 2, sequence=1, epoch=2)])
def test_what_was_left_out_is_dropped_by_all_alike_when_others_take_part_or_in_another_epoch(
    crews: tuple[Crew, Crew], others: Group
) -> None:
    def work(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        rounds, adds = of_present(rank, EightBit(block=64, feedback=True)), SumInPlace(crews[0].replicas(rank))
        mine = [gradient(rank, number, 0) for number in range(4)]
        for sequence in range(3):
            offer(rounds, rank, mine, members(0, 1, 2, sequence=sequence), adds)
            rounds.outcome()
        if rank in [worker.pipeline for worker in others.members]:
            offer(rounds, rank, [torch.zeros_like(each) for each in mine], others, adds)
            return [each for each in rounds.outcome().gradients if each is not None], residuals(rounds)
        return [], []

    for means, left in together(N, work):
        assert not any(each.any() for each in (*means, *left)), "nothing of earlier rounds is sent"


def test_a_later_bucket_is_not_sent_when_an_earlier_one_has_failed(crews: tuple[Crew, Crew]) -> None:
    """The others would take it for the one that they wait for."""
    sent: list[int] = []

    class Fails(EncodedMean):
        def average(self, piece: Tensor, number: int, *_: Any) -> Tensor:
            sent.append(number)
            raise WorkerFailedError("pipeline 2 is gone")

    rounds = of_present(0, EightBit())
    rounds.weight = 1.0
    rounds.begin(members(0, 1, 2), SumInPlace(crews[0].replicas(0)))
    rounds._encoded = Fails(crews[0].replicas(0), rounds.coding)
    rounds.complete([gradient(0, number, 0) for number in range(4)])
    with pytest.raises(WorkerFailedError, match="pipeline 2 is gone"):
        rounds.outcome()
    rounds.begin_again()
    assert sent == [0]


def test_what_is_unfrozen_is_measured_in_full_precision_first(crews: tuple[Crew, Crew]) -> None:
    payload = OneBit(64, momentum=0.9, after=2)

    def work(rank: int) -> list[tuple[int, bool]]:
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        replicas, beside = crews[0].replicas(rank), crews[1].replicas(rank)
        trained = parameters[:2]
        mover = EncodedMean(beside, CommonReference(payload, beside.pipeline))
        rounds = EncodedRounds(trained, replicas, mover, CAP, True, 20.0, lambda: 1.0)
        found = []
        for turn in range(8):
            if turn in (3, 6):
                trained[:] = parameters if turn == 3 else parameters[1:]
                rounds.arrange()
            found.append((turn, rounds.updates < payload.after))
            rounds.complete([gradient(rank, number, turn) for number in range(4) if parameters[number] in set(trained)])
            rounds.wait()
        return found

    full = [turn for turn, is_full in together(N, work)[0] if is_full]
    assert full == [0, 1, 3, 4], "layers that freeze change nothing"
