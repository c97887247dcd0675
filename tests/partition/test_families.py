"""A model cut at any place that the chain allows computes what the whole one does."""

from __future__ import annotations

import copy
from itertools import accumulate, pairwise

import pytest
import torch

from lightning_sdpipe.check import Made, compute
from lightning_sdpipe.partition.chain import find_chains, join_ends
from tests.partition.families import FAMILIES

BLOCKS = {
    "resnet": ["conv1 bn1 layer1.0", "layer1.1", "layer2.0", "layer2.1", "fc"],
    "vit": ["patch_embed", "blocks.0", "blocks.1", "norm head"],
    "nested": ["stages.0.0", "stages.0.1", "stages.1.0.0"],
    "plain": ["net.down", "net.norm", "net.up"],
    "bert": ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "cls"],
    "bert_with_pooler": ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "bert.pooler cls"],
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
    assert [" ".join(block) for block in join_ends(model, next(find_chains(model)))] == BLOCKS[family]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cut_gives_the_loss_and_the_gradients_of_the_whole(family: str, training: bool) -> None:
    torch.manual_seed(0)
    model, loss_of = FAMILIES[family]()
    model.train(training)
    blocks = join_ends(model, next(find_chains(model)))
    chain = [path for block in blocks for path in block]
    ends = [0, *accumulate(len(block) for block in blocks)]

    def make() -> Made:
        module = copy.deepcopy(model)
        return module, [lambda: loss_of(module)]

    whole = compute(make, chain, [range(len(chain))])
    for cuts in [[end] for end in ends[1:-1]] + [ends[1:-1]]:
        spans = [range(*span) for span in pairwise([0, *cuts, ends[-1]])]
        cut = compute(make, chain, spans)
        assert torch.equal(cut.outcomes[0], whole.outcomes[0])
        assert cut.gradients.keys() == whole.gradients.keys()
        for name, gradient in cut.gradients.items():
            torch.testing.assert_close(gradient, whole.gradients[name], rtol=1e-5, atol=1e-6, msg=name)
        for module, span in zip(cut.modules, spans, strict=True):
            for path in chain[span.start : span.stop]:
                own = dict(whole.modules[0].get_submodule(path).named_buffers())
                for name, buffer in module.get_submodule(path).named_buffers():
                    assert torch.equal(buffer, own[name]), f"{path}.{name}"
