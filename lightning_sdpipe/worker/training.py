"""One worker's training: what it does in each turn of Lightning's loop, and on its way to where all workers meet.

phase      what the worker does                                       it ends
FILLING    forwards only, so no update follows (pipedream)            when the pipeline is full
STEPPING   trains a mini-batch, and updates where Lightning asks      with the turn
DRAINING   runs the backwards that are left, each with its update     when the pipeline is empty
LEAVING    takes part no more, and waits for the other pipelines      when all are there, with equal replicas if it is a
                                                                      pause
ABSENT     has no batch while others may have some: trains nothing    where the others meet, or with everybody's last
                                                                      batch

A worker drains before it leaves, and before it is absent. It does neither within an update. Where the others are
meanwhile is the :class:`~lightning_sdpipe.sync.rendezvous.Rendezvous`'s to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.loop import loop
from lightning_sdpipe.loop.adaptation import last_wait
from lightning_sdpipe.loop.closures import STEPPED_ALONE, once
from lightning_sdpipe.loop.collective_guard import CollectiveGuard
from lightning_sdpipe.loop.loss_scale import loss_scale
from lightning_sdpipe.loop.nonfinite import NonfiniteWatch
from lightning_sdpipe.loop.python_state import PythonState
from lightning_sdpipe.loop.stream_switches import Point, StreamSwitches
from lightning_sdpipe.pipeline.micro_batches import Portion, refuse_time_first
from lightning_sdpipe.pipeline.ready_signal import ReadySignal
from lightning_sdpipe.pipeline.stage_runner import Step
from lightning_sdpipe.scheduler.client.client import SchedulerClient
from lightning_sdpipe.sync.rendezvous import Rendezvous, SyncPoint, SyncState
from lightning_sdpipe.sync.synchronizer import Synchronizer
from lightning_sdpipe.topology.groups import ProcessGroups
from lightning_sdpipe.worker.assembly import Assembled


class Phase(Enum):
    """See the table above."""

    FILLING = auto()
    STEPPING = auto()
    DRAINING = auto()
    LEAVING = auto()
    ABSENT = auto()


@dataclass
class Training:
    """What the strategy's hooks call.

    Args:
        trainer: whose loop calls them.
        parts: what this worker runs.
        sync: its half of the synchronisation method.
        client: its line to the scheduler.
        groups: its place.
        draws: name the random streams of batches.
        whereabouts: is told when a step runs.
        watch: looks for numbers that are not finite; None if nobody does.
        first_failure: around what waits for others, who may have failed.
        portion: what the batch of this turn is of one that all pipelines train together.
        make_rendezvous: says where it is beside the others.
        state: hands on what the end of a step changes in Python; None if nobody looks at it.
    """

    trainer: Trainer
    parts: Assembled
    sync: Synchronizer
    client: SchedulerClient
    groups: ProcessGroups
    draws: StreamSwitches
    whereabouts: CollectiveGuard
    watch: NonfiniteWatch | None
    first_failure: Callable[[], AbstractContextManager[None]]
    portion: Callable[[], Portion | None] = lambda: None
    make_rendezvous: Callable[[Synchronizer], Rendezvous] = Rendezvous
    state: PythonState | None = None
    mini_batches: int = 0
    """That this worker has begun since training started."""
    first_update: int = 0
    """Its number, for one that goes on where another was, or from a checkpoint."""
    updates: int = 0
    """Its next one, counted alike in all pipelines: absences count. Whenever training begins it is so in all stages."""
    updating: bool = False
    """Is an optimizer step under way, which the next backward is for?"""
    underway: bool = False
    """Are batches being dealt, so that each pipeline is at a number of its own until the next pause?"""
    _now: Phase | None = None  # DRAINING or LEAVING
    _closes: bool = False  # Lightning asks for an optimizer step after this mini-batch
    _absent: bool = False
    _accumulated: bool = False  # gradients of earlier mini-batches wait for the next update
    _meeting: SyncPoint | None = None  # where this worker, which is out of data, will find the others
    _last_loss: Tensor = field(default_factory=lambda: torch.zeros(()))

    def __post_init__(self) -> None:
        self._device = self.trainer.strategy.root_device
        self.rendezvous = self.make_rendezvous(self.sync)
        last = last_wait(self.trainer, self.groups.mesh.num_stages, self.parts.pipeline.flushes)
        self.ready = ReadySignal(last, self.announce)
        # before others may get this worker's model
        self._look: Callable[[], None] = (lambda: None) if self.watch is None else self.watch.check

    @property
    def phase(self) -> Phase:
        """What this worker does now."""
        if self._now is not None:
            return self._now
        if self._absent:
            return Phase.ABSENT
        return Phase.FILLING if self.parts.pipeline.filling else Phase.STEPPING

    @property
    def together(self) -> bool:
        """Are all workers of the stage at the same point of training?"""
        return self.rendezvous.place is SyncState.TOGETHER

    # ---------------------------------------------------------------- turns

    def begin(self) -> None:
        """Training starts."""
        self.mini_batches, self.updates = 0, self.first_update
        self._accumulated = False

    def begin_batch(self, batch: Any) -> None:
        """Lightning shows ``batch`` to the hooks. Takes part from now on, unless there is nothing to train."""
        self._take_over_freezing()
        if self._absent:
            return
        strategy: Any = self.trainer.strategy
        if self.mini_batches == 0 and strategy.num_micro_batches > 1 and self.portion() is None:
            size = getattr(self.trainer.train_dataloader, "batch_size", None)
            refuse_time_first(batch, size, self.trainer.lightning_module)
        with self.first_failure():
            self.rendezvous.join()

    def step(self, batch: Any, arguments: tuple[Any, ...]) -> Tensor:
        """The user's training step on a mini-batch: a loss whose ``backward`` puts the gradients in place."""
        if self._absent:  # what hooks see is the loss of the batch before
            self.draws.between_steps(Point.STEP_ENDED)
            loss = self._last_loss.to(self._device, copy=True).requires_grad_()
            return self.parts.pipeline.rest(loss) if self.updating else loss
        precision, freezing = self.trainer.precision_plugin, self.parts.freezing
        with self.whereabouts.running("training_step"), self.first_failure(), freezing.refused():
            context, scale = precision.train_step_context, loss_scale(precision, self._device)
            stream, closes = self.draws.stream, self._closes
            step = Step("training_step", arguments, context, stream, scale, closes, freezing.generation, self.portion())
            exchange = self.sync.gradients if self.updating else None
            accumulated = self._accumulated and not loop.zeroes_gradients(self.trainer)
            loss = self.parts.pipeline.train(batch, step, self.mini_batches, exchange, accumulated, self.ready)
            if self.state is not None:
                self.state.hand_on_late()
        self.draws.between_steps(Point.STEP_ENDED)
        self._last_loss = loss.detach()
        if self.watch is not None and self.parts.runners[-1].is_last:
            self.watch.loss(self._last_loss, self.mini_batches)
        self.mini_batches += 1
        self._accumulated = not self._closes
        return loss

    def update(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Lightning's optimizer step, whose ``closure`` runs :meth:`step`, where one follows in this phase.

        Raises:
            ConfigurationError: the optimizer stepped without the closure.
        """
        if self.phase is Phase.ABSENT:
            return self._update_absent(optimizer, closure, **kwargs)
        before = self.mini_batches
        self._closes = True
        try:
            output = closure() if self.phase is Phase.FILLING else self._update(optimizer, closure, **kwargs)
        finally:
            self._closes = False
        if self.mini_batches == before:
            raise ConfigurationError(STEPPED_ALONE)
        return output

    def evaluate(self, name: str, batch: Any, arguments: tuple[Any, ...], context: Any) -> Any:
        """Another of the user's steps: what the last of this worker's stages returned."""
        with self.whereabouts.running(name), self.first_failure():
            step = Step(name, arguments, context, self.draws.stream)
            output = [runner.evaluate(batch, step) for runner in self.parts.runners][-1]
        self.draws.between_steps(Point.STEP_ENDED)
        return output

    def announce(self) -> None:
        """Nothing but this worker's own computing can hold up its update any more."""
        self.rendezvous.join()  # if the user's step has communicated
        self.sync.announce(self.updates)

    # -------------------------------------------------------------- meeting

    def pause(self) -> None:
        """Finishes what is in the pipeline and makes all replicas equal."""
        self._refuse_underway()
        self._drain()
        with self._doing(Phase.LEAVING), self.first_failure():
            self.parts.pipeline.settle()
            self._look()
            self.rendezvous.pause(loop.position(self.trainer))

    def come_together(self) -> None:
        """Before anything that waits for other pipelines: who waits there must not be waited for in the scheduler.

        Raises:
            ConfigurationError: not all of them come here.
        """
        if self.whereabouts.in_step and loop.is_uneven(self.trainer):
            raise ConfigurationError(
                "The training step communicates with other pipelines, and a pipeline that has fewer batches than they "
                "would not take part. Use a map-style dataset of equal shards (as Lightning's own sampler makes them)."
            )
        if self.together:
            return
        self._refuse_underway()
        if not self.whereabouts.in_step:
            self._drain()
        with self._doing(Phase.LEAVING), self.first_failure():
            self._look()
            self.rendezvous.come_together(loop.position(self.trainer))

    def begin_uneven(self) -> None:
        """See :class:`~lightning_sdpipe.loop.uneven.Turns`."""
        self._absent, self._meeting = False, None

    def without_batch(self) -> bool:
        """See :class:`~lightning_sdpipe.loop.uneven.Turns`."""
        position, meeting = loop.position(self.trainer), self._meeting
        if meeting is None or (position == meeting.position and not meeting.closing):
            self._drain()
            with self.first_failure():
                self._look()
                meeting = self._meeting = self.rendezvous.wait_for_others(position)
        last = meeting.closing and position == meeting.position - 1
        self._absent = not last
        return last

    # ---------------------------------------------------------------- dealing

    def begin_dealt(self) -> None:
        """See :class:`~lightning_sdpipe.loop.dealt.DealtTraining`, as for the next five."""
        self._take_over_freezing()
        self._absent, self.underway = False, True
        with self.first_failure():
            self.rendezvous.join()

    def begin_absence(self) -> None:
        self._absent = True

    def rest(self) -> None:
        self._drain()
        with self._doing(Phase.LEAVING), self.first_failure():
            self.parts.pipeline.settle()
            self._look()
            self.rendezvous.rest()

    def go_on(self) -> None:
        with self.first_failure():
            self.rendezvous.rejoin()

    def end_dealt(self) -> None:
        self.underway = False
        self.come_together()

    @property
    def unfinished(self) -> int:
        return self.parts.pipeline.unfinished

    def _refuse_underway(self) -> None:
        if self.underway and not self.together:
            raise ConfigurationError(
                "Something communicates with the other pipelines, saves a checkpoint, or ends the epoch between two "
                "pauses, where batches are dealt and each pipeline is at another one. Do it at validation, at the end "
                "of an epoch, or by ModelCheckpoint; or give SDPipeStrategy(data='sharded')."
            )

    # ---------------------------------------------------------------- within

    def _take_over_freezing(self) -> None:
        """Meets all others, if the user has frozen or unfrozen layers since the mini-batch before."""
        freezing = self.parts.freezing
        if not freezing.changed():
            return
        with self.first_failure():  # before anything that waits for stages which may have changed nothing
            for runner in self.parts.runners:
                runner.link.tell_freezing()
            if self.together:
                self.rendezvous.tell_freezing(True)
        self.pause()
        with self.first_failure():
            freezing.take_over()
            self.rendezvous.join()

    def _update_absent(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Applies what gradients this pipeline has, if its model may be another one than that of others."""
        accumulated, self._accumulated = self._accumulated, False
        if accumulated and self.sync.gradients is None:
            return self._update(optimizer, closure, alone=True, **kwargs)
        self.updates += 1
        return closure()

    def _update(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, alone: bool = False, **kwargs: Any
    ) -> Any:
        """Steps with the gradients that ``closure`` puts in place, and synchronises the outcome unless ``alone``."""
        self.updating = True
        if not alone:
            self.ready.expect()
        try:
            output = self.trainer.precision_plugin.optimizer_step(
                optimizer, model=model or self.trainer.lightning_module, closure=once(closure, optimizer), **kwargs
            )
            self.draws.end_update(optimizer)
            self.ready.passed("step")
        finally:
            self.updating = False
            self.ready.drop()
        if self.watch is not None:
            self.watch.parameters(self.updates)
        self.updates += 1
        if not alone:
            with self.first_failure():
                if self.sync.shares_next:
                    self._look()
                self.sync.synchronise()
            self.client.step_ended(self.updates - 1, self.sync.statistics.seconds_waiting)
        return output

    def _drain(self) -> None:
        pipeline, strategy = self.parts.pipeline, self.trainer.strategy
        if pipeline.flushes or (self.updating and not pipeline.draining):
            return

        def backward() -> Tensor:
            loss = pipeline.drain(self.sync.gradients, self.ready)
            strategy.optimizers[0].zero_grad()
            return strategy.backward(loss / self.trainer.accumulate_grad_batches, strategy.optimizers[0])

        with (
            self._doing(Phase.DRAINING),
            torch.inference_mode(False),
            torch.enable_grad(),
            self.first_failure(),
        ):
            late = 0
            while pipeline.draining:
                self._update(strategy.optimizers[0], backward)
                late += pipeline.late_only
                strategy.optimizers[0].zero_grad()  # Lightning does not, if this is amidst an accumulation
            self.updates -= late  # decisions about one stage hold for others at the same number
            pipeline.finish()
            pipeline.settle()

    @contextmanager
    def _doing(self, phase: Phase) -> Iterator[None]:
        if self._now is not None or (self.updating and phase is Phase.DRAINING):
            raise ConfigurationError(
                "Something communicates with the other pipelines within an optimizer step, while older mini-batches "
                "are still in this one. Do it in on_train_batch_end."
            )
        self._now = phase
        try:
            yield
        finally:
            self._now = None
