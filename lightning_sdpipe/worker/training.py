"""One worker's training: its part in each turn of Lightning's loop, and its way to sync points.

:class:`Phase` has the table of its phases and their events. The :class:`~lightning_sdpipe.sync.rendezvous.Rendezvous`
knows where the other workers are meanwhile.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Self

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sdpipe import meter
from lightning_sdpipe.errors import ConfigurationError, NonFiniteError, SchedulerError, WorkerFailedError
from lightning_sdpipe.exchange.buckets import FlatBucket
from lightning_sdpipe.loop import loop
from lightning_sdpipe.loop.batch_source import BatchSource
from lightning_sdpipe.loop.epoch_callback import Point, StreamSwitches
from lightning_sdpipe.loop.outlook import Outlook
from lightning_sdpipe.loop.precision import last_wait, loss_scale, scaler_of
from lightning_sdpipe.loop.python_state import PythonState
from lightning_sdpipe.pipeline.flush import FlushPipeline
from lightning_sdpipe.pipeline.gradients import ReadySignal, loss_with_gradients, put_back
from lightning_sdpipe.pipeline.micro_batches import refuse_time_first, weight_of
from lightning_sdpipe.pipeline.stage_runner import CollectiveGuard, Step
from lightning_sdpipe.scheduler.client.client import SchedulerClient
from lightning_sdpipe.scheduler.rows import About
from lightning_sdpipe.sync.rendezvous import Rendezvous, SyncPoint, SyncState
from lightning_sdpipe.sync.synchronizer import Synchronizer, TrainingState
from lightning_sdpipe.topology.groups import ProcessGroups, this_host
from lightning_sdpipe.worker.assembly import Assembled
from lightning_sdpipe.worker.backwards import Backwards


class Phase(StrEnum):
    """Phases of a worker that trains. Rows are phases, columns events (:class:`Event`), and cells the phase that
    follows; a dot is refused.

                batch     absence   fill      update     drain     leave
    STEPPING    STEPPING  ABSENT    FILLING   UPDATING   DRAINING  LEAVING
    FILLING     .         .         .         .          DRAINING  LEAVING
    UPDATING    .         .         .         .          .         LEAVING
    DRAINING    .         .         .         .          .         .
    LEAVING     .         .         .         .          .         .
    ABSENT      STEPPING  ABSENT    .         FINISHING  DRAINING  LEAVING
    FINISHING   .         .         .         .          .         LEAVING

    STEPPING and ABSENT last until the next event. The others end by themselves, back in the phase in which they began.
    So a worker drains before it leaves and before it is absent, and does not drain within an update.
    """

    STEPPING = "goes from mini-batch to mini-batch"
    FILLING = "runs a forward only, since its pipeline is not full yet (pipedream)"
    UPDATING = "trains a mini-batch within an optimizer step"
    DRAINING = "runs the backwards that are left in its pipeline, each with its update (pipedream)"
    LEAVING = "takes part no more, and waits for the other pipelines"
    ABSENT = "has no batch while others may have some, and trains nothing"
    FINISHING = "has no batch, and updates with gradients that earlier ones have left"


class Event(StrEnum):
    """Events that change the phase."""

    BATCH = "begin a turn with a batch"
    ABSENCE = "begin a turn without a batch"
    FILL = "be asked for an update while its pipeline is not full"
    UPDATE = "be asked for an update"
    DRAIN = "empty its pipeline"
    LEAVE = "wait for the other pipelines"


TRANSITIONS: Mapping[Phase, Mapping[Event, Phase]] = {
    Phase.STEPPING: {
        Event.BATCH: Phase.STEPPING,
        Event.ABSENCE: Phase.ABSENT,
        Event.FILL: Phase.FILLING,
        Event.UPDATE: Phase.UPDATING,
        Event.DRAIN: Phase.DRAINING,
        Event.LEAVE: Phase.LEAVING,
    },
    Phase.FILLING: {Event.DRAIN: Phase.DRAINING, Event.LEAVE: Phase.LEAVING},
    Phase.UPDATING: {Event.LEAVE: Phase.LEAVING},
    Phase.DRAINING: {},
    Phase.LEAVING: {},
    Phase.ABSENT: {
        Event.BATCH: Phase.STEPPING,
        Event.ABSENCE: Phase.ABSENT,
        Event.UPDATE: Phase.FINISHING,
        Event.DRAIN: Phase.DRAINING,
        Event.LEAVE: Phase.LEAVING,
    },
    Phase.FINISHING: {Event.LEAVE: Phase.LEAVING},
}


_ROUNDING = 1e-6  # of the parts of a mini-batch
_NEVER = 2**62
_KEPT = 64  # numbers that are looked at together, which takes as long as looking at one
_WITHIN_AN_UPDATE = (Phase.UPDATING, Phase.DRAINING, Phase.FINISHING)


def _refusal(phase: Phase, event: Event) -> ConfigurationError:
    if event in (Event.DRAIN, Event.LEAVE):
        return ConfigurationError(
            "Something communicates with the other pipelines within an optimizer step, while older mini-batches are "
            "still in this one. Do it in on_train_batch_end."
        )
    return ConfigurationError(
        f"A worker that {phase.value} cannot {event.value}. Let the Trainer fetch the batches and step the optimizer."
    )


class Phases:
    """The phases that one worker is in: the one that lasts, and those that have begun in it. As the context that
    :meth:`within` returns, it ends the innermost one."""

    def __init__(self) -> None:
        self.now = self.lasting = Phase.STEPPING
        """The innermost phase, and the one that lasts."""
        self.updating = False
        """True if the worker is in an update, innermost or not."""
        self._before: list[tuple[Phase, bool]] = []

    def go(self, event: Event) -> None:
        """Note that ``event`` happens, after which one of the lasting phases begins.

        Raises:
            ConfigurationError: the user's code has caused an event that may not happen in this phase.
        """
        follows = TRANSITIONS[self.now].get(event)
        if follows is None:
            raise _refusal(self.now, event)
        self.now = self.lasting = follows

    def within(self, event: Event) -> Self:
        """Begin the phase that follows ``event``; to be used as ``with phases.within(event):``, for the block.

        Raises:
            ConfigurationError: as :meth:`go`.
        """
        follows = TRANSITIONS[self.now].get(event)
        if follows is None:
            raise _refusal(self.now, event)
        self._before.append((self.now, self.updating))
        self.now, self.updating = follows, self.updating or follows in _WITHIN_AN_UPDATE
        return self

    def __enter__(self) -> None:
        """Enter the block of the phase that has begun."""

    def __exit__(self, *_: object) -> None:
        self.now, self.updating = self._before.pop()


class NonfiniteWatch:
    """Records when a worker's numbers ceased to be finite.

    A loss of one pipeline that is nan makes its parameters nan within a step, and averaging those of all others soon
    after. So each worker looks at its losses and at its parameters after each update, and reads what it found before it
    shares its model; if a number is not finite, the run ends before that model reaches the others. Looking does not
    wait for a GPU; reading does, which is why it is put off until then.

    Args:
        where: names this worker's stage and pipeline.
        buckets: its parameters; the sequence may change.
        device: of its tensors.
        losses: look at losses too. In 16-bit mixed precision they may overflow, and the step is skipped then.
    """

    def __init__(self, where: str, buckets: Sequence[FlatBucket], device: torch.device, losses: bool) -> None:
        self._where = where
        self._buckets = buckets
        self._losses = losses
        self._loss, self._parameters = _Earliest(device), _Earliest(device)

    def loss(self, loss: Tensor, batch: int) -> None:
        """Look at the loss of mini-batch ``batch``."""
        if self._losses:
            self._loss.add(loss, batch)

    def parameters(self, update: int) -> None:
        """Look at the parameters after ``update``."""
        for bucket in self._buckets:
            if bucket.trains:
                total = bucket.buffer.sum(dtype=torch.float32)  # finite if all are, and one pass over memory
                self._parameters.add(total, update)

    def check(self) -> None:
        """Raise NonFiniteError if anything was not finite."""
        loss, parameters = torch.stack([self._loss.found(), self._parameters.found()]).tolist()
        if loss == parameters == _NEVER:
            return
        what = f"the loss of mini-batch {loss}" if loss <= parameters else f"the parameters after update {parameters}"
        raise NonFiniteError(f"{what}, counted from 0 since training started, on {self._where}")


class _Earliest:
    """The earliest time of a number that is not finite, as a tensor on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._since = torch.tensor(_NEVER, device=device)
        self._seen: list[tuple[Tensor, int]] = []

    def add(self, value: Tensor, time: int) -> None:
        self._seen.append((value, time))
        if len(self._seen) == _KEPT:
            self.found()

    def found(self) -> Tensor:
        if self._seen:
            finite = torch.stack([value for value, _ in self._seen]).isfinite()
            times = torch.tensor([time for _, time in self._seen], device=self._device)
            self._since = torch.minimum(self._since, times.masked_fill(finite, _NEVER).min())
            self._seen = []
        return self._since


class FirstFailure:
    """A context for waits for other workers; its errors say which worker failed first, and why.

    Args:
        explain: raises the cause of an error, if it is known.
    """

    def __init__(self, explain: Callable[[Exception], None]) -> None:
        self._explain = explain

    def __enter__(self) -> None:
        """Enter the wait."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and isinstance(error, WorkerFailedError | SchedulerError):
            self._explain(error)


@dataclass(kw_only=True)
class Training:
    """The training that hooks and batch sources (:class:`~lightning_sdpipe.loop.batch_source.Turns`) call.

    Args:
        trainer: the Trainer whose loop calls the hooks.
        parts: the parts that this worker runs.
        sync: its half of the synchronisation method.
        rendezvous: its synchronisation state.
        client: its connection to the scheduler.
        groups: its process groups.
        draws: switches between the random streams of batches and steps.
        guard: is told when a step of the user's runs, in which some collectives are refused.
        watch: looks for values that are not finite; None not to look.
        first_failure: context for waits for other workers, which may have failed.
        state: hands on what steps change in Python where they end; None if they change nothing.
    """

    trainer: Trainer
    parts: Assembled
    sync: Synchronizer
    rendezvous: Rendezvous
    client: SchedulerClient
    groups: ProcessGroups
    draws: StreamSwitches
    guard: CollectiveGuard
    watch: NonfiniteWatch | None
    first_failure: AbstractContextManager[None]
    state: PythonState | None = None
    mini_batches: int = 0
    """Mini-batches that this worker has begun since training started."""
    updates: int = 0
    """Number of its next update, counted alike in all pipelines: absences count. All stages begin with the same
    number."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """What the last training step returned besides its loss, if the model is not cut and the step ran once."""
    underway: bool = False
    """True while batches are dealt: each pipeline is at a batch number of its own until the next sync point."""
    _first_update: int = 0
    _phases: Phases = field(default_factory=Phases)
    _gives_nothing: bool = False  # this turn, without a batch, adds nothing to the mean with others
    _closes: bool = False  # Lightning asks for an optimizer step after this mini-batch
    _uneven: bool = False  # pipelines may have different numbers of batches in this epoch
    _accumulated: bool = False  # gradients of earlier mini-batches wait for the next update
    _without_loss: float = 0.0  # part of the mini-batch for which the training step has returned None
    _skipped: bool = False  # that is all of it
    _weighs: bool = False  # the gradients of its mini-batch are all that this pipeline gives to a mean
    _steps: int = 0  # of optimizers in the last turn with a batch, in manual optimization
    _meeting: SyncPoint | None = None  # where the others have met, when this worker is out of data
    _outlook: Outlook | None = None
    _asked: int = 0  # how often a step was asked for, also without a batch
    _samples: float = 1.0  # in the last mini-batch, as its weight
    _last_loss: Tensor = field(default_factory=lambda: torch.zeros(()))

    def __post_init__(self) -> None:
        self._device = self.trainer.strategy.root_device
        self.meter = meter.current()
        self.waited_before = self.meter.seconds(*meter.FOR_NEIGHBOURS)
        self._is_cut = self.groups.mesh.num_stages > 1
        last = last_wait(self.trainer, self.groups.mesh.num_stages, self.parts.pipeline.flushes)
        self.ready = ReadySignal(last, self.announce)
        # a method that announces nothing joins after the step, and no backward is watched
        self._heard = self.ready if type(self.sync).announce is not Synchronizer.announce else None
        self._scales = scaler_of(self.trainer.precision_plugin) is not None
        self._look_before_sharing: Callable[[], None] = (lambda: None) if self.watch is None else self.watch.check
        self.backwards = Backwards(self.sync, self.meter, self.first_failure)

    @property
    def phase(self) -> Phase:
        """Phase of this worker now."""
        return self._phases.now

    @property
    def updating(self) -> bool:
        """True during an optimizer step; the next backward is for it."""
        return self._phases.updating

    @property
    def together(self) -> bool:
        """True if all workers of the stage are at the same point of training."""
        return self.rendezvous.place is SyncState.TOGETHER

    # ---------------------------------------------------------------- turns

    def begin_at(self, update: int) -> None:
        """Let training start at number ``update``, where another worker or a checkpoint was."""
        self._first_update = update

    def begin(self) -> None:
        """Start training: count from the first update on, and describe this worker to the scheduler."""
        self.mini_batches, self.updates, self._accumulated = 0, self._first_update, False
        size = getattr(self.trainer.train_dataloader, "batch_size", None)
        samples = size * self.trainer.accumulate_grad_batches if isinstance(size, int) else None
        options = self.trainer.strategy.options  # type: ignore[attr-defined]
        sync = options.sync if isinstance(options.sync, str) else type(options.sync).__name__
        parts, divided = options.num_micro_batches, options.batch_by_speed
        self.client.about = About(
            this_host(), str(self._device), self.groups.rank, samples, options.schedule, parts, sync, divided
        )
        self._outlook = Outlook(self.trainer)
        self.client.does(self._outlook.doing)

    def begin_batch(self, batch: Any, source: BatchSource) -> None:
        """Take part from now on, unless there is nothing to train; Lightning shows ``batch`` to the hooks."""
        self._take_over_freezing()
        if self._phases.now is Phase.ABSENT:
            return
        strategy: Any = self.trainer.strategy
        if self.mini_batches == 0 and strategy.num_micro_batches > 1 and source.portion is None:
            size = getattr(self.trainer.train_dataloader, "batch_size", None)
            refuse_time_first(batch, size, self.trainer.lightning_module)
        if self.together:
            with self.first_failure:
                self.rendezvous.join()

    def step(self, batch: Any, arguments: tuple[Any, ...], source: BatchSource) -> Tensor | None:
        """Run the user's training step. Return a loss whose ``backward`` puts the gradients in place; None if the step
        returned None in a run of one process, which then skips the batch."""
        self._asked += 1
        share = 1 / self.trainer.accumulate_grad_batches if self.parts.pipeline.flushes else 1.0
        if self._phases.lasting is Phase.ABSENT:  # hooks then see the loss of the batch before
            self.draws.between_steps(Point.STEP_ENDED)
            loss = self._last_loss.to(self._device, copy=True).requires_grad_()
            if self._gives_nothing and self.updating:  # with the gradients of others
                scale = loss_scale(self.trainer.precision_plugin, self._device) if self._scales else None
                trained = self.sync.replica.trained
                nothing = [None] * len(trained)
                return loss_with_gradients(loss, trained, nothing, scale, self.sync.gradients, share=share)
            return self.parts.pipeline.rest(loss) if self.updating else loss
        precision, freezing = self.trainer.precision_plugin, self.parts.freezing
        with self.guard.running("training_step"), self.first_failure, freezing:
            context, stream, closes = precision.train_step_context, self.draws.stream, self._closes
            scale = loss_scale(precision, self._device) if self._scales else None
            generation, portion = freezing.generation, source.portion
            whole = 1.0 if portion is None else portion.share
            optimizers, returns = (self.trainer.optimizers, None) if self._is_cut else ((), partial(self._take, whole))
            step = Step(
                "training_step", arguments, context, stream, scale, share, closes, generation, portion, optimizers,
                returns,
            )  # fmt: skip
            exchange = self.sync.gradients if self._phases.updating else None
            if self.sync.by_samples:
                self._samples = weight_of(batch, self.trainer.lightning_module)
                if exchange is not None or self.sync.gradients is None:
                    self.sync.weigh(self._samples)
            accumulated = self._accumulated and not source.zeroes_gradients
            self.others, self._without_loss, self._skipped = {}, 0.0, False
            # which pipeline trains a part of a joint batch must not matter
            self._weighs = exchange is not None and not accumulated and portion is None
            loss = self.parts.pipeline.train(batch, step, self.mini_batches, exchange, accumulated, self._heard)
            if self.state is not None:
                self.state.hand_on_late()
        self.draws.between_steps(Point.STEP_ENDED)
        self._last_loss = loss.detach()
        if self.watch is not None and self.parts.runners[-1].is_last:
            self.watch.loss(self._last_loss, self.mini_batches)
        self.mini_batches += 1
        self._accumulated = not self._closes
        if self._skipped and self._weighs:
            self.sync.weigh(1.0)
        if self._skipped and self.trainer.world_size == 1:  # Lightning then runs no backward
            if exchange is not None and not accumulated:
                exchange.finish()
            return None
        return loss

    def _take(self, whole: float, outcome: Any, part: float) -> None:
        """Take what the step has returned, other than a tensor, for this ``part`` of the ``whole`` mini-batch. None
        skips the part: as in an accumulation, it adds nothing to the gradient. A mini-batch of which all parts are
        skipped has no weight in the mean of gradients, unless pipelines divide one batch."""
        strategy: Any = self.trainer.strategy
        if isinstance(outcome, Mapping) and strategy.num_micro_batches == 1:
            self.others = {name: value for name, value in outcome.items() if name != "loss"}
        if outcome is not None:
            return
        self._without_loss += part
        self._skipped = self._without_loss > whole - _ROUNDING
        if self._weighs and self._skipped:
            self.sync.weigh(0.0)

    def step_by_hand(self, batch: Any, arguments: tuple[Any, ...]) -> Any:
        """Run a training step of manual optimization, which runs backwards and steps optimizers itself; then share the
        model, if any has stepped. A turn without a batch, just before the others meet, counts their steps."""
        if self._phases.now is Phase.ABSENT:
            self.draws.between_steps(Point.STEP_ENDED)
            self.updates += self.sync.gradients is None and self._steps > 0  # else that of others comes with gradients
            meeting = self._meeting
            if meeting is not None and loop.position(self.trainer) == meeting.position - meeting.closing:
                loop.count_steps(self.trainer, meeting.steps)
            return None
        self._steps = 0
        if self.sync.by_samples and self.sync.gradients is not None:
            self.sync.weigh(weight_of(batch, self.trainer.lightning_module))
        delays, context = self.parts.delays, self.trainer.precision_plugin.train_step_context
        delays.before_forward(self.mini_batches)
        with self.backwards.of_update(self.updates, delays.computing(phase=meter.FORWARD)):
            output = self.evaluate("training_step", batch, arguments, context)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if self.watch is not None and isinstance(loss, Tensor):
            self.watch.loss(loss.detach(), self.mini_batches)
        self.mini_batches += 1
        if self._steps:
            with self.first_failure:
                self.announce()
            self._share()
        return output

    def stepped_by_hand(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Run one ``step`` of ``optimizer`` in manual optimization."""
        with self.meter.spans[meter.OPTIMIZER]:
            output = step()
        self._steps += 1
        self.draws.go_on(optimizer)
        return output

    def update(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run Lightning's optimizer step, whose ``closure`` runs :meth:`step`, unless the pipeline is still filling.

        Raises:
            ConfigurationError: the optimizer stepped without the closure, and the model is cut.
        """
        if self._phases.now is Phase.ABSENT:  # applies what gradients there are, if others may have another model
            accumulated, self._accumulated = self._accumulated, False
            if accumulated and self.sync.gradients is None:
                with self._phases.within(Event.UPDATE):
                    return self._update(optimizer, closure, alone=True, **kwargs)
            if self._gives_nothing:
                with self.first_failure:
                    updates = self.sync.begin_without_batch(self.updates)
                if updates:
                    with self._phases.within(Event.UPDATE):
                        return self._update(optimizer, closure, **kwargs)
            else:
                self.updates += 1
            return closure()
        before = self.mini_batches
        self._closes = True
        try:
            if self.parts.pipeline.filling:
                with self._phases.within(Event.FILL):
                    output = closure()
            else:
                with self._phases.within(Event.UPDATE):
                    with self.first_failure:
                        self.sync.begin(self.updates)
                    output = self._update(optimizer, closure, **kwargs)
        finally:
            self._closes = False
        if self._is_cut and self.mini_batches == before:
            raise ConfigurationError(_STEPPED_ALONE)
        return output

    def evaluate(self, name: str, batch: Any, arguments: tuple[Any, ...], context: Any) -> Any:
        """Run another of the user's steps: return what the last of this worker's stages returned."""
        with self.guard.running(name), self.first_failure:
            step = Step(name, arguments, context, self.draws.stream)
            lock_step, runners = self.parts.lock_step, self.parts.runners
            if lock_step is not None and lock_step.runs(name):
                output = runners[-1].evaluate_together(batch, step, lock_step)
            else:
                output = [runner.evaluate(batch, step) for runner in runners][-1]
        self.draws.between_steps(Point.STEP_ENDED)
        return output

    def announce(self) -> None:
        """Announce that nothing but this worker's own computing can hold up its update any more."""
        if self.together:  # the user's step has communicated
            self.rendezvous.join()
        self.sync.announce(self.updates)

    # -------------------------------------------------------------- sync points

    def pause(self) -> None:
        """Finish what is in the pipeline and make all replicas equal."""
        _refuse_underway(self)
        self.drain()
        with self._phases.within(Event.LEAVE), self.first_failure:
            self.parts.pipeline.settle()
            self._look_before_sharing()
            self.rendezvous.pause(loop.position(self.trainer), self.trainer.global_step)

    def come_together(self) -> None:
        """Join the other pipelines before they communicate, so that none waits for this worker in the scheduler.

        Raises:
            ConfigurationError: not all pipelines reach this point.
        """
        if self.guard.in_step and self._uneven:
            raise ConfigurationError(
                "The training step communicates with other pipelines, and a pipeline that has fewer batches than they "
                "would not take part. Use a map-style dataset of equal shards (as Lightning's own sampler makes them)."
            )
        if self.together:
            return
        _refuse_underway(self)
        if not self.guard.in_step:
            self.drain()
        with self._phases.within(Event.LEAVE), self.first_failure:
            self._look_before_sharing()
            self.rendezvous.come_together(loop.position(self.trainer), self.trainer.global_step)

    # ------------------------------------------- turns, as the source of batches sees them

    def show(self, metrics: Mapping[str, float]) -> None:
        """Show users ``metrics``, which all workers have; see :class:`~lightning_sdpipe.loop.batch_source.Turns`, as
        for all that follow."""
        if self._outlook is not None:
            self._outlook.metrics = metrics

    def begin_shards(self, uneven: bool) -> None:
        self._uneven, self._meeting = uneven, None
        self._phases.go(Event.BATCH)

    def wait_for_others(self) -> SyncPoint:
        self.drain()
        with self.first_failure:
            self._look_before_sharing()
            self._meeting = self.rendezvous.wait_for_others(loop.position(self.trainer), self.trainer.global_step)
            return self._meeting

    def begin_turn(self, has_batch: bool, gives_nothing: bool = False) -> None:
        self._phases.go(Event.BATCH if has_batch else Event.ABSENCE)
        self._gives_nothing = gives_nothing

    def begin_dealt(self) -> None:
        self._take_over_freezing()
        self._phases.go(Event.BATCH)
        self._uneven, self.underway = False, True
        self.client.about = self.client.about and self.client.about.following_speed()
        with self.first_failure:
            self.rendezvous.join()

    @property
    def called(self) -> int | None:
        return self.sync.called

    def take_part(self, called: int) -> None:
        self.sync.take_part(called)

    def rest(self) -> None:
        self.drain()
        with self._phases.within(Event.LEAVE), self.first_failure:
            self.parts.pipeline.settle()
            self._look_before_sharing()
            self.rendezvous.rest()

    def go_on(self) -> None:
        with self.first_failure:
            self.rendezvous.rejoin()

    def stop_dealing(self) -> None:
        self.client.stop_dealing()

    def end_dealt(self) -> None:
        self.underway = False
        self.come_together()

    @property
    def unfinished(self) -> int:
        return self.parts.pipeline.unfinished

    @property
    def loose(self) -> int:
        return self.sync.loose * self.trainer.accumulate_grad_batches

    # ---------------------------------------------------------------- within

    def _take_over_freezing(self) -> None:
        """Meet all other workers, if the user has frozen or unfrozen layers since the mini-batch before."""
        freezing = self.parts.freezing
        if not freezing.changed():
            return
        with self.first_failure:  # before any wait for stages that may have changed nothing
            for runner in self.parts.runners:
                runner.link.tell_freezing()
            if self.together:
                self.rendezvous.tell_freezing(True)
        self.pause()
        with self.first_failure:
            freezing.take_over()
            self.rendezvous.join()

    def _update(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, alone: bool = False, **kwargs: Any
    ) -> Any:
        """Step with the gradients that ``closure`` puts in place, and synchronise the outcome unless ``alone``."""
        if not alone and self._heard is not None:
            self._heard.expect()
        try:
            with self.meter.spans[meter.OPTIMIZER]:
                module, run = model or self.trainer.lightning_module, self._counted(closure, optimizer)
                output = self.trainer.precision_plugin.optimizer_step(optimizer, model=module, closure=run, **kwargs)
            self.draws.end_update(optimizer)
            if self._heard is not None:
                self._heard.passed("step")
            elif not alone and self.together:  # the user's step has communicated
                self.rendezvous.join()
        finally:
            if self._heard is not None:
                self._heard.drop()
        self._share(alone)
        return output

    def _counted(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        """Wrap ``closure`` for one step of ``optimizer``, which may call it several times if the model is not cut. If
        it is, a second call raises ConfigurationError: it would run the whole pipeline, and tell others that an update
        follows."""
        calls = 0

        def run() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1 and self._is_cut:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} evaluates its closure several times in a step, and a pipeline can run "
                    "it once only. Use an optimizer that needs one gradient for a step, such as AdamW; with "
                    "num_stages=1 this works."
                )
            if not self._is_cut and (calls > 1 or self.sync.takes_several_backwards) and self.sync.gradients:
                self.sync.begin_backward(self.updates, calls)
            asked = self._asked
            with self.meter.spans[meter.OTHER], self.first_failure:  # the closure's time is not the optimizer's
                loss = closure()
                if self._asked == asked and not self._is_cut:
                    self._average_what_there_is()
            without = self._skipped and all(parameter.grad is None for parameter in self.sync.replica.trained)
            return None if without else loss  # as Lightning says that there is nothing to unscale

        return run

    def _average_what_there_is(self) -> None:
        """Average the gradients of closures that the user has called before the optimizer's step."""
        exchange, trained = self.sync.gradients, self.sync.replica.trained
        absent, self._accumulated = self._phases.lasting is Phase.ABSENT, False
        if exchange is None or not self.parts.pipeline.flushes or (absent and not self._gives_nothing):
            return
        if not absent:
            if self.sync.by_samples:
                self.sync.weigh(self._samples)
            exchange.complete([parameter.grad for parameter in trained])
        put_back(trained, exchange.finish())

    def _share(self, alone: bool = False) -> None:
        """End an update, and synchronise its outcome unless ``alone``."""
        if self.watch is not None:
            self.watch.parameters(self.updates)
        self.updates += 1
        if alone:
            return
        with self.first_failure:
            if self.sync.shares_next:
                self._look_before_sharing()
            with self.meter.spans[meter.EXCHANGE]:
                self.sync.synchronise()
        self.client.step_ended(self.updates - 1, self.sync.statistics.seconds_waiting)

    def drain(self) -> None:
        pipeline, strategy = self.parts.pipeline, self.trainer.strategy
        if isinstance(pipeline, FlushPipeline) or (self.updating and not pipeline.draining):
            return

        def backward() -> Tensor:
            loss = pipeline.drain(self.sync.gradients, self._heard)
            strategy.optimizers[0].zero_grad()
            return strategy.backward(loss / self.trainer.accumulate_grad_batches, strategy.optimizers[0])

        with self._phases.within(Event.DRAIN), torch.inference_mode(False), torch.enable_grad(), self.first_failure:
            late = 0
            while pipeline.draining:
                self._update(strategy.optimizers[0], backward)
                late += pipeline.late_only
                strategy.optimizers[0].zero_grad()  # Lightning does not, within an accumulation
            self.updates -= late  # decisions about one stage hold for others at the same number
            pipeline.finish()
            pipeline.settle()


class StateByHand:
    """State of a worker in manual optimization, as replicas that average gradients take it over: that of its
    optimizers, the update and backward that it is at, and the gradients of an update that has begun."""

    def __init__(self, state: TrainingState, training: Callable[[], Training]) -> None:
        self._state, self._training = state, training

    def digest(self) -> int:
        """See :class:`~lightning_sdpipe.sync.synchronizer.TrainingState`, as for the other methods."""
        training = self._training()
        text = repr((self._state.digest(), training.updates, training.backwards.place))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)

    def save(self) -> bytes:
        training, file = self._training(), io.BytesIO()
        gradients = [parameter.grad for parameter in training.sync.replica.trained]
        torch.save((self._state.save(), training.updates, training.backwards.place, gradients), file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        training = self._training()
        trained = training.sync.replica.trained
        state, training.updates, training.backwards.place, gradients = torch.load(io.BytesIO(saved), weights_only=True)
        put_back(trained, [g if g is None else g.to(p.device) for p, g in zip(trained, gradients, strict=True)])
        self._state.load(state)

    def of(self, parameters: Sequence[nn.Parameter]) -> TrainingState:
        return self._state.of(parameters)


def _refuse_underway(training: Training) -> None:
    if training.underway and not training.together:
        raise ConfigurationError(
            "Something communicates with the other pipelines, saves a checkpoint, or ends the epoch between two sync "
            "points, where batches are dealt and each pipeline is at another one. Do it at validation, at the end of "
            "an epoch, or by ModelCheckpoint; or give SDPipeStrategy(data='sharded')."
        )


_STEPPED_ALONE = (
    "optimizer.step() was called without the closure that optimizer_step was given, so that its gradients were not "
    "synchronised with the other pipelines. Pass it on: optimizer.step(closure=optimizer_closure); with num_stages=1 "
    "this works."
)
