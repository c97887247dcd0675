"""How fast this worker's device is, and how much memory it has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec
import torch

from lightning_sdpipe.heterogeneity.record import matrix_product, sample
from lightning_sdpipe.placement.model import Block, Model

SAMPLES, INTERVAL = 5, 0.1
"""Of a matrix product, where there is no model to measure with: how many, and seconds for each."""


class Abilities(msgspec.Struct, frozen=True):
    """What one worker can do: ``seconds`` for the model, or for a floating-point operation; and the model's blocks, as
    measured."""

    host: str
    index: int
    seconds: float
    memory_bytes: int | None
    blocks: list[Block]
    name: str


def abilities(host: str, index: int, local_size: int, model: str | None, names: Sequence[str] | None) -> Abilities:
    """Of this process's device: the GPU of its local rank, or the processor.

    Args:
        host: its name.
        index: the local rank.
        local_size: how many workers share the host.
        model: ``IMPORT.PATH:NAME`` of a function that returns a LightningModule and a mini-batch of one pipeline.
        names: of its blocks, if they are not to be found.

    Raises:
        ConfigurationError: the model cannot be measured.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu")
    if accelerator is not None:
        device = torch.device(accelerator.type, index % torch.accelerator.device_count())
    memory = _memory(device, local_size)
    if model is None:
        kernel, operations = matrix_product(device)
        rate = median(sample(kernel, SAMPLES, INTERVAL, 1.0))
        return Abilities(host, index, 1.0 / (rate * operations), memory, [], "")
    from lightning_sdpipe.placement.measured_model import measured_blocks  # imports lightning, which takes long

    name, blocks = measured_blocks(model, names, device)
    return Abilities(host, index, sum(block.seconds for block in blocks), memory, blocks, name)


def relative(found: Sequence[Abilities]) -> tuple[list[float], Model | None]:
    """The speed of each worker, the fastest being 1, and the model as the fastest measured it."""
    fastest = min(found, key=lambda worker: worker.seconds)
    speeds = [fastest.seconds / worker.seconds for worker in found]
    return speeds, Model(fastest.name, tuple(fastest.blocks)) if fastest.blocks else None


def _memory(device: torch.device, local_size: int) -> int | None:
    """Bytes that are free now; the workers of a host share its memory."""
    tells = getattr(torch.get_device_module(device), "mem_get_info", None)  # of an accelerator with memory of its own
    if tells is not None:
        free, _ = tells(device)
        return int(free)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return available[0] // local_size if available else None
