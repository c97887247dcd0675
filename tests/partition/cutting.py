"""A model whole and cut, in one process, planned as the strategy plans it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sdpipe.check import Made, compute
from lightning_sdpipe.partition import rehearsal
from lightning_sdpipe.partition.factory import tried
from lightning_sdpipe.partition.plan import Plan, plan
from lightning_sdpipe.partition.rehearsal import StepCalls

LossOf = Callable[[nn.Module, Any], Tensor]


class Stepping(nn.Module):
    """A model with a step. ``set_up`` does to each copy what cannot be copied, such as registering hooks."""

    def __init__(self, model: nn.Module, loss_of: LossOf, set_up: Callable[[nn.Module], None] = lambda _: None) -> None:
        super().__init__()
        self.model = model
        self.loss_of, self.set_up = loss_of, set_up

    def training_step(self, batch: Any) -> Tensor:
        return self.loss_of(self.model, batch)


def planned(module: nn.Module, batches: Sequence[Any], num_stages: int, blocks: Sequence[str] | None = None) -> Plan:
    if isinstance(module, Stepping):
        module.set_up(module.model)
    steps = [StepCalls("training_step", [(batch, ()) for batch in batches[:2]], True)]
    rehearse = partial(rehearsal.rehearse, module, steps=steps, device=torch.device("cpu"))
    return tried(partial(plan, module, num_stages, names=blocks, rehearse=rehearse, attempt=tried))


def assert_equal_when_cut(
    module: Stepping, batches: Sequence[Any], num_stages: int, blocks: Sequence[str] | None = None
) -> Plan:
    """Loss and gradients of all ``batches`` together, cut as planned, are those of the whole model."""
    cut = planned(copy.deepcopy(module), batches, num_stages, blocks)

    def make() -> Made:
        own = copy.deepcopy(module)
        own.set_up(own.model)
        return own, [partial(own.training_step, batch) for batch in batches]

    whole = compute(make, cut.chain, [range(len(cut.chain))])
    parts = compute(make, cut.chain, cut.module_spans, cut.travel["training_step"], cut.readers)
    torch.testing.assert_close(parts.outcomes, whole.outcomes, rtol=1e-6, atol=1e-6)
    assert whole.gradients
    scale = max(float(gradient.abs().max()) for gradient in whole.gradients.values())
    for name, gradient in whole.gradients.items():
        found = parts.gradients.get(name, torch.zeros_like(gradient))
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")
    return cut
