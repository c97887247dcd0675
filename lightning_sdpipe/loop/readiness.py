"""When a worker may say that it is ready: when nothing but its own computing can hold its update up any more.

With that word the scheduler lets others wait for it (SDPipe §4, "Worker Communication"). Most workers may say so
before their last backward, or with few micro-batches within it. But clipping by the norm of all stages, and the vote on
an overflow in 16-bit mixed precision, come after it and wait for the other stages of the pipeline, which may be late.
(So does the sum over the owners of a shared parameter: the pipeline says when that is there.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

Point = Literal["backward", "vote", "norm", "step"]  # in the order in which an update passes them


def last_wait(trainer: Trainer, num_stages: int, flush: bool) -> Point:
    """The point of an update after which it waits for no other stage. A module that clips by itself may not do so; then
    it is the end of the step. Without a flush there is no vote."""
    if num_stages == 1:
        return "backward"
    if clips_by_norm(trainer):
        return "norm"
    return "vote" if flush and getattr(trainer.precision_plugin, "scaler", None) is not None else "backward"


def clips_by_norm(trainer: Trainer) -> bool:
    """Does the Trainer, or may the module?"""
    by_norm = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"
    return by_norm or is_overridden("configure_gradient_clipping", trainer.lightning_module)


class Readiness:
    """Announces each update once.

    Args:
        last: the point at which to.
        announce: does it.
    """

    def __init__(self, last: Point, announce: Callable[[], None]) -> None:
        self._last = last
        self._announce = announce
        self._expected = False

    def expect(self) -> None:
        """An update begins."""
        self._expected = True

    def reached(self, point: Point) -> None:
        """Announces the update if it was the last point that matters."""
        if self._expected and point in (self._last, "step"):
            self._expected = False
            self._announce()

    def drop(self) -> None:
        """The update ends, announced or not."""
        self._expected = False
