"""Steps that change their batch in place, compute with sparse tensors, or take torch's fast path in evaluation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe.check import Made, compute
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.pipeline.micro_batches import split
from tests.partition.cutting import Stepping, assert_equal_when_cut, planned


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])


def in_place(model: nn.Module, batch: Any) -> Tensor:
    x, scale = batch
    x.mul_(0.5)
    scale.mul_(3)
    return (model(x) * x * scale).sum()


def graph(layout: Callable[[Tensor], Tensor], model: Any, batch: Any) -> Tensor:
    mix = layout(2 * torch.eye(len(batch)))
    hidden = mix @ batch
    for layer in model:
        hidden = mix @ layer(hidden)
    return hidden.square().sum()


@pytest.mark.parametrize("stages", [2, 3])
def test_a_step_may_change_its_batch_in_place(stages: int) -> None:
    batch = torch.randn(6, 4), torch.ones(())

    before = batch[0].clone()
    cut = planned(Stepping(chain(), in_place), [part.batch for part in split(batch, 3)], stages)
    assert torch.equal(batch[0], before), "each run of the rehearsal has a copy"

    def make() -> Made:
        own = Stepping(chain(), in_place)
        given = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.ones(())
        return own, [partial(own.training_step, part.batch) for part in split(given, 3)]

    one = compute(make, cut.chain, [range(len(cut.chain))])
    parts = compute(make, cut.chain, cut.module_spans, cut.travel["training_step"], cut.readers)
    torch.testing.assert_close(parts.outcomes, one.outcomes)
    torch.testing.assert_close(dict(parts.gradients), dict(one.gradients))


@pytest.mark.parametrize("layout", [Tensor.to_sparse_csr, Tensor.to_sparse, Tensor.to_sparse_csc])
def test_a_step_may_compute_with_sparse_tensors(layout: Any) -> None:
    batches = [torch.randn(3, 4), torch.randn(3, 4)]
    assert_equal_when_cut(Stepping(chain(), partial(graph, layout)), batches, 2)


class Mixing(nn.Linear):
    def forward(self, x: Tensor, mix: Tensor | None = None) -> Any:
        hidden = torch.tanh(super().forward(x))
        made = (torch.eye(len(x)) * hidden.mean()).to_sparse()
        return (hidden, made) if mix is None else torch.sparse.mm(mix, hidden)


def test_a_sparse_tensor_that_a_block_makes_for_a_later_stage_is_refused() -> None:
    def step(model: Any, batch: Tensor) -> Tensor:
        hidden, mix = model[0](batch)
        for layer in model[1:]:
            hidden = layer(hidden, mix)
        return hidden.sum()

    model = Stepping(nn.ModuleList(Mixing(4, 4) for _ in range(4)), step)
    with pytest.raises(
        ConfigurationError, match=r"block 'model.0' makes a value \(aten._to_sparse.*'model.2' needs it"
    ):
        planned(model, [torch.randn(3, 4), torch.randn(3, 4)], 2)


def test_an_encoder_that_is_evaluated_hands_on_plain_tensors() -> None:
    mask = torch.tensor([[False] * 4, [False, False, True, True]])

    def make() -> Made:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2).eval()
        x = torch.randn(2, 4, 4)

        def step() -> Tensor:
            return nn.functional.pad(encoder(x, src_key_padding_mask=mask), (0, 0, 0, 0)).masked_fill(
                mask[..., None], 0
            )

        return encoder, [step]

    with torch.no_grad():
        names = ["layers.0", "layers.1"]
        whole = compute(make, names, [range(2)])
        parts = compute(make, names, [range(1), range(1, 2)])
    torch.testing.assert_close(parts.outcomes, whole.outcomes)
    assert torch.backends.mha.get_fastpath_enabled()
