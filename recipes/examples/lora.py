"""Fine-tuning with LoRA: the base is frozen, and neither averaged, sent nor saved. ``python lora.py``, with peft"""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_sdpipe import LocalSGD, SDPipeStrategy


class Tuned(L.LightningModule):
    strict_loading = False  # a checkpoint lacks the base, which comes from where it was trained

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
        torch.manual_seed(0)  # instead of from_pretrained, which gives every process the same base
        base = LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=32, **sizes))  # type: ignore[arg-type]
        self.model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch, labels=batch["input_ids"]).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name, parameter in self.named_parameters():
            if not parameter.requires_grad:
                checkpoint["state_dict"].pop(name, None)


def sentences() -> list[dict[str, Tensor]]:
    text = torch.tensor(list(b"low rank layers learn; the base stays as it was. " * 20))
    return [{"input_ids": text[at : at + 32]} for at in range(0, len(text) - 32, 8)]


if __name__ == "__main__":
    strategy = SDPipeStrategy(num_stages=1, sync=LocalSGD(every=2))
    keep = ModelCheckpoint("checkpoints", filename="adapters")
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, callbacks=[keep], logger=False)
    trainer.fit(Tuned(), DataLoader(sentences(), batch_size=8))  # type: ignore[arg-type]
    if trainer.is_global_zero:
        print(f"{strategy.statistics.groups} updates, {strategy.statistics.bytes_sent} bytes sent")
