"""The view of the user's training hooks on a stage: the optimizer's groups of all stages, and no metric that is logged
where this stage does not come.

A norm over ``optimizer.param_groups`` in a hook would be that of one stage. With the others' parameters in the groups,
which have no values here, it is refused, and what a hook does to each parameter alone is done where that is.

A hook around a training batch that looked for such a metric here would find none, or that of the last validation, and
do something else than the same hook on the last stage. So it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.touches import METRIC, METRICS

_OF_A_BATCH = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "configure_gradient_clipping", "on_train_batch_end"),
)
_OF_TRAINING = ("on_fit_start", "on_train_start", "on_train_epoch_start", *_OF_A_BATCH)


def show_whole_groups(
    module: LightningModule, callbacks: Sequence[Callback], shown: Callable[[], AbstractContextManager[None]]
) -> Callable[[], None]:
    """Hold ``shown()`` around the user's hooks of training. Return a function that undoes it."""
    return _around(module, callbacks, _OF_TRAINING, lambda _: shown())


def refuse_metrics_elsewhere(
    module: LightningModule, callbacks: Sequence[Callback], logged: Collection[str]
) -> Callable[[], None]:
    """Refuse that the user's hooks look for the metrics that are ``logged`` elsewhere. Return a function that undoes
    it."""

    @contextmanager
    def held(hook: str) -> Iterator[None]:
        originals = {name: vars(Trainer)[name] for name in METRICS}
        for name, original in originals.items():
            setattr(Trainer, name, property(partial(_metrics, original, logged, hook)))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(Trainer, name, original)

    return _around(module, callbacks, _OF_A_BATCH, held)


def _around(
    module: LightningModule,
    callbacks: Sequence[Callback],
    names: Sequence[str],
    held: Callable[[str], AbstractContextManager[None]],
) -> Callable[[], None]:
    """Hold ``held(name)`` around the user's hooks of these ``names``. Return a function that undoes it."""
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


def _metrics(original: Any, logged: Collection[str], hook: str, trainer: Trainer) -> _Metrics:
    return _Metrics(original.__get__(trainer), logged, hook)


class _Metrics(dict[str, Any]):
    def __init__(self, metrics: Any, logged: Collection[str], hook: str) -> None:
        super().__init__(metrics)
        self._logged, self._hook = logged, hook

    def _check(self, name: object) -> None:
        if f"{METRIC}{name!r}" in self._logged:
            raise ConfigurationError(
                f"{self._hook} looks for the metric {name!r} on a stage that ends before training_step logs it. Use "
                "outputs['loss'] in on_train_batch_end; keep the number in an attribute (self.last = loss.item()), "
                "which all stages get after each mini-batch; look for it in on_validation_end or "
                "on_train_epoch_end, where all stages have it; or, to report it, where trainer.is_global_zero holds."
            )

    def __getitem__(self, name: str) -> Any:
        self._check(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._check(name)
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._check(name)
        return super().get(name, default)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return dict(self)  # ModelCheckpoint copies them so, at a point where all stages have the metrics
