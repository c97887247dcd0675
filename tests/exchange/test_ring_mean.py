from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_sdpipe.exchange.payloads import EightBit, ErrorFeedback, Payload
from lightning_sdpipe.exchange.ring_mean import NeighbourCopies, average, weight_of_each
from lightning_sdpipe.policies import pairing
from lightning_sdpipe.policies.sync_graph import mixing_radius


def matrix(size: int) -> list[list[float]]:
    weight = weight_of_each(size)
    rows = [[weight if other in pairing.ring(place, size) else 0.0 for other in range(size)] for place in range(size)]
    for place, row in enumerate(rows):
        row[place] = 1 - sum(row)
    return rows


@pytest.mark.parametrize(("size", "rho"), [(1, 0), (2, 0), (3, 0), (4, 1 / 3), (8, 0.8047), (16, 0.9493)])
def test_rings_mix_as_their_matrices_say(size: int, rho: float) -> None:
    assert mixing_radius(matrix(size)) == pytest.approx(rho, abs=5e-5)
    models = [torch.randn(7, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(size)]
    expected = torch.tensor(matrix(size), dtype=torch.float64) @ torch.stack(models)
    before = [x.clone() for x in models]
    for place, x in enumerate(models):
        average(x, [before[other] for other in pairing.ring(place, size)], weight_of_each(size))
    torch.testing.assert_close(torch.stack(models), expected)


class Ring:
    """Workers on quadratics of their own, whose mean is least at ``best``."""

    def __init__(self, size: int, payload: Payload, n: int = 40) -> None:
        generator = torch.Generator().manual_seed(1)
        self.best = 3 * torch.randn(n, generator=generator)
        own = torch.randn(size, n, generator=generator)
        self.wanted = self.best + 0.5 * (own - own.mean(0))
        self.models = [torch.zeros(n) for _ in range(size)]
        self.weight = weight_of_each(size)
        self.payload = payload
        self.replicas = [
            NeighbourCopies(
                self.models[place], {other: self.models[other] for other in pairing.ring(place, size)}, self.weight
            )
            for place in range(size)
        ]
        self.feedbacks = [ErrorFeedback(x) if payload.feedback else None for x in self.models]

    def step(self, lr: float = 0.1) -> None:
        for x, wanted in zip(self.models, self.wanted, strict=True):
            x -= lr * (x - wanted)

    def average(self, draw: int) -> None:
        messages = []
        for x, replicas, feedback in zip(self.models, self.replicas, self.feedbacks, strict=True):
            residual = feedback.residual if feedback else None
            messages.append(self.payload.message(replicas.difference(x), residual, draw))
        for place, (x, replicas) in enumerate(zip(self.models, self.replicas, strict=True)):
            replicas.commit(self.payload, messages[place], {key: messages[key] for key in replicas.neighbours})
            x.copy_(replicas.own)

    def distance(self) -> float:
        return float((torch.stack(self.models).mean(0) - self.best).norm())

    def assert_replicas_equal(self) -> None:
        for replicas in self.replicas:
            for key, copy in replicas.neighbours.items():
                assert torch.equal(copy, self.replicas[key].own)


@pytest.mark.parametrize(
    ("size", "payload"),
    [(2, EightBit(16)), (3, EightBit(16, "stochastic")), (6, EightBit(16)), (6, EightBit(16, feedback=True))],
)
def test_in_low_precision_replicas_stay_equal_and_training_converges(size: int, payload: Payload) -> None:
    ring = Ring(size, payload)
    for draw in range(80):
        ring.step()
        ring.average(draw)
    ring.assert_replicas_equal()
    assert ring.distance() < 1e-2


def test_with_feedback_the_mean_drifts_by_the_residual_only() -> None:
    ring = Ring(4, EightBit(16, feedback=True))
    for place, x in enumerate(ring.models):
        x.copy_(torch.randn(40, generator=torch.Generator().manual_seed(place)))
    before = torch.stack(ring.models).mean(0)
    for draw in range(50):
        ring.average(draw)
    residual = torch.stack([feedback.residual for feedback in ring.feedbacks if feedback]).mean(0)
    torch.testing.assert_close(torch.stack(ring.models).mean(0) + residual, before, rtol=0, atol=1e-5)


def test_sending_models_themselves_would_not_converge() -> None:
    ring, without = Ring(8, EightBit(40)), Ring(8, EightBit(40))
    for draw in range(80):
        ring.step()
        ring.average(draw)
        without.step()
        sent = []
        for x in without.models:
            values = torch.empty_like(x)
            without.payload.decode(without.payload.message(x), values)
            sent.append(values)
        for place, x in enumerate(without.models):
            x.copy_(sum((sent[other] for other in pairing.ring(place, 8)), sent[place]) / 3)
    spread = [float((torch.stack(r.models) - torch.stack(r.models).mean(0)).std()) for r in (ring, without)]
    assert without.distance() > 5 * ring.distance()
    assert spread[0] == pytest.approx(spread[1], rel=0.5)


def test_models_of_sixteen_bits_are_averaged_in_float32() -> None:
    x = torch.full((4,), 1.0, dtype=torch.bfloat16)
    average(x, [torch.full((4,), 1.0 + 2**-7, dtype=torch.bfloat16)] * 2, 1 / 3)
    assert torch.equal(x, torch.full((4,), 1.0 + 2**-7, dtype=torch.bfloat16))
    replicas = NeighbourCopies(x, {1: x}, 0.5)
    assert replicas.difference(x).dtype == torch.float32


def test_difference_is_the_formula_for_two() -> None:
    own, other, x = (torch.randn(5, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in range(3))
    z: Tensor = NeighbourCopies(own, {1: other}, weight_of_each(2)).difference(x)
    torch.testing.assert_close(z, x + other / 2 - 3 * own / 2)
    z = NeighbourCopies(own, {1: other, 2: x}, weight_of_each(5)).difference(x)
    torch.testing.assert_close(z, x + other / 3 + x / 3 - 5 * own / 3)
