"""Computation of all stages of a pipeline in one process, each with a copy of the module, without a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_sdpipe.partition.cut_step import CutModel
from lightning_sdpipe.partition.message import Layout, Message
from lightning_sdpipe.partition.ownership import assign_owners, keep_only
from lightning_sdpipe.partition.travel import NOTHING_MORE, Travel

_CPU = torch.device("cpu")
Step = Callable[[], Any]
Made = tuple[nn.Module, Sequence[Step]]


@dataclass(frozen=True)
class Computed:
    """The results of a few micro-batches: the outcome of each (its tensors detached), the sums of the gradients, and
    the modules of the stages."""

    outcomes: Sequence[Any]
    gradients: Mapping[str, Tensor]
    modules: Sequence[nn.Module]


def compute(
    make: Callable[[], Made],
    chain: Sequence[str],
    spans: Sequence[range],
    travel: Travel | None = NOTHING_MORE,
    readers: Mapping[str, Iterable[int]] | None = None,
    seed: int = 0,
) -> Computed:
    """Run forward and backward of each micro-batch, stage by stage. With one span the result is that of one process.

    Args:
        make: a function that builds the module, with equal values each time, and one call of the user's step for each
            micro-batch. Called once for each stage, so that stages have nothing in common.
        chain: the paths of the blocks, in the order in which they run.
        spans: the blocks of each stage.
        travel: the values that cross the cuts besides the output of the last block before each.
        readers: the stages that hold a weight of another stage's block.
        seed: seed of the random streams.

    Raises:
        ConfigurationError: the module cannot be cut so.
    """
    made = [make() for _ in spans]
    for stage, (module, _) in enumerate(made):
        keep_only(module, assign_owners(module, chain, spans, readers=readers), stage, _CPU)
    cuts = [CutModel(module, chain, [span], _CPU) for (module, _), span in zip(made, spans, strict=True)]
    outcomes = []
    try:
        for number in range(len(made[0][1])):
            outcomes.append(_one(made, cuts, spans, number, travel, seed))
    finally:
        for cut in reversed(cuts):
            cut.restore()
    gradients: dict[str, Tensor] = {}
    for module, _ in made:
        for name, parameter in module.named_parameters():
            if not parameter.is_meta and parameter.grad is not None:
                gradients[name] = gradients[name] + parameter.grad if name in gradients else parameter.grad
    return Computed(outcomes, gradients, [module for module, _ in made])


def _one(
    made: Sequence[Made],
    cuts: Sequence[CutModel],
    spans: Sequence[range],
    number: int,
    travel: Travel | None,
    seed: int,
) -> Any:
    message: Message | None = None
    sent: list[tuple[Sequence[Tensor], list[Tensor]]] = []  # and as it arrived
    outcome: Any = None
    for (_, steps), cut, span in zip(made, cuts, spans, strict=True):
        cut.streams.begin(seed, number)
        outcome = cut.run(span, steps[number], message, travel)
        if isinstance(outcome, Message):
            arrived = [t.detach().clone().requires_grad_(t.requires_grad) for t in outcome.tensors]
            sent.append((outcome.tensors, arrived))
            message = Message(arrived, outcome.numbers, Layout.decode(outcome.layout.encode()))
    loss = outcome.get("loss") if isinstance(outcome, Mapping) else outcome
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
        for tensors, leaves in reversed(sent):
            back = [(t, a.grad) for t, a in zip(tensors, leaves, strict=True) if a.grad is not None]
            if back:
                torch.autograd.backward([t for t, _ in back], [gradient for _, gradient in back])
    return tree_map_only(Tensor, Tensor.detach, outcome)
