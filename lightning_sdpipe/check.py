"""``sdpipe check IMPORT.PATH:factory --stages M``: compares what the cut model and the whole one compute.

A training step runs on two micro-batches, first whole, then cut into stages, each on a module that the factory builds
anew. This finds errors that no other check can: values that leave a block unseen by stand-ins and torch operations,
such as Python numbers in a global variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition import factory
from lightning_sdpipe.partition.cut_step import CutModel
from lightning_sdpipe.partition.message import NOTHING_MORE, Layout, Message, Travel
from lightning_sdpipe.partition.ownership import assign_owners, keep_only
from lightning_sdpipe.partition.plan import Plan, plans
from lightning_sdpipe.partition.sample import copied
from lightning_sdpipe.pipeline.micro_batches import MicroBatch, split

TOLERANCE = 1e-4
"""Largest ratio of a gradient's difference to the gradient's largest value that rounding may explain."""
_SHOWN = 10

_CPU = torch.device("cpu")
Step = Callable[[], Any]
Made = tuple[nn.Module, Sequence[Step]]


def main(arguments: Sequence[str]) -> int:
    """Print the comparison; return 1 if the results differ, else 0."""
    parser = factory.parser("check", "Compares the loss and every gradient of a cut model with the whole one's.")
    given = parser.parse_args(arguments)
    built, batch = factory.build(given.factory)
    factory.step_of(given.factory, built, batch)
    micro_batches = split(batch, 2, built)
    parts = [part.batch for part in micro_batches]
    make = partial(_make, given.factory, parts)
    module, _ = make()
    rehearse = partial(factory.rehearse, module, batches=parts)
    count = partial(factory.count, module, parts[0])
    cuts = factory.cuts(given)
    plan_all = partial(plans, module, cuts, given.blocks, None, rehearse, count, attempt=factory.tried)
    compared = [(of, *compare(make, cut)) for of, cut in factory.by_cut(factory.tried(plan_all))]
    splitting = compare_split(partial(_make, given.factory), batch, micro_batches)
    print(*(f"{of}{report}" for of, _, report in compared), splitting, sep="\n")
    return int(max(difference for _, difference, _ in compared) > TOLERANCE)


def compare(make: Callable[[], Made], cut: Plan) -> tuple[float, str]:
    """Run the model that ``make`` builds, whole and cut.

    Returns:
        The largest relative difference of a loss or gradient, and a table of the largest ones.

    Raises:
        ConfigurationError: the factory builds another model each time, or the model cannot be cut this way.
    """
    (first, _), (second, _) = make(), make()
    for (name, one), (_, other) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        if not torch.equal(one, other):
            raise ConfigurationError(
                f"The factory gives {name!r} other values each time, so nothing can be compared. Let what it draws "
                "come from torch's generator, which is seeded before each call."
            )
    travel = cut.travel.get("training_step")
    whole = compute(make, cut.chain, [range(len(cut.chain))])
    parts = compute(make, cut.chain, cut.module_spans, travel, cut.readers)
    differences = _differences(whole, parts)
    worst = max(difference for _, difference in differences)
    shown = sorted(differences, key=lambda row: -row[1])[:_SHOWN]
    rows = "\n".join(f"{difference:10.1e}  {name}" for name, difference in shown)
    verdict = "the same" if worst <= TOLERANCE else "NOT the same"
    stages = "1 stage computes" if len(cut.spans) == 1 else f"{len(cut.spans)} stages compute"
    return worst, f"{stages} {verdict} as the whole model. Relative differences, largest first:\n{rows}"


def compare_split(make: Callable[[Sequence[Any]], Made], batch: Any, parts: Sequence[MicroBatch]) -> str:
    """Compare the loss of ``batch`` with the weighted mean of the losses of its ``parts``, in evaluation mode. Nothing
    else reveals a batch that is split along a dimension other than samples."""
    losses = []
    module, steps = make([batch, *(part.batch for part in parts)])
    module.eval()
    for step in steps:
        torch.manual_seed(0)
        losses.append(_loss(step()).detach().double())
    whole, *each = losses
    mean = sum((part.weight * loss for part, loss in zip(parts, each, strict=True)), torch.zeros_like(whole))
    difference = _relative(whole, mean)
    if difference <= TOLERANCE:
        return "The loss of the batch is the mean of those of its micro-batches."
    return (
        f"The loss of the batch is NOT the mean of those of its micro-batches: the relative difference is "
        f"{difference:.1e}. So a step depends on num_micro_batches: the loss compares samples, or is a mean over "
        "something else (define weigh_batch), the step draws, or tensors have no samples in their first dimension "
        "(define split_batch)."
    )


def _make(path: str, parts: Sequence[Any]) -> Made:
    torch.manual_seed(0)
    module, _ = factory.build(path)
    if hasattr(module, "log"):
        vars(module)["log"] = lambda *_, **__: None
    step: Any = module.training_step
    return module, [partial(step, part, 0) for part in copied(parts)]


def _differences(whole: Computed, cut: Computed) -> list[tuple[str, float]]:
    losses = [
        (f"loss of micro-batch {number}", _relative(_loss(one), _loss(other)))
        for number, (one, other) in enumerate(zip(whole.outcomes, cut.outcomes, strict=True))
    ]
    scale = max((float(gradient.abs().max()) for gradient in whole.gradients.values()), default=1.0)
    gradients = []
    for name in whole.gradients.keys() | cut.gradients.keys():
        one, other = whole.gradients.get(name), cut.gradients.get(name)
        nothing = torch.zeros_like(one if one is not None else other)  # type: ignore[arg-type]  # not both are None
        gradients.append(
            (name, _relative(nothing if one is None else one, nothing if other is None else other, 1e-4 * scale))
        )
    return [*losses, *gradients]


def _loss(outcome: Any) -> Tensor:
    return torch.as_tensor(outcome["loss"] if isinstance(outcome, dict) else outcome)


def _relative(one: Tensor, other: Tensor, least: float = 1e-12) -> float:
    """Return the ratio of the largest difference to the largest value of ``one``; infinite if a difference is nan."""
    difference = (one - other).abs().max() / (one.abs().max() + least)
    return float("inf") if bool(difference.isnan()) else float(difference)


@dataclass(frozen=True)
class Computed:
    """The results of a few micro-batches: each one's outcome (its tensors detached), the summed gradients, and the
    modules of the stages."""

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
    """Run forward and backward of each micro-batch, stage by stage. One span computes what one process does; with more
    spans, the forwards of all micro-batches come before the first backward, as in a pipeline.

    Args:
        make: builds the module, with equal values each time, and one call of the user's step for each micro-batch.
            Called once for each stage, so that stages share nothing.
        chain: the paths of the blocks, in the order in which they run.
        spans: the blocks of each stage.
        travel: the values that cross the cuts besides the output of the last block before each.
        readers: the stages that hold a weight of another stage's block.
        seed: seed of the random streams.

    Raises:
        ConfigurationError: the module cannot be cut there.
    """
    made = [make() for _ in spans]
    for stage, (module, _) in enumerate(made):
        keep_only(module, assign_owners(module, chain, spans, readers=readers), stage, _CPU)
    cuts = [CutModel(module, chain, [span], _CPU) for (module, _), span in zip(made, spans, strict=True)]
    outcomes = []
    try:
        under_way: list[_Forward] = []
        for number in range(len(made[0][1])):
            under_way.append(_forward(made, cuts, spans, number, travel, seed))
            if len(spans) == 1:
                outcomes.append(_backward(under_way.pop()))
        outcomes += map(_backward, under_way)
    finally:
        for cut in reversed(cuts):
            cut.restore()
    gradients: dict[str, Tensor] = {}
    for module, _ in made:
        for name, parameter in module.named_parameters():
            if not parameter.is_meta and parameter.grad is not None:
                gradients[name] = gradients[name] + parameter.grad if name in gradients else parameter.grad
    return Computed(outcomes, gradients, [module for module, _ in made])


@dataclass(frozen=True)
class _Forward:
    """A micro-batch's forward: the step's outcome, and the tensors that crossed each cut, as sent and as received."""

    outcome: Any
    crossed: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]


def _forward(
    made: Sequence[Made],
    cuts: Sequence[CutModel],
    spans: Sequence[range],
    number: int,
    travel: Travel | None,
    seed: int,
) -> _Forward:
    message: Message | None = None
    crossed: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
    outcome: Any = None
    for (_, steps), cut, span in zip(made, cuts, spans, strict=True):
        cut.streams.begin(seed, number)
        outcome = cut.run(span, steps[number], message, travel)
        if isinstance(outcome, Message):
            arrived = [t.detach().clone().requires_grad_(t.requires_grad) for t in outcome.tensors]
            crossed.append((outcome.tensors, arrived))
            message = Message(arrived, outcome.numbers, Layout.decode(outcome.layout.encode()))
    return _Forward(outcome, crossed)


def _backward(forward: _Forward) -> Any:
    outcome = forward.outcome
    loss = outcome.get("loss") if isinstance(outcome, Mapping) else outcome
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
        for tensors, leaves in reversed(forward.crossed):
            back = [(t, a.grad) for t, a in zip(tensors, leaves, strict=True) if a.grad is not None]
            if back:
                torch.autograd.backward([t for t, _ in back], [gradient for _, gradient in back])
    return tree_map_only(Tensor, Tensor.detach, outcome)
