"""Synchronisation of the replicas of a stage: one object chooses the method, and each worker runs its half of it."""

from lightning_sdpipe.policies.built_in import *  # noqa: F403
from lightning_sdpipe.sync.diloco import DiLoCo as DiLoCo
from lightning_sdpipe.sync.methods import METHODS
from lightning_sdpipe.sync.methods import AllReduce as AllReduce

NAMES = {kind.registered: kind for kind in METHODS}
"""Methods with their defaults by the names that users give, as in ``conf/sync``."""

__all__ = sorted(kind.__name__ for kind in METHODS)
