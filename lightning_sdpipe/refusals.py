"""What Lightning offers and a pipeline cannot do, refused before training with the reason and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_sdpipe.errors import ConfigurationError


def refuse_unsupported(trainer: Trainer, schedule: str, num_stages: int) -> None:
    """Raises ConfigurationError for options of the Trainer or the module that do not go with a pipeline."""
    module = trainer.lightning_module
    if trainer.state.fn == TrainerFn.FITTING and not module.automatic_optimization:
        raise ConfigurationError(
            f"{type(module).__name__} uses manual optimization. A pipeline runs forward and backward of several "
            "micro-batches in an order of its own, so the optimization must be automatic."
        )
    if schedule == "pipedream" and trainer.accumulate_grad_batches > 1:
        raise ConfigurationError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} does not go with schedule='pipedream', "
            "which applies every gradient at once. Use a larger batch, or schedule='1f1b'."
        )
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm != "value" and num_stages > 1:
        raise ConfigurationError(
            "gradient_clip_val clips by the norm of all parameters, and no worker holds them all. "
            'Use Trainer(gradient_clip_algorithm="value") for now.'
        )


def refuse_shared(module: LightningModule, shared: Sequence[tuple[tuple[int, ...], str]]) -> None:
    """Raises ConfigurationError if a trained parameter is among those that live on several stages."""
    trained = [name for _, name in shared if module.get_parameter(name).requires_grad]
    if trained:
        raise ConfigurationError(
            f"{trained[0]!r} lives on several stages (tied weights, or outside of every block). Its gradients are "
            "summed over them, which needs a flush: use schedule='1f1b', or keep its users on one stage."
        )
