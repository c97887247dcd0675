"""Pipelines with a flush: every micro-batch of a mini-batch is finished before the optimizer steps.

Forwards and backwards run in the order of 1F1B or GPipe or, if a worker has several stages, of a schedule of
``torch.distributed.pipelining``. The result is that of one process that accumulates over the same micro-batches.

The last stage computes the loss of a mini-batch and sends it to all other stages, since hooks receive it on every rank
(``on_train_batch_end``, ``on_before_backward``), and their decisions must not differ between stages. It sends the loss
before the gradients of its last backward, so a stage that has received those gradients does not wait for the loss. The
loss travels as a float64, with the number of its type, which only the last stage knows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

from lightning_sdpipe import meter, p2p
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity.injector import DelayInjector
from lightning_sdpipe.p2p import Tag
from lightning_sdpipe.partition.message import Message
from lightning_sdpipe.partition.sample import copied
from lightning_sdpipe.pipeline.gradients import (
    GradientExchange,
    ReadySignal,
    hooked,
    loss_with_gradients,
    put_back,
    refuse_hooks,
    reported_to,
    set_aside,
)
from lightning_sdpipe.pipeline.link import StageLink
from lightning_sdpipe.pipeline.micro_batches import MicroBatch, split, take_apart
from lightning_sdpipe.pipeline.shared_parameters import SharedParameters
from lightning_sdpipe.pipeline.stage_runner import StageRunner, Step, StepLog, begin_batch
from lightning_sdpipe.policies.announcing import share_before

_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class SharedLoss:
    """Sends the loss of a mini-batch from the last stage to the others; this is one worker's end.

    Args:
        link: the link of this worker's last stage.
        num_workers: M. The last worker holds the last stage.
    """

    def __init__(self, link: StageLink, num_workers: int) -> None:
        self._group, self._device = link.group, link.device
        self._ranks = link.ranks[:num_workers]
        self._is_last = link.stage == len(link.ranks) - 1
        # NCCL's messages have no tags, so this one could be confused with others; but NCCL does not make the host wait
        self._afterwards = p2p.backend_for(link.device, link.group) != "gloo"
        self._sent: list[p2p.Transfer] = []
        self._parts: list[Tensor] = []
        self._total = self._message = torch.zeros(())
        self._type: torch.dtype | None = None

    def add(self, part: Tensor) -> None:
        """Add the loss of one micro-batch, on the last stage."""
        self._parts.append(part.detach())

    def exchange(self) -> None:
        """Send the complete loss, or wait for it on the other stages; called before the last backward."""
        if self._is_last:
            parts = self._parts[0] if len(self._parts) == 1 else torch.stack(self._parts)
            self._total = parts.sum()  # a copy, since the user's code may change its own
            self._parts = []
        *others, last = self._ranks
        if not others:
            return
        self._message = torch.zeros(2, dtype=torch.float64, device=self._device)
        if self._is_last:
            self._message[0], self._message[1] = self._total, _TYPES.index(self._total.dtype)
        if self._afterwards:
            return
        if self._is_last:
            self._sent += [p2p.send([self._message], rank, self._group, Tag.LOSS, f"rank {rank}") for rank in others]
        else:
            p2p.receive([self._message], last, self._group, Tag.LOSS, f"the last stage (rank {last})").wait()

    def take(self) -> Tensor:
        """Return the loss; called after the last backward."""
        if self._afterwards and len(self._ranks) > 1:
            dist.broadcast(self._message, self._ranks[-1], group=self._group)
        if self._is_last:
            return self._total
        if self._type is None or not self._afterwards:  # with NCCL only once, since reading makes the host wait
            self._type = _TYPES[int(self._message[1])]
        return self._message[0].to(self._type)

    def settle(self) -> None:
        """Wait until the other stages have received the loss."""
        for transfer in self._sent:
            transfer.wait()
        self._sent.clear()


Forward = Callable[[int, Message | None], Message | Tensor]

_NOTHING = nullcontext()
_SPLITS = torch.__version__ >= "2.13"  # earlier ones fail if no output needs an input, or if gradients join


class CutStage:
    """Stage ``stage_index`` of ``num_stages``, on worker ``stage_index % num_workers`` of its pipeline.

    :func:`run_ahead` and the schedules of ``torch.distributed.pipelining`` decide the order of forwards and backwards.
    torch's ``PipelineStage`` fixes every shape in advance, needs a gradient for everything that it sends, and runs an
    extra forward to learn shapes. This class offers schedules the same methods, but communicates inside its forward and
    backward.

    A mini-batch begins with :meth:`begin`; then a schedule calls the other methods.
    """

    def __init__(self, module: nn.Module, stage_index: int, num_stages: int, num_workers: int, link: StageLink) -> None:
        self.submod = module
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = link.device
        self.group: dist.ProcessGroup = link.group
        self.group_size = num_workers
        self.group_rank = stage_index % num_workers  # schedules number workers by their first stage
        self.is_first = stage_index == 0
        self.is_last = stage_index == num_stages - 1
        self.has_backward = True
        self.output_chunks: list[Any] = [()]  # empty; torch 2.9 merges the chunks though nothing uses them
        self.args_recv_info: dict[int, tuple[Any, ...]] = {0: ()}
        self.act_send_info: dict[int, list[Any]] = {}
        self._link = link
        self._own = [p for p in module.parameters() if not p.is_meta]

    def begin(
        self,
        count: int,
        keys: Sequence[Hashable],
        forward: Forward,
        before_backward: Callable[[], None],
        computing: Callable[[], AbstractContextManager[None]],
        last_backward: AbstractContextManager[object],
    ) -> None:
        """Prepare for a mini-batch.

        Args:
            count: number of its micro-batches.
            keys: the key of each micro-batch, which identifies the shapes of its messages, if there are any.
            forward: runs this stage's part of the step on micro-batch ``i``, given the received message; returns the
                message to send or, on the last stage, the loss.
            before_backward: called before each backward, when the gradients from which it starts have come.
            computing: entered while gradients are computed.
            last_backward: entered around the last backward, if it computes parameters' gradients.
        """
        self._computing = computing
        self._last_backward = last_backward
        self._backwards_left = count
        self._before_backward = before_backward
        self._keys = keys
        self._forward = forward
        self._received: dict[int, Sequence[Tensor]] = {}
        self._sent: dict[int, Sequence[Tensor]] = {}
        self._left: dict[int, Callable[[], object]] = {}

    def forward_one_chunk(self, index: int, *_: Any, **__: Any) -> Tensor | None:
        """Receive micro-batch ``index``, run it and send it on. Return the loss on the last stage."""
        received = None
        if not self.is_first:
            received = self._link.receive_activations(self._keys[index])
            if index + 1 < len(self._keys):
                self._link.expect_activations(self._keys[index + 1])
            self._received[index] = [t for t in received.tensors if t.requires_grad]
        outcome = self._forward(index, received)
        if isinstance(outcome, Message):
            self._link.send_activations(outcome, self._keys[index])
            self._sent[index] = [t for t in outcome.tensors if t.requires_grad]
            return None
        return outcome

    def backward_one_chunk(self, index: int, loss: Tensor | None = None, full_backward: bool = True, **_: Any) -> None:
        """Receive the gradients of micro-batch ``index`` (the last stage starts from its loss), compute those of the
        parameters and of the received activations, and send the latter back.

        Without ``full_backward``, the parameters' gradients are left for :meth:`backward_weight_one_chunk`, if torch
        can split the backward.
        """
        if not full_backward and not _SPLITS:
            full_backward, self._left[index] = True, lambda: None
        outputs, gradients = self._outputs_and_gradients(index, loss)
        self._before_backward()
        inputs = self._received.pop(index, ())
        self._backwards_left -= 1
        if full_backward:
            last = _NOTHING if self._backwards_left else self._last_backward
            with p2p.labelled("backward", index), self._computing(), last:
                if outputs:  # else nothing that was sent needs a gradient
                    torch.autograd.backward(outputs, gradients)
            found: Sequence[Tensor | None] = [t.grad for t in inputs]
        else:
            with p2p.labelled("backward", index):
                found = self._backward_inputs(index, outputs, gradients, inputs)
        if not self.is_first:
            self._link.send_gradients(inputs, found)

    def _backward_inputs(
        self, index: int, outputs: Sequence[Tensor], gradients: Sequence[Tensor] | None, inputs: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of ``inputs``; leave those of the parameters for later."""
        if not outputs:
            self._left[index] = lambda: None
            return [None] * len(inputs)
        # torch finds the parameters between the inputs and a single output, so several outputs are joined into one
        output: Tensor = _Joined.apply(gradients or [torch.ones_like(outputs[0])], *outputs)  # type: ignore[no-untyped-call]
        weights = [p for p in self._own if p.requires_grad]
        found: Sequence[Tensor | None] = ()
        if inputs:
            with self._computing():
                found, groups = stage_backward_input([output], None, list(inputs), iter(weights))
        if any(gradient is not None for gradient in found):
            # if several groups use a parameter (a shared scale), the graph is needed more than once
            self._left[index] = lambda: stage_backward_weight(iter(weights), groups, retain_graph=True)
        else:  # no input needs a gradient, only parameters do
            self._left[index] = lambda: torch.autograd.backward(outputs, gradients)
        return found or [None] * len(inputs)

    def backward_weight_one_chunk(self, index: int, **_: Any) -> None:
        """Compute the parameters' gradients of micro-batch ``index`` that :meth:`backward_one_chunk` left."""
        with p2p.labelled("backward of weights", index), self._computing():
            self._left.pop(index)()

    def _outputs_and_gradients(self, index: int, loss: Tensor | None) -> tuple[Sequence[Tensor], list[Tensor] | None]:
        if loss is not None:
            return [loss], None
        return self._link.receive_gradients(self._sent.pop(index))

    # Schedules call the methods below, which do nothing, since communication happens above.

    def get_fwd_recv_ops(self, index: int) -> list[dist.P2POp]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def clear_runtime_states(self) -> None:
        pass

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        pass

    def scale_grads(self, grad_scale_factor: int) -> None:
        pass

    def release_fwd_send_outputs(self, index: int) -> None:
        pass


class _Joined(torch.autograd.Function):
    """One output in place of several; its backward gives each of them its own gradient."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.ones((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.gradients)


_Order = tuple[Callable[[], object], float]
"""A function that runs the micro-batches, and the share of the last backward that is done when this worker is ready."""


class FlushPipeline:
    """Trains this worker's stage or stages; some schedules give a worker several, M apart.

    Args:
        runners: run these stages' parts of a step.
        num_workers: M, the workers of the pipeline.
        parameters: the trained parameters of these stages; the sequence may change between mini-batches.
        shared: the parameters that other stages hold, too.
        delays: slows this worker down, if asked to.
        schedule: ``"1f1b"`` or ``"gpipe"`` for one stage, ``"interleaved_1f1b"`` or ``"zero_bubble"`` for several.
        num_micro_batches: how many micro-batches a mini-batch is split into.
    """

    def __init__(
        self,
        runners: Sequence[StageRunner],
        num_workers: int,
        parameters: Sequence[nn.Parameter],
        shared: SharedParameters,
        delays: DelayInjector,
        schedule: str,
        num_micro_batches: int,
    ) -> None:
        self._runners = runners
        self._parameters = parameters
        self._shared = shared
        self._delays = delays
        self._stages = [
            CutStage(runner.module, runner.link.stage, len(runner.link.ranks), num_workers, runner.link)
            for runner in runners
        ]

        @cache
        def ordered(parts: int) -> _Order:
            share = share_before(parts) if len(self._stages) == 1 else 0.0
            return _order(schedule, self._stages, parts), share

        self._order_of = ordered
        self._order_of(num_micro_batches)  # raises now if the schedule cannot order them
        self._splits_backwards = schedule == "zero_bubble"
        self._is_cut = len(runners[0].link.ranks) > 1
        self._num_micro_batches = num_micro_batches
        self._multiple = num_workers if len(runners) > 1 else 1
        self._loss = SharedLoss(runners[-1].link, num_workers)

    flushes = True
    """Whether all stages have all gradients of a mini-batch when it ends."""
    filling = False  # nothing is under way between mini-batches
    unfinished = 0

    def train(
        self,
        batch: Any,
        step: Step,
        iteration: int,
        exchange: GradientExchange | None = None,
        accumulated: bool = False,
        ready: ReadySignal | None = None,
    ) -> Tensor:
        """Run forward and backward of a mini-batch. What is sent last may still be under way afterwards.

        Args:
            batch: the whole mini-batch.
            step: the user's method.
            iteration: counts mini-batches.
            exchange: replaces the gradients before the update that follows.
            accumulated: whether earlier mini-batches have left gradients for the same update.
            ready: is told when the update that follows needs nothing more from others: before the last backward or
                within it (``policies/announcing.py``) or, if this worker shares parameters with other stages, when
                their gradients have come.

        Returns:
            The loss, a scalar whose ``backward`` puts the gradients in place.
        """
        self.settle()
        self._refuse_hooks()
        if step.portion is None:
            micro_batches = split(batch, self._num_micro_batches, self._runners[0].module, self._multiple)
        else:
            micro_batches = take_apart(batch, step.portion)
        begin_batch(self._runners, batch, micro_batches, step.optimizers)
        log = StepLog() if len(micro_batches) > 1 or len(self._runners) > 1 else None

        before = set_aside(self._parameters)
        delays, spans = self._delays, meter.current().spans
        plain = not (delays.injects or delays.measures)
        if delays.injects:
            delays.before_forward(iteration)
        keys = [step.key(micro_batch) for micro_batch in micro_batches] if self._is_cut else []
        backwards = len(self._stages) * len(micro_batches)
        left = iter(range(backwards, 0, -1))
        waits_for_owners = self._shared.exist and self._shared.train
        run, share = self._order_of(len(micro_batches))
        if ready is not None:
            ready.begin(share, self._parameters)

        def before_backward() -> None:
            number = next(left)
            if number == backwards and delays.injects:
                delays.before_backward(iteration)
            if number == 1:
                self._before_last_backward(ready, waits_for_owners)

        computing: Callable[[], AbstractContextManager[None]] = delays.computing
        if ready is not None:
            computing = partial(ready.computing, delays)
        elif plain:
            computing = partial(next, repeat(spans[meter.BACKWARD]))  # runs no Python code
        last_backward = self._reporting(exchange if not accumulated else None)
        for number, (runner, stage) in enumerate(zip(self._runners, self._stages, strict=True)):
            parts = _copied(micro_batches) if number else micro_batches  # each stage's step may change its batch
            forward = partial(_forward, runner, None if plain else delays, spans, parts, step, log, self._loss)
            stage.begin(len(micro_batches), keys, forward, before_backward, computing, last_backward)
        run()
        if waits_for_owners:
            self._shared.sum_gradients()
            if ready is not None:
                ready.passed("backward")
        if log is not None:
            log.replay(self._runners[0].module.log)
        gradients = set_aside(self._parameters)
        put_back(self._parameters, before)
        part = step.share if step.portion is None else step.share * step.portion.share
        loss = self._loss.take() if part == 1.0 else self._loss.take() / part
        return loss_with_gradients(
            loss, self._parameters, gradients, step.loss_scale, exchange, accumulated, step.share
        )

    def rest(self, loss: Tensor) -> Tensor:
        """Return ``loss`` unchanged, since the gradients of an accumulation are in place already."""
        return loss

    def settle(self) -> None:
        """Wait until the neighbours have taken everything that was sent."""
        for runner in self._runners:
            runner.link.settle()
        self._loss.settle()

    def _refuse_hooks(self) -> None:
        """Raise ConfigurationError for hooks on gradients that would see other values than in one process."""
        if self._shared.exist:
            self._shared.refuse_hooks()
        if self._splits_backwards:
            why = "computes gradients of parameters apart from the backward that would call it"
            refuse_hooks(self._parameters, "zero_bubble", why)
        with_hooks = hooked(self._parameters)
        if with_hooks and any(p._post_accumulate_grad_hooks and p.grad is not None for p in with_hooks):
            raise ConfigurationError(
                "register_post_accumulate_grad_hook sees the gradient of one mini-batch in a pipeline, and that of all "
                "so far in one process. Change the gradient in on_before_optimizer_step, or do not accumulate "
                "(accumulate_grad_batches=1)."
            )

    def _before_last_backward(self, ready: ReadySignal | None, waits_for_owners: bool) -> None:
        self._loss.exchange()
        if not waits_for_owners:  # else the sum over the owners, after the backward, waits anyway
            for runner in self._runners:
                runner.link.make_room()
            if ready is not None:
                ready.last_backward()

    def _reporting(self, exchange: GradientExchange | None) -> AbstractContextManager[object]:
        """Return a context for a stage's last backward, which reports gradients that no other stage adds to."""
        if exchange is None or not exchange.early or len(self._stages) > 1:
            return _NOTHING
        shared = {id(p) for p in self._shared.parameters} if self._shared.exist else set()
        private = [number for number in exchange.early if id(self._parameters[number]) not in shared]
        return reported_to(exchange, self._parameters, private)


def _copied(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    batches = copied([micro_batch.batch for micro_batch in micro_batches])
    return [replace(micro_batch, batch=batch) for micro_batch, batch in zip(micro_batches, batches, strict=True)]


def _forward(
    runner: StageRunner,
    delays: DelayInjector | None,
    spans: Sequence[meter.Span],
    micro_batches: Sequence[MicroBatch],
    step: Step,
    log: StepLog | None,
    loss: SharedLoss,
    index: int,
    received: Message | None,
) -> Message | Tensor:
    with spans[meter.FORWARD] if delays is None else delays.computing(phase=meter.FORWARD):
        outcome = runner.train(micro_batches[index], index, step, received, log)
    if isinstance(outcome, Tensor):
        loss.add(outcome)
    return outcome


def _order(name: str, stages: Sequence[CutStage], parts: int) -> Callable[[], object]:
    """Return a function that runs the micro-batches of a mini-batch in the order of the schedule ``name``.

    Raises:
        ConfigurationError: the schedule cannot order this number of micro-batches.
    """
    if name not in ("interleaved_1f1b", "zero_bubble"):
        (stage,) = stages
        # with fewer micro-batches than stages, 1F1B's order is GPipe's
        ahead = stage.num_stages - stage.stage_index if name == "1f1b" and parts >= stage.num_stages else parts
        return partial(run_ahead, stage, parts, ahead)
    kind = ScheduleInterleaved1F1B if name == "interleaved_1f1b" else ScheduleInterleavedZeroBubble
    torch_stages: Any = list(stages)  # CutStage has the methods that schedules call, without torch's class
    try:
        schedule = kind(torch_stages, parts, loss_fn=lambda loss, _: loss, scale_grads=False)
    except ValueError as error:
        raise ConfigurationError(
            f"schedule={name!r} cannot order num_micro_batches={parts} over {stages[0].num_stages} "
            f"stages on {stages[0].group_size} workers ({error}). Use a multiple of {stages[0].group_size}."
        ) from error
    skip_initialisation(schedule)
    return partial(schedule.step, target=torch.arange(parts), return_outputs=False)


def skip_initialisation(schedule: Any) -> None:
    """Keep a torch schedule from preparing its stages, which prepare themselves."""
    for name in ("_initialize_stage", "_initialize_stages"):  # torch's name differs between versions
        if hasattr(schedule, name):
            setattr(schedule, name, lambda *_, **__: None)


def run_ahead(stage: CutStage, parts: int, ahead: int) -> None:
    """Run ``parts`` micro-batches through a stage whose forwards are at most ``ahead`` of its backwards: in 1F1B
    (Harlap et al. 2018) by the number of stages from it to the end, in GPipe (Huang et al. 2019) by all ``parts``."""
    losses = [stage.forward_one_chunk(index) for index in range(ahead)]
    for index in range(parts):
        stage.backward_one_chunk(index, losses[index])
        if index + ahead < parts:
            losses.append(stage.forward_one_chunk(index + ahead))
