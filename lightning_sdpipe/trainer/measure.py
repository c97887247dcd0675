"""Measuring the blocks before training: rank 0 runs one micro-batch, and everybody cuts by its figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_sdpipe import p2p
from lightning_sdpipe.partition import cache
from lightning_sdpipe.partition.chain import Block
from lightning_sdpipe.partition.plan import Profile
from lightning_sdpipe.partition.profile import profile
from lightning_sdpipe.partition.sample import sample_batch
from lightning_sdpipe.pipeline.micro_batches import split


def measure_on_rank_zero(
    trainer: Trainer,
    blocks: Sequence[Block],
    num_micro_batches: int,
    device: torch.device,
    context: Callable[[], AbstractContextManager[Any]],
) -> Profile:
    """The profile of the blocks of the trainer's module, the same on every rank; all must call it.

    Rank 0 takes a micro-batch from the training data and finds the profile on disk, or runs the training step on
    it with the whole module on ``device``.

    Args:
        trainer: set up to fit; its training data can be asked for.
        blocks: the chain.
        num_micro_batches: parts of a mini-batch.
        device: where rank 0 computes.
        context: the precision plugin's, for the training step.

    Raises:
        ConfigurationError: the module is not whole, or a batch cannot be split.
    """
    everybody = dist.group.WORLD
    assert everybody is not None
    data = b""
    if dist.get_rank() == 0:
        module = trainer.lightning_module
        batch = split(sample_batch(trainer.fit_loop._data_source.dataloader()), num_micro_batches, module)[0].batch
        key = cache.fingerprint(module, blocks, batch, device)
        measured = cache.load(key)
        if measured is None:
            batch = trainer.strategy.batch_to_device(batch, device)
            measured = profile(module, blocks, _step(module, batch, device, context), device)
            cache.store(key, measured)
        data = cache.encode(measured)
    return cache.decode(p2p.broadcast_bytes(data, 0, everybody))


def _step(
    module: LightningModule, batch: Any, device: torch.device, context: Callable[[], AbstractContextManager[Any]]
) -> Callable[[], Any]:
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    def step() -> Any:
        if all(p.device.type != "meta" for p in module.parameters()):  # else the profile says what is wrong
            module.to(device)
        with context():
            return module.training_step(batch, 0) if takes_index else module.training_step(batch)

    return step
