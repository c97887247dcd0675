"""Running one stage's part of the user's own step.

The user's ``training_step`` (or any other step) runs as it is written. While it runs, calls of blocks are intercepted:
a block of an earlier stage returns what was received, or a :class:`~lightning_sdpipe.partition.ghost.Ghost`; the
stage's own blocks run; and when its last block returns, the step ends there. Only the last stage reaches the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.ghost import Ghost, refuse_ghosts
from lightning_sdpipe.partition.intercept import Original, intercept
from lightning_sdpipe.partition.structure import Structure, take_apart


@dataclass(frozen=True)
class Boundary:
    """What crosses a cut: the tensors of the last block before it, and the structures of all outputs up to it."""

    tensors: Sequence[Tensor]
    structures: Sequence[Structure | None]


@dataclass
class _Run:
    span: range
    received: Boundary | None
    device: torch.device
    trains: bool = field(default_factory=torch.is_grad_enabled)
    next_block: int = 0
    structures: list[Structure | None] = field(default_factory=list)


class _StageEnds(BaseException):
    """Leaves the user's step when the stage's last block has returned; not an Exception, so that user code with a
    broad ``except`` does not stop it."""

    def __init__(self, boundary: Boundary) -> None:
        self.boundary = boundary


class CutModel:
    """A module whose blocks are intercepted, so that a step can be run stage by stage.

    Args:
        module: the user's module. Its blocks get a subclass of their class until :meth:`restore`.
        chain: paths of its blocks, in the order in which they run.
        owned: the spans of blocks that this process holds.
        device: where this process computes.
    """

    def __init__(self, module: nn.Module, chain: Sequence[str], owned: Sequence[range], device: torch.device) -> None:
        self._chain = chain
        self._owned = {block for span in owned for block in span}
        self._device = device
        self._run: _Run | None = None
        self._restore: list[Callable[[], None]] = []
        for index, block in enumerate([module.get_submodule(path) for path in chain]):
            self._restore.append(intercept(block, partial(self._call, index)))

    def restore(self) -> None:
        """Gives the blocks their own class back."""
        while self._restore:
            self._restore.pop()()

    def run(self, span: range, step: Callable[[], Any], received: Boundary | None) -> Boundary | Any:
        """Runs ``step`` as the stage that owns the blocks of ``span``.

        Args:
            span: consecutive indices into the chain.
            step: calls the user's method on the micro-batch.
            received: what the previous stage sent; None on the first stage.

        Returns:
            What the step returned, on the last stage; elsewhere the :class:`Boundary` to send on.

        Raises:
            ConfigurationError: the blocks do not run as a chain, or a value skips the cut.
        """
        structures = list(received.structures) if received else []
        self._run = _Run(span, received, self._device, structures=structures)
        try:
            outcome = step()
        except _StageEnds as ends:
            return ends.boundary
        finally:
            self._run = None
        if span.stop < len(self._chain):
            raise ConfigurationError(
                f"The step ended without running block {self._chain[span.stop - 1]!r}, the last one of its stage. "
                f"A stage must end with a block that every step runs; {_MEND}"
            )
        refuse_ghosts(outcome, "the result of the step")
        return outcome

    def _call(self, index: int, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run, name = self._run, self._chain[index]
        if run is None:  # outside a step, or recomputed by activation checkpointing during backward
            if index in self._owned:
                return original(*args, **kwargs)
            raise ConfigurationError(
                f"Block {name!r} was called on a worker that does not hold it, outside of training_step, "
                "validation_step, test_step and predict_step. Call the model within one of these."
            )
        if index < run.next_block:
            raise ConfigurationError(
                f"Block {name!r} ran after block {self._chain[run.next_block - 1]!r}: the blocks do not form a chain. "
                f"Each must run at most once and in the order {list(self._chain)}; {_MEND}"
            )
        run.next_block = index + 1
        if index < run.span.start:
            return self._stand_in(run, index)
        if index >= run.span.stop:
            raise ConfigurationError(
                f"Block {name!r} of a later stage ran before {self._chain[run.span.stop - 1]!r}, the last block of its "
                f"stage, had returned: the blocks do not form a chain; {_MEND}"
            )
        refuse_ghosts((args, kwargs), f"block {name!r}")
        output = original(*args, **kwargs)
        if run.span.stop < len(self._chain):
            tensors, structure = take_apart(output, name) if index == run.span.stop - 1 else ([], _outline(output))
            run.structures.extend([None] * (index - len(run.structures)))
            run.structures.append(structure)
            if index == run.span.stop - 1:
                if run.trains and not torch.is_grad_enabled():
                    _refuse_reentrant_checkpoint(name)
                raise _StageEnds(Boundary(tensors, run.structures))
        return output

    def _stand_in(self, run: _Run, index: int) -> Any:
        assert run.received is not None
        structure, name = run.received.structures[index], self._chain[index]
        if structure is None:
            raise ConfigurationError(
                f"Block {name!r} ran on this stage but not on the one that holds it, or returned something that has "
                f"no shape; {_MEND}"
            )
        if index == run.span.start - 1:
            tensors = run.received.tensors
            return structure.rebuild(lambda i, _: _writable(tensors[i]))
        return structure.rebuild(lambda _, meta: Ghost(meta.empty("meta"), run.device, name))


_MEND = "name blocks that do with SDPipeStrategy(blocks=[...]), or cut elsewhere with partition=[...]."


def _outline(output: Any) -> Structure | None:
    try:
        return take_apart(output, "")[1]
    except ConfigurationError:  # it does not travel; if a later stage's glue asks for it, that stage says so
        return None


def _refuse_reentrant_checkpoint(name: str) -> None:
    """Leaving such a checkpoint by an exception would lose the gradients of all that comes before the cut."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise ConfigurationError(
                f"Block {name!r}, the last one of its stage, is called through torch.utils.checkpoint with "
                "use_reentrant=True, and a stage cannot end within it. Use use_reentrant=False, or checkpoint inside "
                "the block's own forward."
            )


def _writable(tensor: Tensor) -> Tensor:
    """The same values and memory as something that user code may write to in place, which a leaf is not."""
    return _Identity.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()  # autograd does not see a view here, and a view of a leaf may not be written to either

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]
