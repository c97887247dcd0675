"""The asynchronous 1F1B of PipeDream: no flush between mini-batches (SDPipe §3.1, Algorithm 1, step A).

Stages are counted from 0 here, and stage j runs d = M − 1 − j mini-batches ahead of its backwards.

Order. At turn k, stage j runs the forward of mini-batch k and then, if k ≥ d, the backward of k − d. If the optimizer
steps at this turn, it applies a complete gradient, if there is one. The first d turns of an epoch only fill the
pipeline. At the end of the epoch the pipeline drains: the remaining backwards and updates follow, so every mini-batch
is trained on exactly once.

Stash. The forward of k runs on a copy of the weights at that time, and so does its backward (weight stashing). At most
d + 1 = M − j mini-batches are in flight on stage j, each with its copy; the last stage needs none.

Staleness. The gradient of mini-batch k is computed with weights that have seen the mini-batches up to k − d − 1, and is
applied to the newest weights, which have seen those up to k − 1: it is d steps late.

Shared weights. All owners apply the sum of their gradients of mini-batch k at the same turn, their first stage's. So
all copies stay equal, and a shared weight is as late as any weight of its first owner (``late_sums``).

Accumulation over A mini-batches. Every update is of the same A mini-batches on all stages, and is applied at the first
optimizer step at which they are complete: ⌈d / A⌉ updates late (``accumulation_windows``). With A ≥ M − 1 that is one,
as in PipeDream-2BW (Narayanan et al., ICML 2021).

Clipping by norm takes the norm over all stages that is known at that turn, and the loss scale of 16-bit mixed precision
is the last stage's (``stage_metadata``). A stage that overflows skips its own update of these mini-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_sdpipe import meter
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity.injector import DelayInjector
from lightning_sdpipe.p2p import labelled
from lightning_sdpipe.partition.message import Message
from lightning_sdpipe.pipeline.accumulation_windows import Lane, Window
from lightning_sdpipe.pipeline.gradients import GradientExchange, ReadySignal, loss_with_gradients, refuse_hooks
from lightning_sdpipe.pipeline.late_sums import LateSum
from lightning_sdpipe.pipeline.micro_batches import whole
from lightning_sdpipe.pipeline.shared_parameters import SharedParameters
from lightning_sdpipe.pipeline.stage_metadata import StageNotes
from lightning_sdpipe.pipeline.stage_runner import StageRunner, Step, begin_batch
from lightning_sdpipe.policies.announcing import share_before

_SHARE = share_before(1)


@dataclass(frozen=True)
class _InFlight:
    """A mini-batch whose backward is yet to come."""

    iteration: int
    inputs: Sequence[Tensor]  # the received tensors that need a gradient
    outputs: Sequence[Tensor]  # the sent tensors that get a gradient; on the last stage the loss
    weights: Sequence[Tensor]  # the leaves on which the forward ran, in the order of the parameters
    loss_scale: float  # known only on the last stage
    window: Window
    closes: bool  # whether it is the window's last mini-batch


@dataclass(frozen=True)
class Applied:
    """Parameters whose gradients belong to the same mini-batches."""

    parameters: Sequence[nn.Parameter]
    loss_scale: float  # the largest with which they were computed; already divided out


@dataclass(frozen=True)
class Norm:
    """The squared norm by which to clip the gradients of ``parameters``."""

    parameters: Sequence[nn.Parameter]
    square: float


class PipeDreamPipeline:
    """Trains this worker's stage.

    Args:
        runner: runs this stage's part of a step.
        parameters: this stage's trained parameters. The sequence may change when nothing is in flight.
        shared: the parameters that other stages hold, too.
        delays: slows this worker down, if asked to.
    """

    def __init__(
        self, runner: StageRunner, parameters: Sequence[nn.Parameter], shared: SharedParameters, delays: DelayInjector
    ) -> None:
        self.notes = StageNotes(runner.link)
        self.applied: list[Applied] = []
        """The parameters of the newest update, by mini-batches."""
        self._runner = runner
        self._parameters = parameters
        self._shared = shared
        self._delays = delays
        last = len(runner.link.ranks) - 1
        self._depth = last - runner.link.stage
        self._own = Lane(self._depth)
        self._sums = [(Lane(last - total.first_stage), total) for total in shared.late_sums(parameters)]
        self._clipped: list[LateSum] = []  # sums in the newest update that may be clipped
        self._norms_known = False  # whether the norms of the newest update are known
        self.late_only = False
        """Whether the newest update has only shared weights; their first owner makes no such update."""
        self._turn = 0
        self._open: Window | None = None
        self._in_flight: deque[_InFlight] = deque()
        self._steps = _Steps(runner.module)
        self._names = {id(p): f"module.{name}" for name, p in runner.module.named_parameters()}

    flushes = False
    """As :attr:`~lightning_sdpipe.pipeline.flush.FlushPipeline.flushes`."""

    @property
    def is_last(self) -> bool:
        return self._runner.is_last

    @property
    def filling(self) -> bool:
        """True if the next :meth:`train` gives nothing to apply, so that no optimizer step may follow it."""
        return not any(lane.would_be_due(self._turn) for lane in self._lanes)

    @property
    def draining(self) -> bool:
        """True if updates are left that only :meth:`drain` will make."""
        return any(lane.waiting for lane in self._lanes)

    @property
    def unfinished(self) -> int:
        """Number of mini-batches whose backward has not run yet."""
        return len(self._in_flight)

    def train(
        self,
        batch: Any,
        step: Step,
        iteration: int,
        exchange: GradientExchange | None = None,
        accumulated: bool = False,
        ready: ReadySignal | None = None,
    ) -> Tensor:
        """Run the forward of a mini-batch and the backward of an earlier one that is due.

        While the pipeline fills, none is due: ``exchange`` is not used, ``ready`` is not told, and ``backward`` of the
        returned loss puts no gradients in place. The loss is nan on all stages except the last. See
        :meth:`~lightning_sdpipe.pipeline.flush.FlushPipeline.train` for the rest.

        Raises:
            ConfigurationError: other layers train than at the beginning of this update.
        """
        self._shared.refuse_hooks()
        refuse_hooks(self._parameters, "pipedream", "computes it of copies of the weights, which have no hooks")
        self._after_update()
        ready = ready or ReadySignal()
        window = self._window(step.generation, accumulated)
        loss = self._forward(batch, step, iteration, window)
        if step.closes:
            self._close(window)
        due = [lane for lane in self._lanes if step.closes and lane.due(self._turn)]
        self._turn += 1
        if len(self._in_flight) > self._depth:
            self._backward(bool(due), exchange, ready)
        return self._update(loss, due, exchange, ready) if due else loss_with_gradients(loss, [], [])

    def drain(self, exchange: GradientExchange | None = None, ready: ReadySignal | None = None) -> Tensor:
        """Run the backwards that the oldest update needs; return a zero whose ``backward`` puts the update's gradients
        in place."""
        self._after_update()
        ready = ready or ReadySignal()
        due = [lane for lane in self._lanes if lane.waiting]
        oldest = self._own.waiting[0] if self._own.waiting else None
        left = sum(mini_batch.window is oldest for mini_batch in self._in_flight)
        for number in range(left):
            self._backward(number == left - 1, exchange, ready)
        if not left and not self._waits_for_owners:
            ready.passed("backward")
        return self._update(torch.zeros((), device=self._runner.link.device), due, exchange, ready)

    def finish(self) -> None:
        """Run the backwards of an unfinished update's mini-batches; called after the last :meth:`drain`."""
        self._after_update()
        while self._in_flight:
            self._backward(False, None, ReadySignal())
        self.notes.forget()
        for _, total in self._sums:
            total.finish()

    def rest(self, loss: Tensor) -> Tensor:
        """Return ``loss`` as a tensor whose ``backward`` puts the gradients of an unfinished update in place; called
        after :meth:`finish`."""
        if self._open is None:
            return loss_with_gradients(loss, [], [])
        self._close(self._open)
        self._pass_on(self._own.waiting[0])
        return self._update(loss, self._lanes, None, ReadySignal())

    def settle(self) -> None:
        """Wait until the neighbours have taken everything that was sent."""
        self._runner.link.settle()

    def norms(self, own_square: float) -> list[Norm]:
        """Return the norms over all stages by which to clip an update, with their parameters. All copies of a shared
        weight are clipped by the norm that their first owner knows.

        Args:
            own_square: the squared norm of this stage's gradients, without those that an earlier stage holds, too.

        Raises:
            ConfigurationError: this update was clipped before; stages tell each other one norm for an update.
            WorkerFailedError: another stage is gone.
        """
        if self._norms_known:
            raise ConfigurationError(
                "Gradients were clipped by norm twice in one update, and with schedule='pipedream' stages tell each "
                "other one norm for each. Clip once, in configure_gradient_clipping."
            )
        self._norms_known = True
        square = self.notes.squared_norm(own_square)
        for total in self._clipped:
            if total.is_first:
                total.tell_square(square)
        of_others = [Norm(total.parameters, total.hear_square()) for total in self._clipped if not total.is_first]
        elsewhere = {id(p) for norm in of_others for p in norm.parameters}
        return [Norm([p for p in self._parameters if id(p) not in elsewhere], square), *of_others]

    @property
    def _waits_for_owners(self) -> bool:
        return any(total.trained for _, total in self._sums)

    @property
    def _late(self) -> set[int]:
        """Ids of the shared parameters."""
        return {id(p) for _, total in self._sums for p in total.parameters}

    @property
    def _lanes(self) -> list[Lane]:
        return [self._own, *(lane for lane, _ in self._sums)]

    def _window(self, generation: int, accumulated: bool) -> Window:
        if self._open is None or not accumulated:  # Lightning zeroes what no step has applied
            self._open = Window(generation)
        elif self._open.generation != generation:
            raise ConfigurationError(
                "Layers were frozen or unfrozen between two mini-batches of one update, which with "
                "schedule='pipedream' adds up gradients of equal layers only. Do it where an update begins: "
                "batch_idx % accumulate_grad_batches == 0."
            )
        return self._open

    def _close(self, window: Window) -> None:
        window.closed_at, self._open = self._turn, None
        for lane in self._lanes:
            lane.waiting.append(window)

    def _forward(self, batch: Any, step: Step, iteration: int, window: Window) -> Tensor:
        runner = self._runner
        micro_batch = whole(batch)
        key = step.key(micro_batch)
        begin_batch([runner], batch, optimizers=step.optimizers)
        received = None
        if not runner.is_first:
            received = runner.link.receive_activations(key)
            self.notes.receive_down()
        self._delays.before_forward(iteration)
        weights: Sequence[Tensor] = self._parameters
        replaced: dict[str, Tensor] = {}
        if not runner.is_last:
            weights = [p.detach().clone().requires_grad_() for p in self._parameters]
            replaced = {self._names[id(p)]: stashed for p, stashed in zip(self._parameters, weights, strict=True)}
        with self._delays.computing(phase=meter.FORWARD):
            run = partial(runner.train, micro_batch, 0, step, received, None)
            outcome = functional_call(self._steps, replaced, (run,))
        scale = 1.0
        if isinstance(outcome, Message):
            runner.link.send_activations(outcome, key)
            self.notes.send_down()
            outputs = [t for t in outcome.tensors if t.requires_grad]
            loss = torch.full((), torch.nan, device=runner.link.device)
        else:
            outputs, loss = [outcome], outcome.detach()
            if step.loss_scale is not None:
                scale, loss = float(step.loss_scale), loss / step.loss_scale
        inputs = [t for t in received.tensors if t.requires_grad] if received else []
        self._in_flight.append(_InFlight(iteration, inputs, outputs, weights, scale, window, step.closes))
        return loss

    def _backward(self, before_update: bool, exchange: GradientExchange | None, ready: ReadySignal) -> None:
        """Run the oldest backward. Right before an update, it tells ``ready``, unless the update waits for other
        owners, and tells ``exchange`` each gradient, if the update consists of this mini-batch alone."""
        runner, oldest = self._runner, self._in_flight.popleft()
        outputs, gradients, scale = oldest.outputs, None, oldest.loss_scale
        self.notes.pay()
        if not runner.is_last:
            outputs, gradients = runner.link.receive_gradients(oldest.outputs)
            scale = self.notes.receive_scale()
            self.notes.gradient_received()
        self._delays.before_backward(oldest.iteration)
        runner.link.make_room()
        ready.begin(_SHARE, oldest.weights)
        if before_update and not self._waits_for_owners:
            ready.last_backward()
        leaves = [*oldest.inputs, *oldest.weights]
        hooks = []
        alone = oldest.closes and not oldest.window.gradients and scale == 1.0
        if exchange is not None and before_update and alone and self._own.waiting[0] is oldest.window:
            late = self._late
            hooks = [
                leaf.register_hook(partial(exchange.gradient_ready, number))  # type: ignore[no-untyped-call]
                for number, (leaf, p) in enumerate(zip(oldest.weights, self._parameters, strict=True))
                if number in exchange.early and id(p) not in late
            ]
        results: Sequence[Tensor | None] = [None] * len(leaves)
        if leaves and outputs:  # else nothing here needs a gradient
            with labelled("backward"), ready.computing(self._delays):
                results = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
        for hook in hooks:
            hook.remove()
        if before_update and not self._waits_for_owners:
            ready.passed("backward")
        to_send, found = results[: len(oldest.inputs)], results[len(oldest.inputs) :]
        if not runner.is_first:
            runner.link.send_gradients(oldest.inputs, to_send)
            self.notes.send_scale(scale)
            self.notes.gradient_sent()
        oldest.window.add(self._parameters, found, scale, to_send)
        if oldest.closes:
            self._pass_on(oldest.window)

    def _pass_on(self, window: Window) -> None:
        for _, total in self._sums:
            total.add(window)

    def _update(
        self, loss: Tensor, due: Sequence[Lane], exchange: GradientExchange | None, ready: ReadySignal
    ) -> Tensor:
        found: dict[nn.Parameter, Tensor] = {}
        self.applied, self._norms_known, self.late_only = [], False, self._own not in due
        if self._own in due:
            window = self._own.waiting.popleft()
            found |= window.gradients
            late = self._late
            self.applied.append(Applied([p for p in self._parameters if id(p) not in late], window.loss_scale))
        for lane, total in self._sums:
            if lane in due:
                window = lane.waiting.popleft()
                found |= total.take()
                self.applied.append(Applied(total.trained, window.loss_scale))
                if self.notes.norms:
                    total.begin_clipping()
                    self._clipped.append(total)
        if self._waits_for_owners:
            ready.passed("backward")
        gradients = [found.get(p) for p in self._parameters]
        return loss_with_gradients(loss, self._parameters, gradients, exchange=exchange)

    def _after_update(self) -> None:
        self.notes.pay()
        for total in self._clipped:
            total.settle()
        self._clipped = []


class _Steps(nn.Module):
    """Lets ``functional_call`` run any function with the module's parameters replaced."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Any) -> Any:
        return run()
