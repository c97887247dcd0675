"""Runs one stage's part of the user's own step.

The user's ``training_step`` (or any other step) runs as it is written, with the calls of its blocks intercepted. For a
block of an earlier stage, a stand-in repeats the effects of the block's call with received values, or with a
:class:`~lightning_sdpipe.partition.placeholder.Placeholder`. The stage's own blocks run. The step ends when the stage's
last block returns or, if that one was skipped, when a block of a later stage is called. Only the last stage reaches the
end of the step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.effects import (
    Effect,
    EffectRecorder,
    Original,
    hear_assignments,
    intercept,
    kept_attributes,
    replay,
)
from lightning_sdpipe.partition.message import NOTHING_MORE, Message, Receiving, Sending, Travel
from lightning_sdpipe.partition.placeholder import refuse_placeholders
from lightning_sdpipe.random_streams import AFTER, WITHIN, RandomStreams

Together = Callable[[int, Callable[[], tuple[Any, list[Effect]]], Callable[[list[Effect]], Any]], Any]
"""Returns the output of the block with this number: its holder computes it, and the others repeat its effects."""


@dataclass
class _Run:
    span: range
    receiving: Receiving | None
    sending: Sending | None  # None on the last stage
    rehearsed: bool
    trains: bool = field(default_factory=torch.is_grad_enabled)
    next_block: int = 0
    in_block: bool = False
    undo: list[Callable[[], None]] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """True if there is only one stage."""
        return self.receiving is None and self.sending is None


class _StageEnds(BaseException):
    """Leaves the user's step when the stage's blocks have run. It is not an Exception, so that a broad ``except`` in
    user code does not stop it."""


class CutModel:
    """A module whose blocks are intercepted, for running a step stage by stage.

    Args:
        module: the user's module. Its blocks get a subclass of their class until :meth:`restore`.
        chain: paths of its blocks, in the order in which they run.
        owned: the spans of blocks that this process holds.
        device: where this process computes.
    """

    def __init__(self, module: nn.Module, chain: Sequence[str], owned: Sequence[range], device: torch.device) -> None:
        self.streams = RandomStreams(device)
        self._module = module
        self._chain = chain
        self._owned = {block for span in owned for block in span}
        self._device = device
        self._streams_of = [crc32(path.encode()) for path in chain]
        self._run: _Run | None = None
        self.together: Together | None = None
        """Outside of a step, calls a block on all workers of the pipeline together, if there are several."""
        self._watches = {
            index: EffectRecorder(chain[index], module.get_submodule(chain[index])) for index in self._owned
        }
        is_cut = any(len(span) < len(chain) for span in owned)
        self._restore: list[Callable[[], None]] = [hear_assignments()] if is_cut else []
        if is_cut:
            fast = torch.backends.mha  # in evaluation its layers pass nested tensors, which cannot travel
            self._restore.append(partial(fast.set_fastpath_enabled, fast.get_fastpath_enabled()))
            fast.set_fastpath_enabled(False)
        for index, block in enumerate([module.get_submodule(path) for path in chain]):
            self._restore.append(intercept(block, partial(self._call, index), copies=not is_cut))

    def restore(self) -> None:
        """Give the blocks their own classes back."""
        while self._restore:
            self._restore.pop()()

    def run(
        self, span: range, step: Callable[[], Any], received: Message | None, travel: Travel | None
    ) -> Message | Any:
        """Run ``step`` as the stage that owns the blocks of ``span``.

        Args:
            span: consecutive indices into the chain.
            step: a function that calls the user's method on the micro-batch.
            received: the message of the previous stage; None on the first stage.
            travel: the values that cross the cuts of this step, if it was rehearsed.

        Returns:
            The result of the step on the last stage; elsewhere the :class:`Message` for the next stage.

        Raises:
            ConfigurationError: the blocks do not run as a chain, or a value skips the cut.
        """
        last = span.stop == len(self._chain)
        known = travel or NOTHING_MORE
        receiving = None if received is None else Receiving(received, self._chain, self._device, known.changed)
        sending = None if last else Sending(received, span, known)
        self._run = run = _Run(span, receiving, sending, rehearsed=travel is not None)
        try:
            if run.whole:
                return step()
            with _no_gradients_in_glue(run):
                outcome = step()
        except _StageEnds:
            pass
        finally:
            self._run = None
            for undo in reversed(run.undo):
                undo()
        if run.sending is not None:
            return run.sending.message()
        refuse_placeholders(outcome, "the result of the step")
        return outcome

    def _call(self, index: int, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seed = self.streams.current()
        run = self._run
        if run is None or run.in_block:
            output = self._outside(index, seed, original, args, kwargs)
        elif index < run.next_block and not run.whole:
            raise ConfigurationError(
                f"Block {self._chain[index]!r} ran after block {self._chain[run.next_block - 1]!r}: the blocks do not "
                f"form a chain. Each must run at most once and in the order {list(self._chain)}; {_MEND} {_SAMPLE}"
            )
        elif index < run.span.start:
            output = self._stand_in(run, index, args, kwargs)
        elif index < run.span.stop:
            output = self._run_own(run, index, seed, original, args, kwargs)
        else:
            self._end(run, index)
        self.streams.begin(seed, self._streams_of[index], AFTER)
        return output

    def _outside(self, index: int, seed: int, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a block outside of a step, inside another block, or for recomputation by activation checkpointing."""
        recomputes = torch._C._current_graph_task_id() >= 0  # torch has no public function for this
        if self.together is not None and not recomputes and self._run is None:
            if torch.is_grad_enabled():
                self._refuse_gradients(index, args, kwargs)

            def compute() -> tuple[Any, list[Effect]]:
                self.streams.begin(seed, self._streams_of[index], WITHIN)
                return self._watches[index].call(original, args, kwargs, fills=True)

            return self.together(index, compute, lambda effects: replay(effects, self._module, args, kwargs))
        if index not in self._owned:
            raise ConfigurationError(
                f"Block {self._chain[index]!r} was called on a worker that does not hold it. If torch.utils.checkpoint "
                "recomputes this block, make all that it recomputes one block (blocks=[...])."
            )
        self.streams.begin(seed, self._streams_of[index], WITHIN)
        return original(*args, **kwargs)

    def _refuse_gradients(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*tree_leaves((args, kwargs)), *self._module.get_submodule(self._chain[index]).parameters()]
        if any(isinstance(each, Tensor) and each.requires_grad for each in given):
            raise ConfigurationError(
                f"Block {self._chain[index]!r} was called outside of training_step where gradients are recorded, and "
                "they would not reach the blocks of other stages. Call it within torch.no_grad(), or train with "
                "num_stages=1."
            )

    def _stand_in(self, run: _Run, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert run.receiving is not None
        self._check_skipped(run, index)
        effects = run.receiving.effects(index)
        if effects is None:
            raise ConfigurationError(f"Block {self._chain[index]!r} did not run on the stage that holds it. {_AGREE}")
        run.next_block = index + 1
        if index in self._owned:  # by now its attributes belong to a later micro-batch
            run.undo += kept_attributes(effects, self._module)
        return replay(effects, self._module, args, kwargs)

    def _run_own(
        self, run: _Run, index: int, seed: int, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if run.receiving is not None:
            self._check_skipped(run, run.span.start)
            if not run.rehearsed:  # else the values that it reads have travelled
                # a list or dict may hold values that this block does not read
                given = [value for value in (*args, *kwargs.values()) if not isinstance(value, (list, dict))]
                refuse_placeholders(given, f"block {self._chain[index]!r}")
        run.next_block, run.in_block = index + 1, True
        self.streams.begin(seed, self._streams_of[index], WITHIN)
        try:
            if run.sending is None:
                return original(*args, **kwargs)
            output, effects = self._watches[index].call(original, args, kwargs)
        finally:
            run.in_block = False
        refuse_placeholders(output, f"block {self._chain[index]!r}")
        run.sending.add(index, effects)
        if index == run.span.stop - 1:
            self._end(run, index)
        return output

    def _check_skipped(self, run: _Run, until: int) -> None:
        """Check that blocks of earlier stages that were not called here have not run there either."""
        assert run.receiving is not None
        blocks = run.receiving.message.layout.blocks
        for block in range(run.next_block, until):
            if blocks[block] is not None:
                raise ConfigurationError(
                    f"Block {self._chain[block]!r} ran on the stage that holds it, and was not called here. {_AGREE}"
                )

    def _end(self, run: _Run, index: int) -> NoReturn:
        if run.trains and not torch.is_grad_enabled():
            _refuse_reentrant_checkpoint(self._chain[index])
        raise _StageEnds


_AGREE = (
    "All stages must decide in the same way whether a block runs: draw it in the step, with the generators of torch, "
    "numpy or random."
)
_SAMPLE = (
    "A loop that runs the model many times, such as generate, works in hooks and in steps of evaluation, without "
    "gradients, and not in training_step."
)
_MEND = "name blocks that do with SDPipeStrategy(blocks=[...]), or cut elsewhere with partition=[...]."


@contextmanager
def _no_gradients_in_glue(run: _Run) -> Iterator[None]:
    """Refuse to compute gradients in user code between blocks, within the context: they would end at the cut."""
    engine: Any = torch.autograd  # torch.autograd.grad and backward both look up the engine there
    original = engine._engine_run_backward

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if run.in_block:
            return original(*args, **kwargs)
        raise ConfigurationError(
            "The step asks autograd for gradients (a gradient penalty, for example), which would not reach the blocks "
            "of other stages. Do it inside of one block, or train with num_stages=1."
        )

    engine._engine_run_backward = refuse
    try:
        yield
    finally:
        engine._engine_run_backward = original


def _refuse_reentrant_checkpoint(name: str) -> None:
    """Refuse a reentrant checkpoint around the last block: leaving it by an exception would lose the gradients of all
    blocks before the cut."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise ConfigurationError(
                f"Block {name!r}, the last one of its stage, is called through torch.utils.checkpoint with "
                "use_reentrant=True, and a stage cannot end within it. Use use_reentrant=False, or checkpoint inside "
                "the block's own forward."
            )
