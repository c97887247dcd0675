"""Peak memory for parameters, gradients and Adam's state on a rank of a pipeline, against one process.

The model is a chain of equal linear layers fed with very few samples, so that activations do not count. The peak is
the kernel's: how far the process's resident memory rises above where it was before the model was built, at start-up
or later. The allocator is told to give freed tensors back at once, else the peak is that of its reserve, some tens of
MiB whatever the model.
"""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sdpipe.topology.groups import ProcessGroups
from recipes.suites.processes import run_processes
from recipes.suites.ratios import Ratios, Row, ratio
from recipes.suites.stages import TRAINING, open_pipeline, open_stage

STEPS = 3
MIB = 1 << 20
SMALL_WIDTH = 16  # of the model that warms up
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


class LinearChain(L.LightningModule):
    """Equal layers.

    Args:
        width: features of each.
        num_blocks: how many.
        seed: of the weights.
    """

    def __init__(self, width: int, num_blocks: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(num_blocks)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output: Tensor = self.blocks(batch)
        return output.square().mean()


def measure(*, num_stages: int, width: int, blocks: int, repeats: int, seed: int) -> tuple[list[Row], Ratios]:
    """Peaks of one process and of the fullest rank of a pipeline.

    Args:
        num_stages: M.
        width: features of a layer.
        blocks: layers, a multiple of M.
        repeats: how often.
        seed: of the weights and the data.
    """
    rows: list[Row] = []
    quotients = []
    for repeat in range(repeats):
        arguments = (width, blocks, num_stages, seed)
        (whole,) = run_processes(1, _one_process, *arguments)
        fullest = max(run_processes(num_stages, _stage, *arguments))
        for name, peak in (("one process", whole), (f"fullest of {num_stages} ranks", fullest)):
            rows.append({"what": name, "repeat": repeat, "peak_mib": peak / MIB})
        quotients.append(fullest / whole)
    state = 16 * width * width * blocks / MIB  # bytes of weight, gradient and two moments
    meaning = f"peak memory, {num_stages} stages of a model with {state:.0f} MiB under Adam: a rank over one process"
    return rows, {f"memory/M{num_stages}": ratio(quotients, 0.30, meaning)}


def _one_process(rank: int, width: int, blocks: int, num_micro_batches: int, seed: int) -> int:
    _train_whole(SMALL_WIDTH, blocks, num_micro_batches, seed)
    before = reset_peak()
    _train_whole(width, blocks, num_micro_batches, seed)
    return resident("VmHWM") - before


def _stage(rank: int, width: int, blocks: int, num_micro_batches: int, seed: int) -> int:
    groups = open_pipeline()
    _train_stage(groups, SMALL_WIDTH, blocks, num_micro_batches, seed)
    before = reset_peak()
    _train_stage(groups, width, blocks, num_micro_batches, seed)
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


def reset_peak() -> int:
    """Let the kernel's peak start anew; return the resident bytes."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, MIB)
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(field: str) -> int:
    """Bytes, from the kernel's account of this process."""
    match = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024
