"""The user's optimizer, made right for a stage of a pipeline."""

from __future__ import annotations

from lightning.pytorch.plugins import Precision
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_sdpipe.optim import VarianceCorrection, is_adam_family
from lightning_sdpipe.trainer.closures import refuse_repeated_evaluation
from lightning_sdpipe.trainer.loss_scale import refuse_own_unscaling


def refuse_unfit(optimizer: Optimizer, precision: Precision, num_stages: int) -> None:
    """Raises ConfigurationError for an optimizer that would not step as it does in one process."""
    refuse_repeated_evaluation(optimizer)
    if num_stages > 1:
        refuse_own_unscaling(optimizer, precision)


def corrected(optimizer: Optimizer, models: int, sync: object) -> Optimizer:
    """``optimizer`` with variance correction for the mean of so many ``models``, as ``sync`` trains it; as it is, and
    the user is told why, if there is nothing to correct."""
    if not is_adam_family(optimizer):
        rank_zero_info(f"variance_correction=True does not apply to {type(optimizer).__name__}: not of Adam's family.")
        return optimizer
    if models == 1:
        rank_zero_info(f"variance_correction=True has nothing to correct: {sync} averages no models here.")
    return VarianceCorrection(optimizer, num_workers=models)
