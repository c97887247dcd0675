"""Models of Hugging Face transformers with options that hand values past the layers, in training mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from tests.partition.cutting import LossOf, Stepping, assert_equal_when_cut

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
}
SMALL_PAIR: dict[str, Any] = {
    "vocab_size": 50,
    "d_model": 16,
    **{f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")},
    **{f"{part}_ffn_dim": 24 for part in ("encoder", "decoder")},
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
IMAGES: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 8,
    **{name: SMALL[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")},
}


def loss_of(model: Any, batch: dict[str, Any]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def with_recorded(name: str) -> LossOf:
    def loss_with_recorded(model: Any, batch: dict[str, Any]) -> Tensor:
        output = model(**batch, **{f"output_{name.removeprefix('decoder_')}": True})
        loss: Tensor = output.loss + sum(value.float().square().mean() for value in output[name])
        return loss

    return loss_with_recorded


def ids(seed: int) -> Tensor:
    return torch.randint(3, 50, (3, 6), generator=torch.Generator().manual_seed(seed))


def words(seed: int) -> dict[str, Any]:
    return {"input_ids": ids(seed), "labels": ids(seed)}


def pixels(seed: int) -> Tensor:
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def pictures(seed: int) -> dict[str, Any]:
    return {"pixel_values": pixels(seed)}


def captions(seed: int) -> dict[str, Any]:
    return {"input_ids": ids(seed), "pixel_values": pixels(seed), "return_loss": True}


def sounds(seed: int) -> dict[str, Any]:
    return {"input_values": pixels(seed)[:, 0].flatten(1)[:, :80], "labels": torch.tensor([0, 1, 1])}


def spectra(seed: int) -> dict[str, Any]:
    return {"input_features": pixels(seed)[:, 0, :4], "labels": ids(seed)}


def scenes(seed: int) -> dict[str, Any]:
    return {
        "pixel_values": pixels(seed),
        "labels": [{"class_labels": torch.tensor([1]), "boxes": torch.rand(1, 4)}] * 3,
    }


def moe(config: Any, **options: Any) -> Any:
    return config(**SMALL, num_key_value_heads=1, output_router_logits=True, **options)


CASES: dict[str, tuple[Callable[[], Any], LossOf, Callable[[int], dict[str, Any]]]] = {
    "bert_hidden_states": (lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL)), with_recorded("hidden_states"), words),
    "llama_attentions": (
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, num_key_value_heads=1, attn_implementation="eager")),
        with_recorded("attentions"),
        words,
    ),
    "mixtral": (lambda: hf.MixtralForCausalLM(moe(hf.MixtralConfig, num_local_experts=3)), loss_of, words),
    "olmoe": (
        lambda: hf.OlmoeForCausalLM(moe(hf.OlmoeConfig, num_experts=3, num_experts_per_tok=2, pad_token_id=0)),
        loss_of,
        words,
    ),
    "t5_hidden_states": (
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
        ),
        with_recorded("decoder_hidden_states"),
        words,
    ),
    "opt": (lambda: hf.OPTForCausalLM(hf.OPTConfig(**SMALL, ffn_dim=24, word_embed_proj_dim=16)), loss_of, words),
    "bart": (
        lambda: hf.BartForConditionalGeneration(
            hf.BartConfig(**SMALL_PAIR, max_position_embeddings=32, forced_eos_token_id=None, decoder_layerdrop=0.3)
        ),
        loss_of,
        words,
    ),
    "whisper": (
        lambda: hf.WhisperForConditionalGeneration(
            hf.WhisperConfig(**SMALL_PAIR, max_source_positions=8, max_target_positions=20, num_mel_bins=4)
        ),
        loss_of,
        spectra,
    ),
    "mpnet": (lambda: hf.MPNetForMaskedLM(hf.MPNetConfig(**SMALL)), loss_of, words),
    "deberta": (
        lambda: hf.DebertaV2ForMaskedLM(
            hf.DebertaV2Config(**SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"])
        ),
        loss_of,
        words,
    ),
    "clip": (
        lambda: hf.CLIPModel(
            hf.CLIPConfig(text_config=SMALL | {"eos_token_id": 2}, vision_config=IMAGES, projection_dim=8)
        ),
        loss_of,
        captions,
    ),
    "vit_mae": (
        lambda: hf.ViTMAEForPreTraining(
            hf.ViTMAEConfig(
                **IMAGES,
                decoder_hidden_size=16,
                decoder_num_hidden_layers=2,
                decoder_num_attention_heads=2,
                decoder_intermediate_size=24,
            )
        ),
        loss_of,
        pictures,
    ),
    "wav2vec2_weighted_layers": (
        lambda: hf.Wav2Vec2ForSequenceClassification(
            hf.Wav2Vec2Config(
                **{name: value for name, value in SMALL.items() if name != "max_position_embeddings"},
                conv_dim=(8, 8),
                conv_kernel=(4, 4),
                conv_stride=(2, 2),
                num_feat_extract_layers=2,
                num_conv_pos_embeddings=4,
                num_conv_pos_embedding_groups=2,
                apply_spec_augment=False,
                layerdrop=0.0,
                use_weighted_layer_sum=True,
            )
        ),
        loss_of,
        sounds,
    ),
    "detr": (
        lambda: hf.DetrForObjectDetection(
            hf.DetrConfig(
                **{
                    name: value
                    for name, value in SMALL_PAIR.items()
                    if not name.endswith("token_id") and name != "vocab_size"
                },
                use_timm_backbone=False,
                backbone_config=hf.ResNetConfig(
                    embedding_size=4, hidden_sizes=[8, 8], depths=[1, 1], out_features=["stage2"]
                ),
                num_queries=4,
                num_labels=3,
                auxiliary_loss=True,
            )
        ),
        loss_of,
        scenes,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_gradient_is_that_of_the_whole_model(case: str) -> None:
    make, step, batch = CASES[case]
    torch.manual_seed(0)
    model = make()
    model.train()
    assert_equal_when_cut(Stepping(model, step), [batch(1), batch(2)], 2 if case == "vit_mae" else 3)
