from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.loop.epoch_callback import StreamSwitches
from lightning_sdpipe.partition.ownership import Ownership
from lightning_sdpipe.random_streams import RandomStreams
from lightning_sdpipe.topology.mesh import Mesh


class Tied(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.head.weight = self.embedding.weight


def update(rank: int, draws: bool, trained: bool = True) -> float:
    """An optimizer's step on one of two stages; what it draws."""
    module = Tied()
    module.embedding.weight.requires_grad_(trained)
    trainer: Any = SimpleNamespace(lightning_module=module, precision_plugin=SimpleNamespace())
    trainer.precision_plugin._after_closure = lambda model, optimizer: None
    mesh = Mesh.build(2, 2)
    stages = {"embedding.weight": (0, 1), "embedding.bias": (0,), "head.weight": (0, 1), "head.bias": (1,)}
    groups: Any = SimpleNamespace(mesh=mesh, rank=rank)
    follower = StreamSwitches(trainer, RandomStreams(torch.device("cpu")), lambda: 1, groups, Ownership(stages))
    trainer.precision_plugin._after_closure(module, None)
    noise = float(torch.rand(())) if draws else 0.0
    follower.end_update(torch.optim.SGD(module.parameters(), 0.1))
    return noise


def test_an_optimizer_that_draws_is_refused_where_stages_hold_the_same_weight() -> None:
    update(0, draws=False)
    with pytest.raises(ConfigurationError, match=r"SGD draws random numbers in its step, and 'embedding\.weight' is"):
        update(0, draws=True)


def test_optimizers_of_stages_draw_different_numbers() -> None:
    assert update(0, draws=True, trained=False) == update(0, draws=True, trained=False)
    assert update(0, draws=True, trained=False) != update(1, draws=True, trained=False)
