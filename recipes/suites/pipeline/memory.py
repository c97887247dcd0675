"""Peak memory for parameters, gradients and Adam's state on a rank of a pipeline, against one process.

The model is a chain of equal linear layers fed with very few samples, so that activations do not count. The peak is
the kernel's: how far the process's resident memory rises above its size before the model was built.
"""

from __future__ import annotations

from functools import partial

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sdpipe.topology.groups import ProcessGroups
from recipes.harness.processes import run_processes
from recipes.suites.grid import Ratios, Row, ratios, versus
from recipes.suites.probe import MIB, reset_peak, resident
from recipes.suites.stages import TRAINING, open_pipeline, open_stage

STEPS = 3
SMALL_WIDTH = 16  # width of the model for the warm-up


class LinearChain(L.LightningModule):
    """A chain of equal layers.

    Args:
        width: features of each layer.
        num_blocks: number of layers.
        seed: seed of the weights.
    """

    def __init__(self, width: int, num_blocks: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(num_blocks)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output: Tensor = self.blocks(batch)
        return output.square().mean()


def measure(*, num_stages: int, width: int, blocks: int, repeats: int, seed: int) -> tuple[list[Row], Ratios]:
    """Return the peaks of one process and of the fullest rank of a pipeline.

    Args:
        num_stages: M.
        width: features of a layer.
        blocks: number of layers, a multiple of M.
        repeats: number of repeats.
        seed: seed of the weights and the data.
    """
    rows: list[Row] = []
    for repeat in range(repeats):
        for name, ranks in (("one process", 1), ("fullest rank", num_stages)):
            peak = max(run_processes(ranks, _peak, width, blocks, num_stages, seed))
            rows.append({"what": name, "ranks": ranks, "repeat": repeat, "peak_mib": peak / MIB})
    state = 16 * width * width * blocks / MIB  # weight, gradient and two moments
    meaning = f"peak memory, {num_stages} stages of a model with {state:.0f} MiB under Adam: a rank over one process"
    goal = versus(meaning, "peak_mib", "fullest rank", "one process", 0.30)
    return rows, ratios(rows, {f"memory/M{num_stages}": goal})


def _peak(rank: int, width: int, blocks: int, num_micro_batches: int, seed: int) -> int:
    train = _train_whole if dist.get_world_size() == 1 else partial(_train_stage, open_pipeline())
    train(SMALL_WIDTH, blocks, num_micro_batches, seed)
    before = reset_peak()
    train(width, blocks, num_micro_batches, seed)
    return resident("VmHWM") - before


def _train_whole(width: int, blocks: int, num_micro_batches: int, seed: int) -> None:
    module = LinearChain(width, blocks, seed)
    optimizer = torch.optim.Adam(module.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part in _batch(width, num_micro_batches, seed).chunk(num_micro_batches):
            (module.training_step(part, 0) / num_micro_batches).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _train_stage(groups: ProcessGroups, width: int, blocks: int, num_micro_batches: int, seed: int) -> None:
    batch = _batch(width, num_micro_batches, seed)
    module = LinearChain(width, blocks, seed)
    stage = open_stage(groups, module, ["blocks.*"], batch, num_micro_batches=num_micro_batches)
    optimizer = torch.optim.Adam(stage.freezing.trained)
    for iteration in range(STEPS):
        optimizer.zero_grad()
        stage.pipeline.train(batch, TRAINING, iteration).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.barrier()


def _batch(width: int, num_micro_batches: int, seed: int) -> Tensor:
    return torch.rand(num_micro_batches, width, generator=torch.Generator().manual_seed(seed))
