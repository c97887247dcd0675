"""Language models of transformers as a LightningModule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    get_constant_schedule_with_warmup,
)

Kind = Literal["bert", "gpt2", "llama"]


class LanguageModel(L.LightningModule):
    """A language model, BERT (masked), GPT-2 or Llama (causal), trained with AdamW.

    Args:
        kind: the kind of model.
        network: settings of its configuration that differ from transformers' defaults.
        lr: the learning rate after the warm-up.
        weight_decay: weight decay of AdamW.
        warmup_steps: steps over which the learning rate rises from zero.
    """

    def __init__(
        self,
        kind: Kind,
        network: Mapping[str, Any],
        lr: float = 1e-5,
        weight_decay: float = 1e-2,
        warmup_steps: int = 2000,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = build(kind, network)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.network(**batch).loss
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.network(**batch).loss, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, self.hparams["lr"], weight_decay=self.hparams["weight_decay"])
        schedule = get_constant_schedule_with_warmup(optimizer, self.hparams["warmup_steps"])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def build(kind: Kind, network: Mapping[str, Any]) -> nn.Module:
    """Return only the network, freshly initialised; for the arguments, see :class:`LanguageModel`."""
    if kind == "bert":
        return BertForMaskedLM(BertConfig(**network))
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**network))
    return GPT2LMHeadModel(GPT2Config(**network))
