"""Fine-tuning with LoRA, through Hugging Face's PEFT: ``experiment=lora``, with the extra ``examples``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from recipes.language import LanguageModel


class AdaptedLanguageModel(LanguageModel):
    """A causal language model with frozen weights and trained low-rank adapters. Checkpoints hold only the adapters, so
    a run that resumes needs the same base.

    Args:
        kind: the kind of the base.
        network: settings of the base's configuration that differ from transformers' defaults; its weights are random.
        pretrained: in place of that base, one that ``from_pretrained`` loads: a folder, or a name on the hub.
        rank: rank of the adapters.
        targets: names of the linear layers that get an adapter.
        lr: the learning rate after the warm-up.
        weight_decay: weight decay of AdamW.
        warmup_steps: steps over which the learning rate rises from zero.
    """

    strict_loading = False  # a checkpoint lacks the base

    def __init__(
        self,
        kind: Literal["gpt2", "llama"] = "llama",
        network: Mapping[str, Any] | None = None,
        pretrained: str | None = None,
        rank: int = 8,
        targets: Sequence[str] = ("q_proj", "v_proj"),
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        warmup_steps: int = 100,
    ) -> None:
        super().__init__(kind, network or {}, lr, weight_decay, warmup_steps)
        base = self.network if pretrained is None else AutoModelForCausalLM.from_pretrained(pretrained)
        self.network = get_peft_model(base, LoraConfig(r=rank, target_modules=[*targets]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name, parameter in self.named_parameters():
            if not parameter.requires_grad:
                checkpoint["state_dict"].pop(name, None)
