"""What an optimizer step evaluates: its closure, once.

The closure runs the whole pipeline, and tells the other pipelines that an update follows. An optimizer that evaluates
it again within a step, at other parameters, would do so at a point where groups are being formed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import LBFGS, Optimizer

from lightning_sdpipe import meter
from lightning_sdpipe.errors import ConfigurationError

STEPPED_ALONE = (
    "optimizer.step() was called without the closure that optimizer_step was given, so that its gradients were not "
    "synchronised with the other pipelines. Pass it on: optimizer.step(closure=optimizer_closure)."
)


def once(closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
    """``closure`` for one step of ``optimizer``, which raises ConfigurationError when it is called again."""
    called = False

    def run() -> Any:
        nonlocal called
        if called:
            raise ConfigurationError(
                f"{type(optimizer).__name__} evaluates its closure several times in a step, and a pipeline can run it "
                "once only. Use an optimizer that needs one gradient for a step, such as AdamW."
            )
        called = True
        with meter.phase(meter.OTHER):  # which is not the optimizer's
            return closure()

    return run


def refuse_repeated_evaluation(optimizer: Optimizer) -> None:
    """Raises ConfigurationError for an optimizer that is known to evaluate its closure several times."""
    if isinstance(optimizer, LBFGS):
        raise ConfigurationError(
            "LBFGS evaluates the loss several times in a step, along directions that depend on the gradients of all "
            "stages, and a pipeline can run it once only. Use AdamW, or SGD with momentum."
        )
