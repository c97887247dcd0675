"""Rehearsals: runs of a user's steps before training, to see what they do.

What the steps change stays changed, so they run in a process that ends afterwards
(:mod:`~lightning_sdpipe.partition.apart`), or on a copy of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from graphlib import CycleError
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
from lightning_sdpipe.partition.effects import logging_to
from lightning_sdpipe.partition.provenance import CalledAgain, ProvenanceTracer, Solitary
from lightning_sdpipe.partition.rehearsal_result import RehearsalResult, in_one_order
from lightning_sdpipe.partition.sample import copied
from lightning_sdpipe.partition.state_watch import Call, in_a_child, watch
from lightning_sdpipe.random_streams import RandomStreams

Alone = Callable[[Callable[[], Any]], Any]
"""Calls a function so that nothing but its result remains, in a child process if need be."""
_AT_MOST = 8  # runs of a step, as long as some skip blocks


@dataclass(frozen=True)
class StepCalls:
    """A step of a module: its calls (micro-batches with their further arguments), whether it trains, the context to run
    it in, and a micro-batch of a single sample, if training will have one and the calls do not."""

    name: str
    calls: Sequence[tuple[Any, tuple[int, ...]]]
    trains: bool
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    single: Any = None


def rehearse(
    module: nn.Module,
    chain: Sequence[str],
    steps: Sequence[StepCalls],
    device: torch.device,
    watch_in: Alone | None = in_a_child,
) -> RehearsalResult:
    """Trace the forwards of ``steps``. ``module`` is whole and on ``device``. Before that, ``watch_in`` runs the steps
    to watch Python state, so that their changes do not remain; None: it is not watched.

    Raises:
        Exception: a step raised it, or communicates with other processes, which do not rehearse.
    """
    streams = RandomStreams(device)
    traces = {}
    weights: dict[str, set[int]] = {}
    watched, lock_step = {}, dict[str, int]()
    for step in steps if watch_in else ():
        with _noting_repeats(step, lock_step):
            calls = _watched_calls(module, step, device)
            watched[step.name] = watch(module, chain, calls, not step.trains, watch_in or in_a_child)
    for step in (step for step in steps if step.name not in lock_step):
        with _noting_repeats(step, lock_step), unheard(module, step.trains, device):
            labels = ProvenanceTracer(module, chain, once=not step.trains)
            weights = labels.blocks_of_weights()
            for run in range(max(_AT_MOST, len(step.calls))):
                batch, arguments = step.calls[run % len(step.calls)]
                batch = copied(batch)
                streams.begin(run)
                with step.context():
                    labels.run(partial(getattr(module, step.name), batch, *arguments), batch)
                orders = {tuple(trace.order) for trace in labels.traces}
                used = set().union(*orders) | _used_by_weight(module, weights, labels.weights_read)
                # one more run if a step leaves tensors in attributes: only later runs record when that happens
                settled = len(orders) == 1 and len(used) == len(chain)
                if run + 1 >= len(step.calls) + labels.keeps and settled:
                    break
            traces[step.name] = labels.traces
    for name in [step.name for step in steps if not step.trains and step.name in traces]:
        try:
            in_one_order(trace.order for each in traces.values() for trace in each)
        except CycleError:
            lock_step[name] = max(len(trace.order) for trace in traces.pop(name))
    return RehearsalResult(chain, traces, weights, watched, lock_step)


@contextmanager
def _noting_repeats(step: StepCalls, lock_step: dict[str, int]) -> Iterator[None]:
    """If ``step`` calls a block again within the context, add it to ``lock_step`` with its calls of blocks so far."""
    try:
        yield
    except CalledAgain as again:
        lock_step[step.name] = again.args[0]


def _watched_calls(module: nn.Module, step: StepCalls, device: torch.device) -> list[Call]:
    streams = RandomStreams(device)

    @contextmanager
    def context() -> Iterator[None]:
        with unheard(module, step.trains, device), step.context(), Solitary():
            yield

    def run(number: int, batch: Any, arguments: tuple[int, ...]) -> Any:
        batch = copied(batch)
        streams.begin(number)
        return getattr(module, step.name)(batch, *arguments)

    return [Call(context, partial(run, number, *call)) for number, call in enumerate(step.calls)]


def stand_in_optimizers() -> tuple[list[torch.optim.Optimizer], list[LRSchedulerConfig]]:
    """Return stand-ins for the optimizer and its schedule, for steps that look at the learning rate; the real ones are
    made after the cut."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-3)
    return [optimizer], [LRSchedulerConfig(LambdaLR(optimizer, lambda _: 1.0))]


def count(module: nn.Module, step: StepCalls, rates: Rates, device: torch.device) -> Costs:
    """Count the costs of the first call of ``step``, run as in :func:`rehearse`.

    Raises:
        Exception: the step raised it, or communicates with other processes.
    """
    batch, arguments = step.calls[0]
    batch = copied(batch)
    with unheard(module, step.trains, device), step.context():
        RandomStreams(device).begin(0)
        return costs.count(partial(getattr(module, step.name), batch, *arguments), rates)


def count_apart(module: nn.Module, step: StepCalls, rates: Rates, run: Alone) -> Costs:
    """Return the costs that :func:`count` finds on the CPU when ``run`` calls it, perhaps in a child process."""
    modules = [*module.modules()]

    def packed() -> Costs:
        found = count(module, step, rates, torch.device("cpu"))
        return found.renamed({each: number for number, each in enumerate(modules)})

    found: Costs = run(packed)
    return found.renamed(dict(enumerate(modules)))


def _used_by_weight(module: nn.Module, weights: Mapping[str, set[int]], read: set[str]) -> set[int]:
    """Return the blocks whose parameters are all read, perhaps by user code between blocks (an embedding used as a
    table of queries, or a tied one). These need not be called to count as used."""
    parameters = {name for name, _ in module.named_parameters()}
    blocks = {name: held for name, held in weights.items() if name in parameters}
    unread = set().union(*(held for name, held in blocks.items() if name not in read))
    return set().union(*blocks.values()) - unread


@contextmanager
def unheard(module: nn.Module, trains: bool, device: torch.device) -> Iterator[None]:
    """Let a step of ``module`` run within this context without a trace: ``self.log`` and the loggers do nothing, and
    random generators and modes are restored afterwards. A step that ``trains`` has gradients and keeps the present
    modes; any other runs in evaluation mode."""
    modes = [(each, each.training) for each in module.modules()]
    trainer = trainer_of(module)
    loggers = [] if trainer is None else trainer.loggers
    if not trains:
        module.eval()
    if trainer is not None:
        trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        with (
            isolate_rng(include_cuda=device.type == "cuda"),
            logging_to(module, lambda *_, **__: None),
            torch.set_grad_enabled(trains),
        ):
            yield
    finally:
        if trainer is not None:
            trainer.loggers = loggers
        for each, training in modes:
            each.training = training
