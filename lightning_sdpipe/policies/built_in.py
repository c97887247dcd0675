"""The built-in policies; everything else about a policy is in its class."""

from lightning_sdpipe.policies.ad_psgd import ADPSGD as ADPSGD
from lightning_sdpipe.policies.all_reduce import AllPresent, AllReduceModels
from lightning_sdpipe.policies.decentralized import Decentralized as Decentralized
from lightning_sdpipe.policies.local_sgd import LocalSGD as LocalSGD
from lightning_sdpipe.policies.local_sgd import NoSync as NoSync
from lightning_sdpipe.policies.outer_rounds import OuterRounds
from lightning_sdpipe.policies.partial_reduce import PartialReduce as PartialReduce
from lightning_sdpipe.policies.phd_psgd import PHDPSGD as PHDPSGD
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized as SemiDecentralized

METHODS = (SemiDecentralized, PartialReduce, LocalSGD, Decentralized, ADPSGD, PHDPSGD, NoSync)
"""Policies that users choose as methods, in the order in which they are offered."""

POLICIES: tuple[type[PolicyConfig], ...] = (*METHODS, AllReduceModels, AllPresent, OuterRounds)
"""All built-in policies."""
