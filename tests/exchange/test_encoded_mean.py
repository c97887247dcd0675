"""Means over groups by encoded messages: exact where they must be, and never torn, in threads over gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.codec import Codec, Members, owned
from lightning_sdpipe.exchange.encoded_mean import EncodedMean, _by_host
from lightning_sdpipe.exchange.moving import finish
from lightning_sdpipe.exchange.outer_model import OuterModel
from lightning_sdpipe.exchange.payloads import EightBit, Full, Half, OneBit, Payload
from lightning_sdpipe.exchange.references import CommonReference, OwnReference
from tests.exchange.test_group_mean import group, values
from tests.exchange.threads import Crew, together

pytestmark = pytest.mark.usefixtures("short_pieces")
N, PIECE, HALVED = 4, 300, 150
SIZES = (1, 400)
ROUNDS = 4
HOSTS = ("a", "a", "b", "b")
UNEVEN = ("a", "b", "a", "a")


def models(rank: int, dtype: torch.dtype = torch.float32, apart: float = 1.0) -> list[Tensor]:
    """Of one worker: something common, and something of its own."""
    return [(10 * values(99, n) + apart * values(rank, n)).to(dtype) for n in SIZES]


def exchanged(
    crew: Crew,
    make: Callable[[int], Codec],
    model: Callable[[int], list[Tensor]],
    hosts: Sequence[str] | None = None,
    members: Sequence[int] = range(N),
    weights: Sequence[float] | None = None,
    rounds: int = 1,
    between: Callable[[int, list[Tensor]], None] = lambda rank, tensors: None,
) -> list[list[Tensor]]:
    def work(rank: int) -> list[Tensor]:
        tensors, coding = model(rank), make(rank)
        if isinstance(coding, OuterModel):
            coding.begin(tensors)
        mover = EncodedMean(crew.replicas(rank), coding, hosts)
        for number in range(rounds):
            between(rank, tensors)
            if rank in members:
                finish(mover.start(tensors, group(members, weights or [1 / len(members)] * len(members), number)))
        return tensors

    return together(N, work)


def means(model: Callable[[int], list[Tensor]], members: Sequence[int], weights: Sequence[float]) -> list[Tensor]:
    return [
        sum(w * model(m)[index].double() for w, m in zip(weights, members, strict=True))  # type: ignore[misc]
        for index in range(len(SIZES))
    ]


@pytest.mark.parametrize(
    ("hosts", "dtype"),
    [(None, torch.float32), (UNEVEN, torch.float32), (HOSTS, torch.bfloat16), (None, torch.float64)],
    ids=str,
)
@pytest.mark.parametrize("payload", [Full(), Half(), EightBit(block=64)], ids=repr)
def test_a_group_that_changes_keeps_its_mean(
    crew: Crew, hosts: Sequence[str] | None, payload: Payload, dtype: torch.dtype
) -> None:
    """Whatever the payload: the error of the mean is that of full precision, and models come close."""
    for members in (range(N), (0, 2, 3), (2,)):
        got = exchanged(
            crew, lambda _: OwnReference(payload), lambda rank: models(rank, dtype), hosts, members, None, 2
        )
        before = means(lambda rank: models(rank, dtype), members, [1 / len(members)] * len(members))
        rounding = 4 * torch.finfo(dtype).eps * 40
        for index, mean in enumerate(before):
            after = sum(got[m][index].double() for m in members) / len(members)
            assert (after - mean).abs().max() <= rounding, (members, index)
            for m in members:
                error = 1.0 if dtype == torch.bfloat16 else 0.1  # the owner has four times the last bits
                assert (got[m][index].double() - mean).abs().max() <= error
        for other in set(range(N)) - set(members):
            assert all(torch.equal(a, b) for a, b in zip(got[other], models(other, dtype), strict=True))


class Counting(OwnReference):
    """Counts the parts that a worker owned and asked for in full precision."""

    parts_in_full = 0

    def reduce_part(self, *arguments: Any) -> tuple[Tensor, Tensor] | None:
        combined = super().reduce_part(*arguments)
        self.parts_in_full += combined is None
        return combined


def test_eight_bits_follow_models_that_come_closer_and_ask_for_full_precision_where_they_jump(crew: Crew) -> None:
    codings = [Counting(EightBit(block=64)) for _ in range(N)]

    def train(rank: int, tensors: list[Tensor]) -> None:
        for index, tensor in enumerate(tensors):
            step[rank][0] += 1 if index == 0 else 0
            jump = 300.0 if step[rank][0] == 5 and rank == 1 else 0.01
            update = jump * values(1000 + 10 * step[rank][0] + rank, tensor.numel())
            tensor.add_(update)
            updates[rank][index] += update.double()

    step = [[0] for _ in range(N)]
    updates = [[torch.zeros(n, dtype=torch.float64) for n in SIZES] for _ in range(N)]
    got = exchanged(crew, lambda rank: codings[rank], models, None, rounds=8, between=train)
    assert sum(coding.parts_in_full for coding in codings) >= 2, "the first exchange, and the jump"
    assert sum(coding.parts_in_full for coding in codings) < 8 * 3 * N, "not always"
    for index in range(len(SIZES)):
        total = torch.stack([models(r)[index].double() + updates[r][index] for r in range(N)]).mean(0)
        after = torch.stack([got[r][index].double() for r in range(N)]).mean(0)
        torch.testing.assert_close(after, total, rtol=1e-6, atol=2e-4)


PAYLOADS = [
    Half(),
    Half("bfloat16"),
    EightBit(),
    EightBit(64, "stochastic"),
    EightBit(64, feedback=True),
    OneBit(64),
]


@pytest.mark.parametrize(
    ("payload", "hosts"),
    [(payload, hosts) for payload in PAYLOADS for hosts in (None, UNEVEN if payload.feedback else HOSTS)],
    ids=str,
)
def test_what_is_common_stays_common_to_the_bit_and_nothing_is_lost(
    crew: Crew, payload: Payload, hosts: Sequence[str] | None
) -> None:
    """The sum of all means and of what is left out is that of the gradients, with feedback; else it is close."""
    codings = [CommonReference(payload, rank) for rank in range(N)]
    sums = [[torch.zeros(n, dtype=torch.float64) for n in SIZES] for _ in range(N)]

    def gradients(rank: int, tensors: list[Tensor]) -> None:
        for index, tensor in enumerate(tensors):
            if round_of[rank]:
                sums[rank][index] += tensor.double()
            tensor.copy_(values(100 + rank, tensor.numel()))
        round_of[rank] += 1

    round_of = [0] * N
    got = exchanged(crew, lambda rank: codings[rank], models, hosts, rounds=ROUNDS, between=gradients)
    for index, n in enumerate(SIZES):
        for rank in range(N):
            sums[rank][index] += got[rank][index].double()
            assert torch.equal(got[rank][index], got[0][index]), "replicas differ"
        exact = ROUNDS * sum(values(100 + rank, n).double() for rank in range(N)) / N
        left = exact - sums[0][index]
        if not payload.feedback:
            assert left.abs().max() <= ROUNDS * 0.1
            continue
        groups = len(set(hosts)) if hosts else N
        pieces = -(-n // PIECE)
        first = sum(-(-size // PIECE) for size in SIZES[:index])
        kept = torch.zeros(n, dtype=torch.float64)
        for piece in range(pieces if groups > 1 else 0):
            span = slice(piece * PIECE, min(n, (piece + 1) * PIECE))
            kept[span] += _left_out(codings, first + piece, span.stop - span.start, hosts)
        torch.testing.assert_close(left, kept, rtol=1e-4, atol=2e-5)


def _left_out(codings: Sequence[CommonReference], piece: int, n: int, hosts: Sequence[str] | None) -> Tensor:
    """What belongs into a mean but was not sent: of the parts of others by its weight, of one's own as it is."""
    kept = torch.zeros(n, dtype=torch.float64)
    machines = _by_host(range(N), hosts or tuple("abcd"))
    for number, span in owned(n, range(max(map(len, machines))), 1).items():
        owners = sorted(members[number % len(members)] for members in machines)
        share = {members[number % len(members)]: len(members) / N for members in machines}
        length, unit = span.stop - span.start, 2 * len(owners)
        half = -(-length // unit) * unit // 2 if length >= HALVED else length
        for first, size in ((span.start, half), (span.start + half, length - half)):
            for owner, part in owned(size, owners, 1).items():
                here = slice(first + part.start, first + part.stop)
                for member in owners:
                    residual = codings[member]._residuals[piece].residual[here].double()
                    kept[here] += residual * (1.0 if member == owner else share[member])
    return kept


@pytest.mark.parametrize(
    ("payload", "hosts"),
    [*((payload, None) for payload in PAYLOADS), (PAYLOADS[0], HOSTS), (PAYLOADS[3], HOSTS), (PAYLOADS[-1], HOSTS)],
    ids=str,
)
def test_models_with_a_common_past_stay_equal_to_the_bit(
    crew: Crew, payload: Payload, hosts: Sequence[str] | None
) -> None:
    def train(rank: int, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            tensor.add_(values(rank, tensor.numel()), alpha=0.1)

    got = exchanged(
        crew, lambda rank: OuterModel(payload, rank), lambda rank: models(0), hosts, rounds=3, between=train
    )
    for index, n in enumerate(SIZES):
        assert all(torch.equal(got[rank][index], got[0][index]) for rank in range(N))
        exact = models(0)[index].double() + 3 * 0.1 * sum(values(rank, n).double() for rank in range(N)) / N
        distance, moved = (got[0][index] - exact).norm(), 0.3 * n**0.5
        assert distance <= (0.02 if isinstance(payload, Half | EightBit) else 1.0) * moved


def test_pieces_may_get_another_length(crew: Crew) -> None:
    """As when layers are unfrozen."""

    def work(rank: int) -> list[Tensor]:
        mover, found = EncodedMean(crew.replicas(rank), OwnReference(EightBit(block=64))), []
        for number, size in enumerate([100, 100, 290, 290, 30]):
            tensor = values(rank, size)
            finish(mover.start([tensor], group(range(N), [1 / N] * N, number)))
            found.append(tensor)
        return found

    by_rank = together(N, work)
    for index, size in enumerate([100, 100, 290, 290, 30]):
        mean = torch.stack([values(rank, size) for rank in range(N)]).mean(0)
        for found in by_rank:
            torch.testing.assert_close(found[index], mean, rtol=0, atol=0.2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("payload", [Half(), EightBit(block=64)], ids=repr)
def test_what_is_not_finite_stays_where_it_is(crew: Crew, payload: Payload, bad: float) -> None:
    """A part with such a number is exchanged in full precision: the others of its block are what they would be."""

    def broken(rank: int) -> list[Tensor]:
        tensors = models(rank)
        if rank == 2:
            tensors[-1][17] = bad
        return tensors

    got = exchanged(crew, lambda _: OwnReference(payload), broken, rounds=2)
    sound = torch.arange(SIZES[-1]) != 17
    mean = means(models, range(N), [1 / N] * N)[-1]
    for tensors in got:
        assert not tensors[-1][17].isfinite()
        torch.testing.assert_close(tensors[-1][sound].double(), mean[sound], rtol=1e-3, atol=0.1)


def test_values_beyond_sixteen_bits_go_in_full_precision(crew: Crew) -> None:
    def large(rank: int) -> list[Tensor]:
        return [torch.full((n,), 1e6 * (rank + 1)) for n in SIZES]

    for tensors in exchanged(crew, lambda _: OwnReference(Half()), large):
        assert all(torch.allclose(tensor, torch.full_like(tensor, 2.5e6)) for tensor in tensors)


def test_what_has_no_common_reference_is_refused() -> None:
    for payload in (OneBit(), EightBit(feedback=True)):
        with pytest.raises(ConfigurationError, match="needs a common reference"):
            OwnReference(payload)


def test_integers_are_refused(crew: Crew) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot carry torch\.int64"):
        EncodedMean(crew.replicas(0), OwnReference(EightBit())).average(torch.arange(4), 0, Members((0,), (1.0,)), 0)
