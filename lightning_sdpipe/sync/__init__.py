"""How the replicas of a stage stay together: one object chooses the rule, and each worker runs its half of it."""

from lightning_sdpipe.scheduler.specification import AllReduceSpec as AllReduce
from lightning_sdpipe.scheduler.specification import SemiDecentralizedSpec as SemiDecentralized

__all__ = ["AllReduce", "SemiDecentralized"]
