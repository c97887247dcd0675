"""Synchronisation of the replicas of a stage: one object chooses the method, and each worker runs its half of it."""

from lightning_sdpipe.policies.ad_psgd import ADPSGD as ADPSGD
from lightning_sdpipe.policies.decentralized import Decentralized as Decentralized
from lightning_sdpipe.policies.local_sgd import LocalSGD as LocalSGD
from lightning_sdpipe.policies.local_sgd import NoSync as NoSync
from lightning_sdpipe.policies.partial_reduce import PartialReduce as PartialReduce
from lightning_sdpipe.policies.phd_psgd import PHDPSGD as PHDPSGD
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized as SemiDecentralized
from lightning_sdpipe.sync.diloco import DiLoCo as DiLoCo
from lightning_sdpipe.sync.methods import AllReduce as AllReduce

NAMES = {
    "ad_psgd": ADPSGD,
    "all_reduce": AllReduce,
    "decentralized": Decentralized,
    "diloco": DiLoCo,
    "local_sgd": LocalSGD,
    "no_sync": NoSync,
    "partial_reduce": PartialReduce,
    "phd_psgd": PHDPSGD,
    "semi_decentralized": SemiDecentralized,
}
"""Methods with their defaults by the names that users give, as in ``conf/sync``."""
