"""What is refused before training."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.loop.refusals import refuse_uninitialised


@pytest.mark.parametrize("lazy", [nn.LazyLinear(3), nn.LazyBatchNorm1d(affine=False)])
def test_lazy_modules_that_have_not_run_are_refused(lazy: nn.Module) -> None:
    with pytest.raises(ConfigurationError, match=r"'1\.\w+' of Sequential has no shape before its module has run"):
        refuse_uninitialised(nn.Sequential(nn.Linear(2, 2), lazy))
    refuse_uninitialised(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
