"""Rehearsals: runs of a user's steps before training, to see what they do.

What the steps change stays changed. So they run in a process that ends afterwards
(:mod:`~lightning_sdpipe.partition.apart`), or on a copy of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
from lightning_sdpipe.partition.apart import in_a_child
from lightning_sdpipe.partition.costs import Costs, Rates
from lightning_sdpipe.partition.effects import Original, intercept
from lightning_sdpipe.partition.provenance import ProvenanceTracer, Solitary, StepTrace, logging_to
from lightning_sdpipe.partition.rehearsal_result import RehearsalResult, in_one_order
from lightning_sdpipe.partition.sample import copied
from lightning_sdpipe.partition.state_watch import Call, watch
from lightning_sdpipe.random_streams import RandomStreams

_SECONDS = 3600.0  # that a run in a child may take
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
    module: nn.Module, chain: Sequence[str], steps: Sequence[StepCalls], device: torch.device, watches: bool = True
) -> RehearsalResult:
    """Run the forwards of ``steps`` with labelled tensors. ``module`` is whole and on ``device``. If it ``watches``,
    child processes watch Python state before; that can be done on the CPU alone.

    Raises:
        Exception: a step raised it, or the step communicates with other processes, which do not rehearse.
    """
    streams = RandomStreams(device)
    traces = {}
    weights: dict[str, set[int]] = {}
    evaluations = [step for step in steps if not step.trains]
    calls = {step.name: _until_called_again(module, chain, step, device, watches) for step in evaluations}
    lock_step = {name: number for name, number in calls.items() if number is not None}
    steps = [step for step in steps if step.name not in lock_step]
    watched = {each.name: watch(module, chain, _watched_calls(module, each, device)) for each in steps if watches}
    for step in steps:
        with unheard(module, step.trains, device):
            labels = ProvenanceTracer(module, chain)
            weights = labels.blocks_of_weights()
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
        traces[step.name] = labels.traces
    for step in evaluations:
        if step.name in traces and not _in_one_order(trace for each in traces.values() for trace in each):
            lock_step[step.name] = max(len(trace.order) for trace in traces.pop(step.name))
    return RehearsalResult(chain, traces, weights, watched, lock_step)


class _CalledAgain(BaseException):
    """Leaves a step that has called a block for the second time. It is not an Exception, so that a broad ``except`` in
    user code does not stop it."""


def _until_called_again(
    module: nn.Module, chain: Sequence[str], step: StepCalls, device: torch.device, forks: bool
) -> int | None:
    """Return how many blocks a call of ``step`` calls until it calls one again; None if it calls none twice. Where it
    ``forks``, a child of this process finds out, and changes nothing here."""

    def run() -> int | None:
        called: list[int] = []

        def call(block: int, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            called.append(block)
            if block in called[:-1]:
                raise _CalledAgain
            return original(*args, **kwargs)

        with ExitStack() as undo:
            for block, path in enumerate(chain):
                undo.callback(intercept(module.get_submodule(path), partial(call, block)))
            for each in _watched_calls(module, step, device):
                called.clear()
                with each.context():
                    try:
                        each.step()
                    except _CalledAgain:
                        return len(called)
        return None

    return in_a_child(run, _SECONDS) if forks else run()


def _in_one_order(traces: Iterable[StepTrace]) -> bool:
    try:
        in_one_order(trace.order for trace in traces)
    except CycleError:
        return False
    return True


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
    with unheard(module, step.trains, device), step.context():
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
def unheard(module: nn.Module, trains: bool, device: torch.device) -> Iterator[None]:
    """Let a step of ``module`` run within this context, with gradients and in training mode as it is now if it
    ``trains``. ``self.log`` and the loggers do nothing meanwhile; what is drawn, and the modes, are as before
    afterwards."""
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
