"""Profiles the blocks of a chain: what each costs, and how much crosses a cut after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.chain import Block
from lightning_sdpipe.partition.effects import Original, intercepted
from lightning_sdpipe.partition.message import Opaque, take_apart
from lightning_sdpipe.partition.rehearsal import unheard


@dataclass(frozen=True)
class BlockProfile:
    """The cost of one block for one micro-batch. User code between two blocks counts with the later one, whose stage
    runs it; code after the last block (the loss) counts with that block."""

    forward_seconds: float
    backward_seconds: float
    activation_bytes: int | None  # bytes that would cross a cut after it; None: the output cannot travel
    gradient_bytes: int  # bytes that would come back over it
    parameter_bytes: int = 0  # tied ones count in every block that has them
    trained_bytes: int = 0  # those of them that are trained
    saved_bytes: int = 0  # kept from its forward to its backward


def profile(
    module: nn.Module,
    blocks: Sequence[Block],
    step: Callable[[], Any],
    device: torch.device,
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[BlockProfile, ...]:
    """Measure each block while ``step`` runs forward and backward; take medians over ``repeats`` runs after a first
    one.

    What the step changes stays changed, as with a rehearsal, except gradients. With activation checkpointing,
    recomputation counts as backward, as in training.

    Args:
        module: the whole module, on ``device``.
        blocks: its chain.
        step: calls the user's training step on one micro-batch and returns its loss.
        device: where the blocks run.
        repeats: how many runs are measured.
        clock: returns monotonic seconds.

    Raises:
        ConfigurationError: the module is not whole, or a block does not run in the step.
    """
    absent = [name for name, p in module.named_parameters() if p.is_meta]
    if absent:
        raise ConfigurationError(
            f'partition="balanced" measures the whole model in one process, but {absent[0]!r} and '
            f"{len(absent) - 1} other parameters are on the meta device. Build the model outside of meta, "
            "or use "
            'partition="parameters" or a list of block counts.'
        )

    def now() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return clock()

    with unheard(module, True, device):
        with recording_saved(module, blocks) as saved:
            _measure(module, blocks, step, now)
        runs = [_measure(module, blocks, step, now) for _ in range(repeats)]
    module.zero_grad()
    return tuple(
        BlockProfile(
            median(block.forward_seconds for block in of_block),
            median(block.backward_seconds for block in of_block),
            of_block[0].activation_bytes,
            of_block[0].gradient_bytes,
            *parameter_bytes(module, block),
            kept,
        )
        for block, kept, of_block in zip(blocks, saved, zip(*runs, strict=True), strict=True)
    )


@dataclass
class _Stamps:
    returned: dict[int, float] = field(default_factory=dict)  # the time when the block's forward ended
    arrived: dict[int, float] = field(default_factory=dict)  # the time when the gradients of its output were complete
    crossing: dict[int, tuple[int | None, int]] = field(default_factory=dict)

    def arrive(self, index: int, now: Callable[[], float], _: Sequence[Tensor | None]) -> None:
        self.arrived.setdefault(index, now())


def _measure(
    module: nn.Module, blocks: Sequence[Block], step: Callable[[], Any], now: Callable[[], float]
) -> list[BlockProfile]:
    stamps = _Stamps()

    def call(index: int, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = original(*args, **kwargs)
        if index not in stamps.returned:  # else checkpointing recomputes it during the backward
            stamps.returned[index] = now()
            stamps.crossing[index] = _crossing(output)
            trained = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
            if trained:
                register_multi_grad_hook(trained, partial(stamps.arrive, index, now))
        return output

    with intercepted(module, [block[-1] for block in blocks], call):
        module.zero_grad()
        begin = now()
        outcome = step()
        turn = now()
        loss = outcome.get("loss") if isinstance(outcome, Mapping) else outcome
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        end = now()
    missing = [" + ".join(block) for i, block in enumerate(blocks) if i not in stamps.returned]
    if missing:
        raise ConfigurationError(
            f"The training step did not run {missing}, so they cannot be blocks of the chain. "
            "Name blocks that every step runs with SDPipeStrategy(blocks=[...])."
        )
    stamps.returned[len(blocks) - 1] = stamps.arrived[len(blocks) - 1] = turn
    begins = [begin, *(stamps.returned[i] for i in range(len(blocks) - 1))]
    backward = _backward_seconds(stamps.arrived, len(blocks), end)
    return [BlockProfile(stamps.returned[i] - begins[i], backward[i], *stamps.crossing[i]) for i in range(len(blocks))]


def _backward_seconds(arrived: Mapping[int, float], num_blocks: int, end: float) -> list[float]:
    """Return the time of each block's backward, from the gradient of its output to that of its input."""
    seconds = [0.0] * num_blocks
    for block in range(num_blocks):  # `end` is the time when the backward of the block before this one began
        if block in arrived:  # else no gradient passes: this block and those before it are frozen
            seconds[block] = end - arrived[block]
            end = arrived[block]
    return seconds


def _crossing(output: Any) -> tuple[int | None, int]:
    leaves, structure = take_apart(output)
    if any(isinstance(part, Opaque) for part in structure.parts):
        return None, 0
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return (
        sum(t.numel() * t.element_size() for t in tensors),
        sum(t.numel() * t.element_size() for t in tensors if t.requires_grad),
    )


@contextmanager
def recording_saved(module: nn.Module, blocks: Sequence[Block]) -> Iterator[list[int]]:
    """Record, while one step runs, what autograd keeps for the backward of each block; the list is filled afterwards.

    The numbers are bytes, without parameters and buffers; each storage counts once, with the first block that keeps it.
    User code between two blocks counts with the later one, and code after the last block with that block.
    """
    lasting = {_memory(t) for t in (*module.parameters(), *module.buffers())}
    kept: list[dict[int, Tensor]] = [{} for _ in blocks]  # keep the tensors, so that their memory is not reused
    returned = 0
    sizes: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        memory = _memory(tensor)
        if memory not in lasting and not any(memory in block for block in kept):
            kept[min(returned, len(blocks) - 1)][memory] = tensor.detach()
        return tensor

    def count(index: int, *_: Any) -> None:
        nonlocal returned
        returned = max(returned, index + 1)  # checkpointing recomputes earlier blocks during the backward

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
