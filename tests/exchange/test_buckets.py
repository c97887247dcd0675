import pytest
import torch
from torch import nn

from lightning_sdpipe.exchange.buckets import flatten, tensors_of


def test_parameters_become_views_of_one_buffer_per_dtype() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1).double())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    single, double = flatten(model.parameters())
    assert (single.buffer.numel(), double.buffer.numel()) == (9, 4)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    single.buffer.zero_()
    assert not any(p.any() for p in model[0].parameters())
    single.check()


def test_a_parameter_that_moved_away_is_noticed() -> None:
    model = nn.Linear(2, 3)
    (bucket,) = flatten(model.parameters())
    model.weight.data = model.weight.data.clone()
    with pytest.raises(RuntimeError, match=r"shape \(3, 2\) was given other memory"):
        tensors_of([bucket], beside=True)


def test_a_parameter_that_moved_away_is_taken_back_with_its_values() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to(torch.complex64)
    (bucket,) = flatten(model.parameters())
    model[0].weight.data = torch.full((2, 3), 2.0 + 1.0j).t()
    (buffer,) = tensors_of([bucket])
    bucket.check()
    assert (model[0].weight == 2 + 1j).all()
    buffer.zero_()
    assert not any(p.any() for p in model.parameters())
    model[0].weight.data = torch.zeros(7)
    with pytest.raises(RuntimeError, match=r"shape \(7,\) was given other memory"):
        tensors_of([bucket])


def test_frozen_parameters_are_kept_apart_until_they_are_flattened_again() -> None:
    model = nn.Sequential(nn.Linear(2, 3).requires_grad_(False), nn.Linear(3, 1))
    frozen, trained = flatten(model.parameters())
    assert (frozen.trains, trained.trains) == (False, True)
    assert (frozen.buffer.numel(), trained.buffer.numel()) == (9, 4)
    model[0].bias.requires_grad_()
    assert not frozen.trains
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    frozen, trained = flatten(model.parameters())
    assert (frozen.buffer.numel(), trained.buffer.numel()) == (6, 7)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
