"""Measurement of the memory that each block keeps from its forward to its backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_sdpipe.partition.chain import Block


@contextmanager
def recording_saved(module: nn.Module, blocks: Sequence[Block]) -> Iterator[list[int]]:
    """Record, while one step runs, what autograd keeps for the backward of each block; the list is filled afterwards.

    The numbers are bytes without parameters and buffers; each memory counts once, with the first block that keeps it.
    The user's code between two blocks counts with the later one, and code after the last block with that block.
    """
    lasting = {_memory(t) for t in (*module.parameters(), *module.buffers())}
    kept: list[dict[int, Tensor]] = [{} for _ in blocks]  # the tensors too, so that their memory is not used again
    returned = 0
    sizes: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        memory = _memory(tensor)
        if memory not in lasting and not any(memory in block for block in kept):
            kept[min(returned, len(blocks) - 1)][memory] = tensor.detach()
        return tensor

    def count(index: int, *_: Any) -> None:
        nonlocal returned
        returned = max(returned, index + 1)  # checkpointing runs blocks again during the backward

    with ExitStack() as stack:
        for index, block in enumerate(blocks):
            stack.callback(module.get_submodule(block[-1]).register_forward_hook(partial(count, index)).remove)
        stack.enter_context(saved_tensors_hooks(keep, lambda tensor: tensor))
        yield sizes
    sizes += [sum(tensor.untyped_storage().nbytes() for tensor in block.values()) for block in kept]


def parameter_bytes(module: nn.Module, block: Block) -> tuple[int, int]:
    """Return the bytes of a block's parameters, tied ones once, and of those that are trained."""
    parameters = {id(p): p for path in block for p in module.get_submodule(path).parameters()}.values()
    return sum(p.nbytes for p in parameters), sum(p.nbytes for p in parameters if p.requires_grad)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
