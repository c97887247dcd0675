"""The optimizer's groups as hooks see them: with the parameters of all stages.

A norm over ``optimizer.param_groups`` in a hook would be that of one stage. With the others' parameters in the groups,
which have no values here, it is refused, and what a hook does to each parameter alone is done where that is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule

_HOOKS = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"),
    "configure_gradient_clipping",
)


def show_whole_groups(
    module: LightningModule, callbacks: Sequence[Callback], shown: Callable[[], AbstractContextManager[None]]
) -> Callable[[], None]:
    """Holds ``shown()`` around the user's hooks of training. Returns what undoes it."""
    return around_hooks(module, callbacks, _HOOKS, lambda _: shown())


def around_hooks(
    module: LightningModule,
    callbacks: Sequence[Callback],
    names: Sequence[str],
    held: Callable[[str], AbstractContextManager[None]],
) -> Callable[[], None]:
    """Holds ``held(name)`` around the user's hooks of these ``names``. Returns what undoes it."""
    changed: list[tuple[Any, str, Any]] = []
    for owner in (module, *callbacks):
        for name in names:
            hook = getattr(owner, name, None)
            if hook is None:
                continue
            if name in vars(owner) or not hook.__module__.startswith(("lightning.", "lightning_sdpipe.")):
                changed.append((owner, name, vars(owner).get(name)))
                vars(owner)[name] = _within(hook, partial(held, name))

    def undo() -> None:
        for owner, name, before in changed:
            vars(owner).pop(name)
            if before is not None:
                vars(owner)[name] = before

    return undo


def _within(hook: Callable[..., Any], held: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    def within(*arguments: Any, **kwargs: Any) -> Any:
        with held():
            return hook(*arguments, **kwargs)

    return within
