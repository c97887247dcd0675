"""A model of Hugging Face transformers, cut into two stages as it is. ``python huggingface.py``"""

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_sdpipe import SDPipeStrategy

TEXT = "the quick brown fox jumps over the lazy dog. " * 40
LENGTH = 32


class CharacterModel(L.LightningModule):
    """Predicts the next character; ``from_pretrained`` instead of a configuration fine-tunes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=LENGTH, n_embd=32, n_layer=4, n_head=2))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch, labels=batch["input_ids"]).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def windows() -> list[dict[str, Tensor]]:
    characters = torch.tensor(list(TEXT.encode()))
    return [{"input_ids": characters[at : at + LENGTH]} for at in range(0, len(TEXT) - LENGTH, 8)]


if __name__ == "__main__":
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SDPipeStrategy(num_stages=2), max_epochs=2)
    trainer.fit(CharacterModel(), DataLoader(windows(), batch_size=16, shuffle=True))  # type: ignore[arg-type]
