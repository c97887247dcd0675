"""An exchange from outside the package: the example of docs/exchange.md, between processes and in a Trainer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe import SDPipeStrategy, SemiDecentralized
from lightning_sdpipe.exchange.moving import Mover, finish
from lightning_sdpipe.topology.groups import Replicas
from tests.exchange.test_group_mean import group, values
from tests.strategy.test_strategy import fit
from tests.workers import run_workers

DOCS = Path(__file__).parents[2] / "docs" / "exchange.md"
WEIGHTS = (0.2, 0.5, 0.3)


@pytest.fixture(scope="module")
def own() -> Iterator[ModuleType]:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (source,) = [block for block in blocks if "class InHalf" in block]
    module = ModuleType("my_exchange")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "my_exchange", module)  # dataclasses look there
        exec(source, vars(module))
        yield module


def average(rank: int, own: ModuleType) -> Tensor:
    model = values(rank, 50)
    mover: Mover = own.Whole(Replicas(dist.group.WORLD, range(3), 0, rank))  # type: ignore[arg-type]
    finish(mover.start([model], group(range(3), WEIGHTS)))
    return model


@pytest.mark.distributed
def test_it_averages_by_the_weights_of_the_group_to_the_bits_that_travel(own: ModuleType) -> None:
    means = run_workers(3, average, own)
    expected = sum(w * values(rank, 50).half().float() for rank, w in enumerate(WEIGHTS))
    for mean in means:
        torch.testing.assert_close(mean, expected)
        assert torch.equal(mean, means[0])


@pytest.mark.distributed
def test_training_goes_by_it(own: ModuleType, tmp_path: Path) -> None:
    everybody = SemiDecentralized(window=math.inf)
    sent = [
        fit(tmp_path / name, SDPipeStrategy(1, sync=sync, start_method="fork"), 2, 4)[1].state_dict()
        for name, sync in (("half", own.InHalf(everybody)), ("full", everybody))
    ]
    for half, full in zip(*(state.values() for state in sent), strict=True):
        torch.testing.assert_close(half, full, rtol=5e-3, atol=5e-3)
    assert any(not torch.equal(half, full) for half, full in zip(*(state.values() for state in sent), strict=True))
