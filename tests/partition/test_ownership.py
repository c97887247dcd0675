import weakref

import pytest
import torch
from torch import nn

from lightning_sdpipe.partition.ownership import assign_owners, keep_only
from lightning_sdpipe.partition.placeholder import SkippedCutError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.decoder = nn.Linear(3, 5)
        self.decoder.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(1))


CHAIN = ["embedding", "body.0", "body.1", "decoder"]
SPANS = [range(0, 2), range(2, 3), range(3, 4)]


def test_each_tensor_belongs_to_the_stages_that_use_it() -> None:
    owners = assign_owners(Tied(), CHAIN, SPANS)
    assert owners.stages["embedding.weight"] == owners.stages["decoder.weight"] == (0, 2)
    assert owners.stages["body.0.weight"] == (0,)
    assert owners.stages["body.1.running_mean"] == (1,)
    assert owners.stages["decoder.bias"] == (2,)
    assert owners.stages["scale"] == (0, 1, 2)


def test_shared_parameters_are_named_once() -> None:
    module = Tied()
    shared = assign_owners(module, CHAIN, SPANS).shared_parameters(module)
    assert shared == [((0, 1, 2), "scale"), ((0, 2), "embedding.weight")]


def test_buffers_that_are_transposed_or_expanded_can_be_averaged() -> None:
    module = Tied()
    for name, buffer in {"turned": torch.arange(6.0).view(2, 3).t(), "wide": torch.ones(1).expand(4)}.items():
        module.register_buffer(name, buffer)
        keep_only(module, assign_owners(module, CHAIN, SPANS), 2, torch.device("cpu"))
        assert torch.equal(module.get_buffer(name), buffer)
        assert module.get_buffer(name).is_contiguous()


def test_a_rank_keeps_its_own_and_ties_survive() -> None:
    module = Tied()
    weight = module.embedding.weight
    keep_only(module, assign_owners(module, CHAIN, SPANS), 2, torch.device("cpu"))
    assert module.decoder.weight is module.embedding.weight is weight
    meta = {name for name, t in module.state_dict(keep_vars=True).items() if t.is_meta}
    assert meta == {
        *("body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias"),
        *("body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"),
    }


def test_who_holds_a_weight_of_another_stage_has_what_is_in_its_place() -> None:
    """A list of parameters, a callback, or the user's program, which would else look at the values of long ago."""
    module = Tied()
    module.body[0].weight.no_decay = True
    held = dict([*module.named_parameters(), *module.named_buffers()])
    keep_only(module, assign_owners(module, CHAIN, SPANS), 2, torch.device("cpu"))
    assert all(module.state_dict(keep_vars=True)[name] is tensor for name, tensor in held.items())
    weight = held["body.0.weight"]
    assert weight.is_meta
    assert isinstance(weight, nn.Parameter)
    assert weight.no_decay, "by which configure_optimizers may sort it"
    with pytest.raises(SkippedCutError, match=r"Another stage holds 'body\.0\.weight'"):
        float(weight.norm())
    with pytest.raises(SkippedCutError, match=r"Another stage holds 'body\.1\.running_mean'"):
        float(held["body.1.running_mean"].norm())


def test_weights_that_cannot_change_what_they_are_are_replaced() -> None:
    module = Tied()
    weight = module.body[0].weight
    reference = weakref.ref(weight)
    keep_only(module, assign_owners(module, CHAIN, SPANS), 2, torch.device("cpu"))
    assert module.body[0].weight.is_meta
    assert reference() is weight
    assert not weight.is_meta
