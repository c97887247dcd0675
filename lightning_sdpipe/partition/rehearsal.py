"""Rehearsals: runs of a user's steps before training, to see what they do, without leaving a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_sdpipe.lightning_internals import trainer_of
from lightning_sdpipe.partition import costs
from lightning_sdpipe.partition.costs import Costs, Rates
from lightning_sdpipe.partition.mementos import Mementos
from lightning_sdpipe.partition.provenance import ProvenanceTracer
from lightning_sdpipe.partition.rehearsal_result import RehearsalResult
from lightning_sdpipe.partition.sample import copied
from lightning_sdpipe.random_streams import RandomStreams

_AT_MOST = 8  # runs of a step, while blocks are skipped in some of them or in all


@dataclass(frozen=True)
class StepCalls:
    """A step of a module with the arguments of its calls (micro-batches, with their further arguments), whether it
    trains, the context to run it in, and a micro-batch of one sample, if the run will have such, but the calls have
    not."""

    name: str
    calls: Sequence[tuple[Any, tuple[int, ...]]]
    trains: bool
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    single: Any = None


def rehearse(
    module: nn.Module, chain: Sequence[str], steps: Sequence[StepCalls], device: torch.device
) -> RehearsalResult:
    """Run the forwards of ``steps`` with labelled tensors. ``module`` is whole and on ``device``; it is left
    unchanged.

    Raises:
        Exception: a step raised it, or the step communicates with other processes, which do not rehearse.
    """
    streams = RandomStreams(device)
    traces = {}
    weights: dict[str, set[int]] = {}
    for step in steps:
        with without_a_trace(module), torch.set_grad_enabled(step.trains):
            if not step.trains:
                module.eval()
            labels = ProvenanceTracer(module, chain)
            weights = labels.blocks_of_weights()
            try:
                for run in range(max(_AT_MOST, len(step.calls))):
                    batch, arguments = step.calls[run % len(step.calls)]
                    batch = copied(batch)
                    streams.begin(run)
                    with step.context():
                        labels.run(partial(getattr(module, step.name), batch, *arguments), batch)
                    orders = {tuple(trace.order) for trace in labels.traces}
                    used = set().union(*orders) | _used_by_weight(module, weights, labels.weights_read)
                    # one more run where a step leaves tensors: only later runs see when that happens
                    settled = len(orders) == 1 and len(used) == len(chain)
                    if run + 1 >= len(step.calls) + labels.keeps and settled:
                        break
            finally:
                labels.restore()
        traces[step.name] = labels.traces
    return RehearsalResult(chain, traces, weights)


def stand_in_optimizers() -> tuple[list[torch.optim.Optimizer], list[LRSchedulerConfig]]:
    """Return stand-ins for the optimizer and its schedule, for steps that look at the learning rate: the real ones are
    made when the module has been cut."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-3)
    return [optimizer], [LRSchedulerConfig(LambdaLR(optimizer, lambda _: 1.0))]


def count(module: nn.Module, step: StepCalls, rates: Rates, device: torch.device) -> Costs:
    """Count the costs of the first call of ``step``, as :func:`rehearse` runs it.

    Raises:
        Exception: the step raised it, or the step communicates with other processes.
    """
    batch, arguments = step.calls[0]
    batch = copied(batch)
    with without_a_trace(module), torch.set_grad_enabled(step.trains), step.context():
        if not step.trains:
            module.eval()
        RandomStreams(device).begin(0)
        return costs.count(partial(getattr(module, step.name), batch, *arguments), rates)


def _used_by_weight(module: nn.Module, weights: Mapping[str, set[int]], read: set[str]) -> set[int]:
    """Return the blocks whose parameters are all used, perhaps by user code alone (an embedding as a table of queries,
    or tied to another one): nothing skips them by chance."""
    parameters = {name for name, _ in module.named_parameters()}
    blocks = {name: held for name, held in weights.items() if name in parameters}
    unread = set().union(*(held for name, held in blocks.items() if name not in read))
    return set().union(*blocks.values()) - unread


@contextmanager
def without_a_trace(module: nn.Module, *others: Any) -> Iterator[list[str]]:
    """Undo the changes of a step within this context: gradients, buffers (BatchNorm's statistics), the random states
    of torch, NumPy and Python, and what :class:`~lightning_sdpipe.partition.mementos.Mementos` finds from ``module``
    and ``others``: attributes, containers, generators, globals. ``self.log`` and the loggers do nothing meanwhile.

    Yields:
        The names of what cannot be put back.
    """
    gradients = [(p, p.grad) for p in module.parameters()]
    buffers = [(b, b.detach().clone()) for b in module.buffers() if not b.is_meta]
    mementos = Mementos(module, *others)
    for parameter, _ in gradients:
        parameter.grad = None
    if hasattr(module, "log"):
        vars(module)["log"] = lambda *_, **__: None
    try:
        with isolate_rng(), _without_loggers(trainer_of(module)):
            yield mementos.lost
    finally:
        mementos.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


@contextmanager
def _without_loggers(trainer: Any) -> Iterator[None]:
    if trainer is None:
        yield
        return
    loggers = trainer.loggers
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers
