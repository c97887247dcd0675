"""The networks are the ones that they are named after."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recipes.gpu.models import TINY_BERT, TINY_RESNET, Kind, Samples, batch_of, bert, loss_of, resnet


@pytest.mark.parametrize(("make", "expected"), [(resnet, 25_557_032), (bert, 109_514_298)])
def test_parameters(make: object, expected: int) -> None:
    """As many as torchvision's ResNet-50 and transformers' BertForMaskedLM of bert-base-uncased have."""
    with torch.device("meta"):
        network = make()  # type: ignore[operator]
    assert isinstance(network, nn.Module)
    assert sum(parameter.numel() for parameter in network.parameters()) == expected


@pytest.mark.parametrize("kind", [Kind(True, TINY_BERT, 16, 8), Kind(False, TINY_RESNET, 32, 4)])
def test_tiny_ones_learn_their_samples(kind: Kind) -> None:
    net, samples = kind.net(), kind.samples(2)
    assert len(samples) == 2 * kind.batch
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    losses = []
    for _ in range(20):
        inputs, labels = samples.__getitems__(range(kind.batch))
        loss = loss_of(net(inputs if kind.text else inputs / 127.5 - 1), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_samples_repeat_the_few_that_there_are() -> None:
    samples = Samples((torch.arange(3), torch.arange(3)), 10)
    assert samples.__getitems__([0, 4, 8])[0].tolist() == [0, 1, 2]


def test_batches_fit_the_memory() -> None:
    kind = Kind(False, {}, 224, 128)
    assert batch_of(kind, 80 * 2**30, 0.2) == 128
    assert batch_of(kind, 16 * 2**30, 0.2) == 32
    assert batch_of(kind, 2**30, 0.001) == 1
