"""Optimizers for workers whose models or gradients are averaged."""

from lightning_sdpipe.optim.frozen_variance import FrozenVariance
from lightning_sdpipe.optim.variance_correction import VarianceCorrection, is_adam_family

__all__ = ["FrozenVariance", "VarianceCorrection", "is_adam_family"]
