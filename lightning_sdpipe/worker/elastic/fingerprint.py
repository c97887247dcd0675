"""What must be equal in all pipelines of an elastic run, in words that a refusal can quote."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sized
from importlib.metadata import version

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader

from lightning_sdpipe.partition.ownership import Ownership
from lightning_sdpipe.strategy.options import SDPipeOptions


def fingerprint(trainer: Trainer, options: SDPipeOptions, ownership: Ownership) -> dict[str, str]:
    """Of a worker that is about to join: the same on all stages of a pipeline, and of all pipelines."""
    module = trainer.lightning_module
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in module.state_dict().items()]
    cut = sorted((name, owners) for name, owners in ownership.stages.items())
    every = f"{trainer.val_check_interval} of every {trainer.check_val_every_n_epoch} epochs"
    return {
        "version": f"lightning_sdpipe {version('lightning-sdpipe')}, torch {torch.__version__}",
        "stages": str(options.num_stages),
        "model": f"{type(module).__name__} {_digest(shapes)}",
        "cut": _digest(cut),
        "optimizer": ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers),
        "method": repr(options.sync),
        "exchange": repr(options.exchange),
        "schedule": f"{options.schedule}, {options.num_micro_batches} micro-batches",
        "precision": str(trainer.precision),
        "data": _data(trainer),
        "seed": os.environ.get("PL_GLOBAL_SEED", "none"),
        "accumulate_grad_batches": str(trainer.accumulate_grad_batches),
        "validation": every,
        "limits": f"max_epochs {trainer.max_epochs}, max_steps {trainer.max_steps}",
    }


def _data(trainer: Trainer) -> str:
    """How much there is to train. The user's hook that makes the loader is asked for one that is let go again."""
    with isolate_rng():
        loader = trainer.fit_loop._data_source.dataloader()
    if not isinstance(loader, DataLoader):
        return type(loader).__name__
    samples = f"{len(loader.dataset)} samples" if isinstance(loader.dataset, Sized) else "samples without a number"
    return f"{samples}, batch size {loader.batch_size or getattr(loader.batch_sampler, 'batch_size', 'unknown')}"


def _digest(what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:12]
