"""The models that people bring, unmodified, under every schedule with a flush."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
)

from tests.pipeline.harness import Make, assert_same, one_process, pipeline
from tests.workers import run_workers


class Wrapped(L.LightningModule):
    """A LightningModule around a model of Hugging Face transformers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss  # type: ignore[no-any-return]

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).logits  # type: ignore[no-any-return]


def bert() -> Wrapped:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return Wrapped(BertForMaskedLM(config))


def gpt2() -> Wrapped:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50,
        n_embd=16,
        n_layer=4,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return Wrapped(GPT2LMHeadModel(config))


def resnet() -> Wrapped:
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], layer_type="basic")
    return Wrapped(ResNetForImageClassification(config))


def words(size: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 50, (size, 9), generator=torch.Generator().manual_seed(size))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def images(size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return {
        "pixel_values": torch.randn(size, 3, 64, 64, generator=generator),
        "labels": torch.randint(0, 2, (size,), generator=generator),
    }


SIZES = (8, 8, 6)  # the last batch is partial


SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved_1f1b": 2, "zero_bubble": 2}
"""And the stages of each worker."""


def every_schedule(rank: int, make: Make, batches: Any) -> list[Any]:
    return [pipeline(rank, make, batches, name, 2, 4, stages) for name, stages in SCHEDULES.items()]


@pytest.mark.distributed
@pytest.mark.parametrize(("make", "batch"), [(bert, words), (gpt2, words), (resnet, images)])
def test_every_schedule_computes_what_one_process_does(make: Make, batch: Any) -> None:
    batches = [batch(size) for size in SIZES]
    expected = one_process(make, batches, 4)
    for of_schedule in zip(*run_workers(2, every_schedule, make, batches), strict=True):
        assert_same(list(of_schedule), expected)
