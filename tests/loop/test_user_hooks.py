"""A hook may not look for what the step logs where this stage does not come."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.loop.user_hooks import refuse_metrics_elsewhere
from lightning_sdpipe.partition.state_watch import METRICS


class Looking(L.LightningModule):
    look: Any = None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look(self.trainer)

    def on_validation_end(self) -> None:
        self.look(self.trainer)


@pytest.mark.parametrize("metrics", METRICS)
@pytest.mark.parametrize(
    "look", [lambda found: found.get("loss"), lambda found: "loss" in found, lambda found: found["loss"]]
)
def test_a_hook_around_a_batch_is_refused(metrics: str, look: Any) -> None:
    module: Any = Looking()
    module.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    undo = refuse_metrics_elsewhere(module, (), ["the metric 'loss'"])
    module.look = lambda trainer: look(getattr(trainer, metrics))
    with pytest.raises(ConfigurationError, match="on_before_optimizer_step looks for the metric 'loss' on a stage"):
        module.on_before_optimizer_step(None)
    module.look = lambda trainer: getattr(trainer, metrics).get("val_loss")
    module.on_before_optimizer_step(None)
    module.look = lambda trainer: copy.deepcopy(getattr(trainer, metrics)).get("loss")
    module.on_before_optimizer_step(None)
    module.look = lambda trainer: getattr(trainer, metrics).get("loss")
    module.on_validation_end()
    undo()
    module.on_before_optimizer_step(None)
