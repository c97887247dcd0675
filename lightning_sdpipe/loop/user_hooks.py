"""The user's hooks on a stage: which of them run where, and what they see there.

The results of an evaluation's steps exist on last stages only, so hooks that deal with them run there alone.

Hooks of training see the optimizer's groups with the parameters of all stages. A norm over ``optimizer.param_groups``
would otherwise be that of one stage; the parameters of other stages, which have no values here, make it an error. What
a hook does to each parameter alone is done on the stage that holds it.

They see no metric that is logged at a point that this stage does not reach. A hook around a training batch would find
none here, or that of the last validation, and act differently from the same hook on the last stage. So looking for one
is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed import ProcessGroup
from torchmetrics import Metric
from torchmetrics import metric as of_torchmetrics
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_sdpipe.errors import ConfigurationError, NonFiniteError, SchedulerError, WorkerFailedError
from lightning_sdpipe.lightning_internals import Replacement
from lightning_sdpipe.lightning_results import metrics_of
from lightning_sdpipe.loop.epoch_callback import EpochCallback
from lightning_sdpipe.partition.placeholder import Unusable
from lightning_sdpipe.partition.state_watch import METRIC, hearing_of_metrics

_OF_A_BATCH = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "configure_gradient_clipping", "on_train_batch_end"),
)
_OF_TRAINING = ("on_fit_start", "on_train_start", "on_train_epoch_start", *_OF_A_BATCH)
# These work on what the evaluation steps returned or collected. The end of a *training* epoch is also where modules
# change their own parameters, so that hook runs on every stage.
_BATCH_END_HOOKS = ("on_validation_batch_end", "on_test_batch_end", "on_predict_batch_end")
_RESULT_HOOKS = ("on_validation_epoch_end", "on_test_epoch_end", "on_predict_epoch_end", *_BATCH_END_HOOKS)
_EPOCH_END = "on_train_epoch_end"
_WRITER_HOOKS = ("on_predict_batch_end", "on_predict_epoch_end")
Within = Callable[[str], AbstractContextManager[None]]


def show_whole_groups(
    module: LightningModule, callbacks: Sequence[Callback], shown: Callable[[], AbstractContextManager[None]]
) -> Callable[[], None]:
    """Hold ``shown()`` around the user's hooks of training. Return a function that undoes it."""
    return _around(module, callbacks, _OF_TRAINING, lambda _: shown())


def refuse_metrics_elsewhere(
    module: LightningModule, callbacks: Sequence[Callback], logged: Collection[str]
) -> Callable[[], None]:
    """Make the user's hooks fail if they look for metrics that are ``logged`` elsewhere. Return a function that undoes
    it."""

    def held(hook: str) -> AbstractContextManager[None]:
        def asked(name: object) -> None:
            if f"{METRIC}{name!r}" in logged:
                raise ConfigurationError(
                    f"{hook} looks for the metric {name!r} on a stage that ends before training_step logs it. Use "
                    "outputs['loss'] in on_train_batch_end; keep the number in an attribute (self.last = loss.item()), "
                    "which all stages get after each mini-batch; look for it in on_validation_end or "
                    "on_train_epoch_end, where all stages have it; or, to report it, where trainer.is_global_zero "
                    "holds."
                )

        return hearing_of_metrics(asked)

    return _around(module, callbacks, _OF_A_BATCH, held)


def _around(
    module: LightningModule,
    callbacks: Sequence[Callback],
    names: Sequence[str],
    held: Callable[[str], AbstractContextManager[None]],
) -> Callable[[], None]:
    """Hold ``held(name)`` around the user's hooks of these ``names``. Return a function that undoes it."""
    hooks = _Hooks()
    for owner in (module, *callbacks):
        for name in names:
            hook = getattr(owner, name, None)
            if hook is None:
                continue
            if name in vars(owner) or not hook.__module__.startswith(("lightning.", "lightning_sdpipe.")):
                hooks.put(owner, name, _within(hook, partial(held, name)))
    return hooks.undo


class _Hooks:
    """Hooks that replace those of instances."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, hook: Callable[..., Any]) -> None:
        self._before.append((owner, name, vars(owner).get(name)))
        vars(owner)[name] = Replacement(hook, owner, name)

    def undo(self) -> None:
        for owner, name, before in self._before:
            vars(owner).pop(name)
            if before is not None:
                vars(owner)[name] = before


def _like(hook: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give the decorated function the signature of ``hook``, for code that inspects it."""
    return wraps(hook, assigned=(), updated=())


def _within(hook: Callable[..., Any], held: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    @_like(hook)
    def within(*arguments: Any, **kwargs: Any) -> Any:
        with held():
            return hook(*arguments, **kwargs)

    return within


def leave_results_to_the_last_stage(
    module: LightningModule,
    callbacks: Sequence[Callback],
    is_last: bool,
    within: Within,
    together: Callable[[], bool],
    hand_on: Callable[[str, Callable[[], Any], bool, Callable[[], Any] | None], Any],
) -> Callable[[], None]:
    """Make hooks that deal with the results of evaluation, those of ``module`` and of callbacks that write predictions,
    run on last stages only; ``within(hook)`` is held meanwhile. Those of ``module`` run everywhere if all stages have
    the results ``together``. Those of other callbacks run everywhere, and on the other stages they end where they use a
    result. The module's hooks for the end of an evaluation run in
    :meth:`~lightning_sdpipe.loop.python_state.PythonState.hand_on`. Return a function that undoes it."""
    writers = [callback for callback in callbacks if isinstance(callback, BasePredictionWriter)]
    hooks = _Hooks()
    for writer in writers:
        for name in _WRITER_HOOKS:
            hooks.put(writer, name, _within(getattr(writer, name), partial(within, name)) if is_last else _nothing)

    def result_hook(name: str) -> Callable[..., Any]:
        own, is_own = getattr(module, name), is_overridden(name, module)
        alone = _within(own, partial(within, name)) if is_last else _nothing

        @_like(own)
        def hook(*arguments: Any, **kwargs: Any) -> Any:
            everywhere = together()
            run = partial(own if everywhere else alone, *arguments, **kwargs)
            if not name.endswith("_epoch_end"):
                return run()
            return hand_on(name, run, everywhere, partial(own, *arguments, **kwargs) if is_own else None)

        return hook

    for name in _RESULT_HOOKS:
        hooks.put(module, name, result_hook(name))
    if not is_last:
        hooks.put(module, _EPOCH_END, _ending(getattr(module, _EPOCH_END), module, _EPOCH_END, together))
        for callback in (c for c in callbacks if not isinstance(c, EpochCallback)):
            for name in (_EPOCH_END, *(_RESULT_HOOKS if callback not in writers else ())):
                if getattr(type(callback), name) is not getattr(Callback, name) or name in callback.__dict__:
                    hooks.put(callback, name, _ending(getattr(callback, name), callback, name, together))
    return hooks.undo


def _nothing(*_: Any, **__: Any) -> None:
    """Take the place of a hook."""


def _ending(
    hook: Callable[..., Any], owner: Callback | LightningModule, name: str, together: Callable[[], bool]
) -> Callable[..., None]:
    place = f"{type(owner).__name__}.{name}"

    @_like(hook)
    def ending(*arguments: Any, **kwargs: Any) -> None:
        if name in _BATCH_END_HOOKS and not together():
            trainer, module, _, *more = arguments
            result = StandIn(f"{place} uses what a step returned, which exists on last stages only.")
            arguments = (trainer, module, result, *more)
        try:
            hook(*arguments, **kwargs)
        except NoResultError:
            return
        except (ConfigurationError, NonFiniteError, WorkerFailedError, SchedulerError):
            raise
        except Exception as error:
            raise ConfigurationError(
                f"{place} failed on a stage where the results of steps do not exist, neither what they return nor what "
                f"they collect: {type(error).__name__}: {error}. If it works on them, let it return at once unless "
                "trainer.strategy.has_results."
            ) from error

    return ending


class NoResultError(ConfigurationError):
    """A result was used where there is none."""


class StandIn(Unusable):
    """A stand-in for what exists on last stages only.

    Args:
        message: of the error that every use of it raises.
    """

    def __init__(self, message: str) -> None:
        super().__init__(lambda: NoResultError(message))


class _GatherOverStage:
    """Gathers a metric's states from the pipelines' last stages, not from all ranks."""

    def __init__(self, group: ProcessGroup, check: Callable[[], None] = lambda: None) -> None:
        self._group = group
        self._check = check

    def __call__(self, result: Tensor, group: Any = None) -> list[Tensor]:
        self._check()
        return gather_all_tensors(result, group or self._group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _GatherOverStage:
        return _GatherOverStage(self._group)  # metrics are cloned, process groups cannot be

    def __reduce__(self) -> Any:
        return type(None), ()  # what is saved has the rule of its class


def gather_metrics_over(
    module: LightningModule, callbacks: Sequence[Callback], group: ProcessGroup, ends_early: Callable[[], bool]
) -> Callable[[], None]:
    """Make torchmetrics objects of ``module`` and of ``callbacks``, and those that are made later, compute over
    ``group``, unless they have a rule of their own. Return a function that undoes it. ``ends_early`` returns whether
    this worker is in a step that ends here before it updates its metrics."""
    metrics = {name: metric for name, metric in metrics_of(module, callbacks).items() if not has_own_rule(metric)}

    def check(name: str) -> None:
        if ends_early() and not metrics[name].update_called:
            raise ConfigurationError(
                f"The metric {name!r} is computed in a step on a stage that has never updated it: steps end where "
                "their stage ends, and the update comes later. Compute it in on_train_epoch_end, or keep what the "
                "beginning of a step needs in an attribute of the block that uses it."
            )

    for name, metric in metrics.items():
        metric.dist_sync_fn = _GatherOverStage(group, partial(check, name))
    vars(of_torchmetrics)["gather_all_tensors"] = _GatherOverStage(group)

    def undo() -> None:
        vars(of_torchmetrics)["gather_all_tensors"] = gather_all_tensors
        for metric in metrics.values():
            metric.dist_sync_fn = None

    return undo


def has_own_rule(metric: Metric) -> bool:
    """Return whether the user has said how ``metric`` is gathered from processes."""
    return metric.dist_sync_fn is not None and not isinstance(metric.dist_sync_fn, _GatherOverStage)
