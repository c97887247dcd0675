"""A model cut at any place that the chain allows computes what the whole one does."""

from __future__ import annotations

import copy
from itertools import accumulate

import pytest
import torch

from lightning_sdpipe.partition.chain import find_blocks
from tests.partition.families import FAMILIES
from tests.partition.pieces import backward_in_two

BLOCKS = {
    "resnet": ["conv1 bn1 layer1.0", "layer1.1", "layer2.0", "layer2.1", "fc"],
    "vit": ["patch_embed", "blocks.0", "blocks.1", "norm head"],
    "nested": ["stages.0.0", "stages.0.1", "stages.1.0.0"],
    "bert": ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "cls"],
    "bert_with_pooler": [
        "bert.embeddings",
        "bert.encoder.layer.0",
        "bert.encoder.layer.1",
        "bert.pooler cls",
    ],
    "gpt2": [
        *("transformer.wte transformer.wpe transformer.h.0", "transformer.h.1", "transformer.h.2"),
        "transformer.ln_f lm_head",
    ],
    "llama": ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm lm_head"],
    "hf_vit": ["vit.embeddings", "vit.layers.0", "vit.layers.1", "vit.layernorm classifier"],
    "hf_resnet": [
        "resnet.embedder",
        *(f"resnet.encoder.stages.{stage}.layers.{layer}" for stage in range(2) for layer in range(2)),
        *("classifier.0", "classifier.1"),
    ],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_chain_is_found(family: str) -> None:
    model, _ = FAMILIES[family]()
    assert [" ".join(block) for block in find_blocks(model)] == BLOCKS[family]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cut_gives_the_loss_and_the_gradients_of_the_whole(family: str, training: bool) -> None:
    torch.manual_seed(0)
    model, loss_of = FAMILIES[family]()
    model.train(training)
    blocks = find_blocks(model)
    chain = [path for block in blocks for path in block]
    initial = copy.deepcopy(model.state_dict())
    torch.manual_seed(1)
    expected = loss_of(model)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    for at in list(accumulate(len(block) for block in blocks))[:-1]:
        model.load_state_dict(initial)
        model.zero_grad()
        torch.manual_seed(1)  # dropout
        assert torch.equal(backward_in_two(model, chain, at, lambda: loss_of(model)), expected)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-6, msg=name)
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, buffers[name]), name
