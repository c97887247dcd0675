"""Models of Hugging Face transformers with options that hand values past the layers, in training mode."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.partition.architectures import build
from tests.partition.cutting import LossOf, Stepping, assert_equal_when_cut


def loss_of(model: Any, batch: dict[str, Any]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def with_recorded(name: str) -> LossOf:
    def loss_with_recorded(model: Any, batch: dict[str, Any]) -> Tensor:
        output = model(**batch, **{f"output_{name.removeprefix('decoder_')}": True})
        loss: Tensor = output.loss + sum(value.float().square().mean() for value in output[name])
        return loss

    return loss_with_recorded


CASES: dict[str, tuple[str, dict[str, Any], LossOf]] = {
    "bert_hidden_states": ("BertForMaskedLM", {}, with_recorded("hidden_states")),
    "llama_attentions": ("LlamaForCausalLM", {"attn_implementation": "eager"}, with_recorded("attentions")),
    "mixtral": ("MixtralForCausalLM", {"output_router_logits": True}, loss_of),
    "olmoe": ("OlmoeForCausalLM", {"output_router_logits": True}, loss_of),
    "t5_hidden_states": ("T5ForConditionalGeneration", {}, with_recorded("decoder_hidden_states")),
    "opt": ("OPTForCausalLM", {}, loss_of),
    "bart": ("BartForConditionalGeneration", {"decoder_layerdrop": 0.3}, loss_of),
    "whisper": ("WhisperForConditionalGeneration", {}, loss_of),
    "mpnet": ("MPNetForMaskedLM", {}, loss_of),
    "deberta": ("DebertaV2ForMaskedLM", {}, loss_of),
    "clip": ("CLIPModel", {}, loss_of),
    "vit_mae": ("ViTMAEForPreTraining", {}, loss_of),
    "hubert_weighted_layers": ("HubertForSequenceClassification", {"use_weighted_layer_sum": True}, loss_of),
    "detr": ("DetrForObjectDetection", {"auxiliary_loss": True}, loss_of),
}


@pytest.mark.parametrize("case", CASES)
def test_every_gradient_is_that_of_the_whole_model(case: str) -> None:
    name, options, step = CASES[case]
    model, batch = build(name, **options)
    assert_equal_when_cut(Stepping(model, step), [batch(1), batch(2)], 2 if case == "vit_mae" else 3)
