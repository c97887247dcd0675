"""The Lightning strategy :class:`SDPipeStrategy`: its options, and its additions to Lightning's hooks."""

import lightning
import torch
from lightning.pytorch.strategies import StrategyRegistry
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sdpipe import tested
from lightning_sdpipe.strategy.strategy import SDPipeStrategy as SDPipeStrategy

if said := tested.warning(torch=torch.__version__, lightning=lightning.__version__):
    rank_zero_warn(said)
StrategyRegistry.register("sdpipe", SDPipeStrategy, override=True)
