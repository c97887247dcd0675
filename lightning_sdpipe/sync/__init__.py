"""How the replicas of a stage stay together: one object chooses the method, and each worker runs its half of it."""

from lightning_sdpipe.sync.methods import ADPSGD as ADPSGD
from lightning_sdpipe.sync.methods import AllReduce as AllReduce
from lightning_sdpipe.sync.methods import HetPipe as HetPipe
from lightning_sdpipe.sync.methods import LocalSGD as LocalSGD
from lightning_sdpipe.sync.methods import NoSync as NoSync
from lightning_sdpipe.sync.methods import SemiDecentralized as SemiDecentralized

__all__ = ["ADPSGD", "AllReduce", "HetPipe", "LocalSGD", "NoSync", "SemiDecentralized"]
