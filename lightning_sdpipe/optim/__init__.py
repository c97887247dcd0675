"""Optimizers that know that the models of several workers are averaged."""

from lightning_sdpipe.optim.variance_correction import VarianceCorrection, is_adam_family

__all__ = ["VarianceCorrection", "is_adam_family"]
