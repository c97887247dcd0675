"""The user's optimizer, made right for a stage of a pipeline."""

from __future__ import annotations

from lightning.pytorch.plugins import Precision
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.payloads import Payload
from lightning_sdpipe.optim import FrozenVariance, VarianceCorrection, is_adam_family
from lightning_sdpipe.trainer.closures import refuse_repeated_evaluation
from lightning_sdpipe.trainer.loss_scale import refuse_own_unscaling


def refuse_unfit(optimizer: Optimizer, precision: Precision, num_stages: int) -> None:
    """Raises ConfigurationError for an optimizer that would not step as it does in one process."""
    refuse_repeated_evaluation(optimizer)
    if num_stages > 1:
        refuse_own_unscaling(optimizer, precision)


def refuse_unfit_momentum(optimizer: Optimizer, payload: Payload) -> None:
    """Raises ConfigurationError unless what momenta are sent for, if they are, keeps its variance as it was (1-bit
    Adam): divided by one of compression errors, updates would mean nothing."""
    if not payload.momentum:
        return
    if not isinstance(optimizer, FrozenVariance) or optimizer.after != payload.after:
        raise ConfigurationError(
            f"{payload} sends momenta, for which Adam's variance has to be frozen after as many updates: return "
            f"FrozenVariance(optimizer, after={payload.after}) of lightning_sdpipe.optim from configure_optimizers, or "
            "set momentum=0."
        )
    betas = {group["betas"][0] for group in optimizer.param_groups}
    if betas != {payload.momentum}:
        raise ConfigurationError(
            f"{payload} sends momenta of {payload.momentum}, and the optimizer's first beta is "
            f"{', '.join(map(str, sorted(betas)))}: give both the same."
        )


def corrected(optimizer: Optimizer, models: int, sync: object) -> Optimizer:
    """``optimizer`` with variance correction for the mean of so many ``models``, as ``sync`` trains it; as it is, and
    the user is told why, if there is nothing to correct."""
    if not is_adam_family(optimizer):
        rank_zero_info(f"variance_correction=True does not apply to {type(optimizer).__name__}: not of Adam's family.")
        return optimizer
    if models == 1:
        rank_zero_info(f"variance_correction=True has nothing to correct: {sync} averages no models here.")
    return VarianceCorrection(optimizer, num_workers=models)
