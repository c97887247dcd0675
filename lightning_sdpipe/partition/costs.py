"""Costs of a model's modules, counted while a step runs, without a clock, so that all machines find the same.

An operation costs the larger of (floating-point operations / rate) and (bytes / bandwidth), as in a roofline (Williams,
Waterman and Patterson, CACM 2009), plus a fixed part. The backward of a matrix product or convolution costs as much
again for each operand that needs a gradient; that of any other operation costs as much once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lightning_sdpipe.partition.chain import Block
from lightning_sdpipe.partition.provenance import refuse_collectives, tensors_in


@dataclass(frozen=True)
class Rates:
    """A device's floating-point operations per second, its bytes of memory read or written per second, and the fixed
    seconds that each operation adds."""

    flops: float
    bandwidth: float
    operation: float


CPU = Rates(flops=4e10, bandwidth=1e10, operation=1e-5)
"""A core or two, in 32 bits."""
ACCELERATOR = Rates(flops=5e13, bandwidth=1e12, operation=1e-5)
"""A graphics card, in mixed precision."""


def rates_of(device: torch.device) -> Rates:
    """Return rates for this type of device; only their ratios matter."""
    return CPU if device.type == "cpu" else ACCELERATOR


@dataclass
class Costs:
    """The costs of one step, in order. ``stretches`` are the times between calls and returns of modules: the calls
    under way, outermost first, and the seconds. ``calls`` are the modules in the order of their calls."""

    stretches: list[tuple[tuple[nn.Module, ...], float]] = field(default_factory=list)
    calls: list[nn.Module] = field(default_factory=list)

    def renamed(self, names: Mapping[Any, Any]) -> Costs:
        """Return the same costs with each module replaced by its entry in ``names``; other modules are left out."""
        stretches = [(tuple(names[m] for m in modules if m in names), cost) for modules, cost in self.stretches]
        return Costs(stretches, [names[m] for m in self.calls if m in names])

    def order(self, modules: Sequence[nn.Module]) -> list[int]:
        """Return the indices of ``modules`` in the order of their calls, repeated for each call."""
        numbers = {module: number for number, module in enumerate(modules)}
        return [numbers[module] for module in self.calls if module in numbers]

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(cost for _, cost in self.stretches)

    def within(self, module: nn.Module) -> float:
        """Return the seconds spent in calls of a module and its parts."""
        inside = set(module.modules())
        return sum(cost for modules, cost in self.stretches if not inside.isdisjoint(modules))

    def of_blocks(self, root: nn.Module, blocks: Sequence[Block]) -> list[float]:
        """Return the seconds of each block. Code between two blocks counts with the later one, and code after the last
        block with that one. A block that was not called, perhaps by chance, costs the average of similar blocks."""
        number = {root.get_submodule(path): index for index, block in enumerate(blocks) for path in block}
        seconds = [0.0] * len(blocks)
        between, last = 0.0, 0
        for modules, cost in self.stretches:
            block = next((number[module] for module in modules if module in number), None)
            if block is None:
                between += cost
            else:
                last = block
                seconds[block] += between + cost
                between = 0.0
        seconds[last] += between
        called = {number[module] for module in self.calls if module in number}
        for index in set(range(len(blocks))) - called:
            like = [i for i in called if _likeness(root, blocks[i]) == _likeness(root, blocks[index])]
            seconds[index] += sum(seconds[i] for i in like) / max(len(like), 1)
        return seconds


def _likeness(root: nn.Module, block: Block) -> list[tuple[str, type]]:
    """Return the parent path and the class of each of the block's modules."""
    return [(path.rpartition(".")[0], type(root.get_submodule(path))) for path in block]


def count(step: Callable[[], Any], rates: Rates) -> Costs:
    """Run ``step`` once, forward only, and return its costs.

    Raises:
        Exception: the step raised it, or communicates with other processes.
    """
    counter = _Counter(rates)
    hooks = nn.modules.module
    handles = [
        hooks.register_module_forward_pre_hook(counter.enter),
        hooks.register_module_forward_hook(counter.leave, always_call=True),
    ]
    try:
        with counter:
            step()
    finally:
        for handle in handles:
            handle.remove()
    counter.note()
    return counter.costs


class _Counter(TorchDispatchMode):
    def __init__(self, rates: Rates) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.costs = Costs()
        self._rates = rates
        self._under_way: tuple[nn.Module, ...] = ()
        self._seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        refuse_collectives(func)
        kwargs = kwargs or {}
        outcome = func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        results = tensors_in(outcome)
        if not results or results[0].is_meta:
            return outcome
        flops, moved = 0, 0
        if not func.is_view:
            count = flop_registry.get(func._overloadpacket)
            flops = count(*args, **kwargs, out_val=outcome) if count is not None else 0
            moved = sum(_nbytes(tensor) for tensor in (*given, *results))
        once = max(flops / self._rates.flops, moved / self._rates.bandwidth) + self._rates.operation
        differentiated = sum(tensor.requires_grad for tensor in given) if torch.is_grad_enabled() else 0
        self._seconds += once * (1 + (differentiated if flops else min(differentiated, 1)))
        return outcome

    def enter(self, module: nn.Module, *_: Any) -> None:
        """Note that the call of a module begins."""
        self.note()
        self.costs.calls.append(module)
        self._under_way = (*self._under_way, module)

    def leave(self, *_: Any) -> None:
        """Note that the innermost call returns."""
        self.note()
        self._under_way = self._under_way[:-1]

    def note(self) -> None:
        """Note the costs since the last call or return."""
        if self._seconds:
            self.costs.stretches.append((self._under_way, self._seconds))
            self._seconds = 0.0


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
