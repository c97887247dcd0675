"""Measurement of a user's model on this worker's device, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition import rehearsal
from lightning_sdpipe.partition.factory import build
from lightning_sdpipe.partition.plan import Profile, plan, with_crossing
from lightning_sdpipe.partition.profile import profile
from lightning_sdpipe.partition.rehearsal_result import RehearsalResult
from lightning_sdpipe.placement.model import Block


def measured_blocks(model: str, names: Sequence[str] | None, device: torch.device) -> tuple[str, list[Block]]:
    """Return the name of the model's class, and the measured blocks on ``device``.

    Args:
        model: ``IMPORT.PATH:NAME`` of a function that returns a LightningModule and a mini-batch of one pipeline.
        names: names of its blocks, if they are not to be found.
        device: where they run.

    Raises:
        ConfigurationError: the function returns something else, or the model cannot be cut.
    """
    module, batch = build(model)
    step: Any = getattr(module, "training_step", None)
    if batch is None or step is None:
        raise ConfigurationError(
            f"{model} must return a LightningModule and a mini-batch of one pipeline, to be measured with."
        )
    module.to(device)
    batch = tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, batch)
    profiles: list[Profile] = []
    rehearsals: list[RehearsalResult] = []

    def measure(blocks: Sequence[tuple[str, ...]]) -> Profile:
        profiles.append(profile(module, blocks, lambda: step(batch, 0), device))
        return profiles[-1]

    def rehearse(chain: Sequence[str]) -> RehearsalResult:
        calls = rehearsal.StepCalls("training_step", [(batch, (0,))] * 2, trains=True)
        rehearsals.append(rehearsal.rehearse(module, chain, [calls], device))
        return rehearsals[-1]

    blocks = plan(module, 2, "balanced", names, measure, rehearse).blocks
    return type(module).__name__, [
        Block(
            seconds=block.forward_seconds + block.backward_seconds,
            parameter_bytes=block.parameter_bytes,
            activation_bytes=block.activation_bytes,
            gradient_bytes=block.gradient_bytes,
            trained_bytes=block.trained_bytes,
            saved_bytes=block.saved_bytes,
        )
        for block in with_crossing(profiles[-1], blocks, rehearsals[-1])
    ]
