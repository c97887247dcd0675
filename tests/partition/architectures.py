"""Sixty-odd model classes of Hugging Face transformers at small sizes, with what to train them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

VOCABULARY, WIDTH, WIDE, LAYERS, HEADS, LENGTH, PIXELS = 320, 64, 128, 4, 4, 24, 32
BATCH = 4

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": WIDE,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
DECODER = TEXT | {"num_key_value_heads": 2, "head_dim": WIDTH // HEADS}
GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
PAIR: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": WIDE,
    "decoder_ffn_dim": WIDE,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": WIDTH // HEADS,
    "d_ff": WIDE,
    "num_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "num_heads": HEADS,
    "decoder_start_token_id": 0,
}
IMAGES: dict[str, Any] = {
    "image_size": PIXELS,
    "patch_size": 8,
    "num_channels": 3,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": WIDE,
}
SOUND: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": WIDE,
    "conv_dim": (32, 32, 32),
    "conv_kernel": (8, 4, 4),
    "conv_stride": (4, 2, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
}
STAGES: dict[str, Any] = {"depths": [2, 2, 2, 2], "hidden_sizes": [16, 32, 48, 64], "num_channels": 3}


def ids(seed: int, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(3, vocabulary, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(seed))


def words(seed: int) -> dict[str, Any]:
    return {"input_ids": ids(seed), "labels": ids(seed + 1)}


def pixels(seed: int) -> Tensor:
    return numbers(seed, 3, PIXELS, PIXELS)


def pictures(seed: int) -> dict[str, Any]:
    return {"pixel_values": pixels(seed), "labels": torch.tensor([0, 1, 1, 0])}


def masked_pictures(seed: int) -> dict[str, Any]:
    return {"pixel_values": pixels(seed)}


def scenes(seed: int) -> dict[str, Any]:
    return {
        "pixel_values": pixels(seed),
        "labels": [{"class_labels": torch.tensor([1]), "boxes": torch.full((1, 4), 0.4)}] * BATCH,
    }


def segments(seed: int) -> dict[str, Any]:
    return {"pixel_values": pixels(seed), "labels": ids(seed)[:, :1, None].expand(BATCH, PIXELS, PIXELS) % 2}


def captions(seed: int) -> dict[str, Any]:
    return {"input_ids": ids(seed), "pixel_values": pixels(seed), "return_loss": True}


def sounds(seed: int) -> dict[str, Any]:
    return {"input_values": numbers(seed, 1600), "labels": torch.tensor([0, 1, 1, 0])}


def transcripts(seed: int) -> dict[str, Any]:
    return {"input_values": numbers(seed, 1600), "labels": ids(seed, 32)[:, :8]}


def spectra(seed: int) -> dict[str, Any]:
    return {"input_features": numbers(seed, 8, 64), "labels": ids(seed)}


def spectrogram(seed: int) -> dict[str, Any]:
    return {"input_values": numbers(seed, 64, 32), "labels": torch.tensor([0, 1, 1, 0])}


def series(seed: int) -> dict[str, Any]:
    return {"past_values": numbers(seed, 64, 3), "future_values": numbers(seed + 1, 8, 3)}


def clip(prefix: str = "", **text: Any) -> dict[str, Any]:
    return {"text_config": TEXT | text, "vision_config": IMAGES, "projection_dim": 32}


Batch = Callable[[int], dict[str, Any]]

SAMPLE: dict[str, tuple[str, dict[str, Any], Batch]] = {
    # class of the model: class of its configuration, options, batch
    # encoders of text
    "BertForMaskedLM": ("BertConfig", TEXT, words),
    "RobertaForMaskedLM": ("RobertaConfig", TEXT, words),
    "DistilBertForMaskedLM": (
        "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": WIDE},
        words,
    ),
    "AlbertForMaskedLM": ("AlbertConfig", TEXT | {"embedding_size": 32}, words),
    "ElectraForMaskedLM": ("ElectraConfig", TEXT | {"embedding_size": 32}, words),
    "MPNetForMaskedLM": ("MPNetConfig", TEXT, words),
    "DebertaForMaskedLM": ("DebertaConfig", TEXT, words),
    "DebertaV2ForMaskedLM": (
        "DebertaV2Config",
        TEXT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        words,
    ),
    "ModernBertForMaskedLM": ("ModernBertConfig", TEXT, words),
    "ConvBertForMaskedLM": ("ConvBertConfig", TEXT | {"embedding_size": WIDTH, "head_ratio": 2}, words),
    "FNetForMaskedLM": ("FNetConfig", TEXT, words),
    "MobileBertForMaskedLM": (
        "MobileBertConfig",
        TEXT | {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
        words,
    ),
    "RoFormerForMaskedLM": ("RoFormerConfig", TEXT | {"embedding_size": WIDTH}, words),
    "SqueezeBertForMaskedLM": ("SqueezeBertConfig", TEXT | {"embedding_size": WIDTH}, words),
    # decoders of text
    "GPT2LMHeadModel": ("GPT2Config", GPT, words),
    "GPTNeoForCausalLM": (
        "GPTNeoConfig",
        TEXT | {"num_layers": LAYERS, "num_heads": HEADS, "attention_types": [[["global", "local"], 2]]},
        words,
    ),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", TEXT, words),
    "GPTJForCausalLM": ("GPTJConfig", GPT | {"rotary_dim": 8}, words),
    "BloomForCausalLM": ("BloomConfig", GPT | {"hidden_size": WIDTH}, words),
    "OPTForCausalLM": ("OPTConfig", TEXT | {"ffn_dim": WIDE, "word_embed_proj_dim": WIDTH}, words),
    "FalconForCausalLM": ("FalconConfig", TEXT, words),
    "LlamaForCausalLM": ("LlamaConfig", DECODER, words),
    "MistralForCausalLM": ("MistralConfig", DECODER, words),
    "Qwen2ForCausalLM": ("Qwen2Config", DECODER, words),
    "Gemma2ForCausalLM": ("Gemma2Config", DECODER, words),
    "Phi3ForCausalLM": ("Phi3Config", DECODER, words),
    "MixtralForCausalLM": ("MixtralConfig", DECODER | {"num_local_experts": 4}, words),
    "OlmoeForCausalLM": ("OlmoeConfig", DECODER | {"num_experts": 4, "num_experts_per_tok": 2}, words),
    "MambaForCausalLM": ("MambaConfig", TEXT | {"state_size": 8}, words),
    "XGLMForCausalLM": (
        "XGLMConfig",
        TEXT | {"d_model": WIDTH, "num_layers": LAYERS, "attention_heads": HEADS, "ffn_dim": WIDE},
        words,
    ),
    # encoders with decoders
    "T5ForConditionalGeneration": ("T5Config", T5, words),
    "MT5ForConditionalGeneration": ("MT5Config", T5, words),
    "LongT5ForConditionalGeneration": ("LongT5Config", T5, words),
    "SwitchTransformersForConditionalGeneration": (
        "SwitchTransformersConfig",
        T5 | {"num_experts": 4, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2},
        words,
    ),
    "BartForConditionalGeneration": ("BartConfig", PAIR, words),
    "MBartForConditionalGeneration": ("MBartConfig", PAIR, words),
    "PegasusForConditionalGeneration": ("PegasusConfig", PAIR, words),
    "MarianMTModel": ("MarianConfig", PAIR, words),
    "BlenderbotForConditionalGeneration": ("BlenderbotConfig", PAIR, words),
    "M2M100ForConditionalGeneration": ("M2M100Config", PAIR, words),
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        PAIR | {"num_mel_bins": 8, "max_source_positions": 32, "max_target_positions": 64},
        spectra,
    ),
    # pictures
    "ViTForImageClassification": ("ViTConfig", IMAGES, pictures),
    "DeiTForImageClassification": ("DeiTConfig", IMAGES, pictures),
    "BeitForImageClassification": ("BeitConfig", IMAGES, pictures),
    "Dinov2ForImageClassification": ("Dinov2Config", IMAGES, pictures),
    "ViTMAEForPreTraining": (
        "ViTMAEConfig",
        IMAGES
        | {
            "decoder_hidden_size": 32,
            "decoder_num_hidden_layers": 2,
            "decoder_num_attention_heads": HEADS,
            "decoder_intermediate_size": 64,
        },
        masked_pictures,
    ),
    "SwinForImageClassification": (
        "SwinConfig",
        {"image_size": PIXELS, "patch_size": 2, "embed_dim": 16, "depths": [2, 2, 2], "num_heads": [2, 2, 4]}
        | {"window_size": 4},
        pictures,
    ),
    "ConvNextForImageClassification": ("ConvNextConfig", STAGES | {"patch_size": 2}, pictures),
    "ResNetForImageClassification": ("ResNetConfig", STAGES | {"embedding_size": 16}, pictures),
    "RegNetForImageClassification": ("RegNetConfig", STAGES | {"embedding_size": 16, "groups_width": 16}, pictures),
    "MobileNetV2ForImageClassification": ("MobileNetV2Config", {"depth_multiplier": 0.35}, pictures),
    "SegformerForSemanticSegmentation": (
        "SegformerConfig",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64], "decoder_hidden_size": 32}
        | {"num_attention_heads": [1, 2, 4, 4]},
        segments,
    ),
    "PoolFormerForImageClassification": ("PoolFormerConfig", STAGES, pictures),
    "DetrForObjectDetection": (
        "DetrConfig",
        {
            **{name: value for name, value in PAIR.items() if not name.endswith("token_id") and name != "vocab_size"},
            "num_queries": 8,
            "num_labels": 3,
        },
        scenes,
    ),
    # pictures and text, sound, series
    "CLIPModel": ("CLIPConfig", clip(), captions),
    "SiglipModel": ("SiglipConfig", clip(), captions),
    "VisionTextDualEncoderModel": ("VisionTextDualEncoderConfig", {}, captions),
    "AltCLIPModel": ("AltCLIPConfig", clip(project_dim=32), captions),
    "Wav2Vec2ForCTC": ("Wav2Vec2Config", SOUND, transcripts),
    "HubertForSequenceClassification": ("HubertConfig", SOUND, sounds),
    "WavLMForSequenceClassification": ("WavLMConfig", SOUND, sounds),
    "ASTForAudioClassification": (
        "ASTConfig",
        IMAGES | {"max_length": 64, "num_mel_bins": 32, "patch_size": 8, "frequency_stride": 8, "time_stride": 8},
        spectrogram,
    ),
    "PatchTSTForPrediction": (
        "PatchTSTConfig",
        {"num_input_channels": 3, "context_length": 64, "prediction_length": 8, "patch_length": 8, "patch_stride": 8}
        | {"d_model": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "ffn_dim": WIDE},
        series,
    ),
}


def build(name: str, **more: Any) -> tuple[Any, Batch]:
    """Return the model, with ``more`` options in its configuration, and what makes a batch for a seed."""
    import transformers as hf

    config, options, batch = SAMPLE[name]
    config_of: Any = getattr(hf, config)
    if name == "VisionTextDualEncoderModel":
        made = config_of.from_vision_text_configs(hf.ViTConfig(**IMAGES), hf.BertConfig(**TEXT), projection_dim=32)
    elif name == "DetrForObjectDetection":
        backbone_of: Any = hf.ResNetConfig
        backbone = backbone_of(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], out_features=["stage2"])
        made = config_of(**options | more, use_timm_backbone=False, backbone_config=backbone)
    else:
        made = config_of(**options | more)
    torch.manual_seed(0)
    return getattr(hf, name)(made).train(), batch
