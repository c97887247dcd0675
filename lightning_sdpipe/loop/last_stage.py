"""Adaptations of what only the last stage of a pipeline can do, because the results of a step exist there alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.distributed import ProcessGroup
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_sdpipe.errors import ConfigurationError, NonFiniteError, SchedulerError, WorkerFailedError
from lightning_sdpipe.lightning_results import metrics_of
from lightning_sdpipe.loop.epoch_callback import EpochCallback

# These work on what the evaluation steps returned or collected. The end of a *training* epoch is also where modules
# change their own parameters, so that hook runs on every stage.
_BATCH_END_HOOKS = ("on_validation_batch_end", "on_test_batch_end", "on_predict_batch_end")
_RESULT_HOOKS = ("on_validation_epoch_end", "on_test_epoch_end", "on_predict_epoch_end", *_BATCH_END_HOOKS)
_EPOCH_END = "on_train_epoch_end"
_WRITER_HOOKS = ("on_predict_batch_end", "on_predict_epoch_end")

Within = Callable[[str], AbstractContextManager[None]]


def leave_results_to_the_last_stage(
    module: LightningModule,
    callbacks: Sequence[Callback],
    is_last: bool,
    within: Within,
    hand_on: Callable[[str], None] = lambda _: None,
) -> Callable[[], None]:
    """Make hooks that deal with the results of evaluation, those of ``module`` and of callbacks that write predictions,
    run on last stages only; ``within(hook)`` is held meanwhile. Those of other callbacks run everywhere, and end on the
    other stages where they use a result. All stages call ``hand_on(hook)`` after the module's hooks for the end of an
    evaluation. Return a function that undoes it."""
    writers = [callback for callback in callbacks if isinstance(callback, BasePredictionWriter)]
    own = [(module, name) for name in _RESULT_HOOKS] + [(writer, name) for writer in writers for name in _WRITER_HOOKS]
    changed: list[tuple[Any, str, Any]] = []  # what, its hook, and what its instance had in its place

    def put(owner: Any, name: str, hook: Callable[..., Any]) -> None:
        changed.append((owner, name, owner.__dict__.get(name)))
        owner.__dict__[name] = hook

    for owner, name in own:
        hook = _held(getattr(owner, name), within, name) if is_last else _nothing
        put(owner, name, _then(hook, hand_on, name) if owner is module and name.endswith("_epoch_end") else hook)
    if not is_last:
        put(module, _EPOCH_END, _ending(getattr(module, _EPOCH_END), module, _EPOCH_END))
        for callback in (c for c in callbacks if not isinstance(c, EpochCallback)):
            for name in (_EPOCH_END, *(_RESULT_HOOKS if callback not in writers else ())):
                if getattr(type(callback), name) is not getattr(Callback, name) or name in callback.__dict__:
                    put(callback, name, _ending(getattr(callback, name), callback, name))

    def undo() -> None:
        for owner, name, before in changed:
            owner.__dict__.pop(name)
            if before is not None:
                owner.__dict__[name] = before

    return undo


def _nothing(*_: Any, **__: Any) -> None:
    """Take the place of a hook."""


def _held(hook: Callable[..., Any], within: Within, name: str) -> Callable[..., Any]:
    def held(*arguments: Any, **kwargs: Any) -> Any:
        with within(name):
            return hook(*arguments, **kwargs)

    return held


def _then(hook: Callable[..., Any], hand_on: Callable[[str], None], name: str) -> Callable[..., Any]:
    def then(*arguments: Any, **kwargs: Any) -> Any:
        outcome = hook(*arguments, **kwargs)
        hand_on(name)
        return outcome

    return then


def _ending(hook: Callable[..., Any], owner: Callback | LightningModule, name: str) -> Callable[..., None]:
    place = f"{type(owner).__name__}.{name}"

    def ending(*arguments: Any, **kwargs: Any) -> None:
        if name in _BATCH_END_HOOKS:
            trainer, module, _, *more = arguments
            arguments = (trainer, module, _NoResult(place), *more)
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


class _NoResult:
    """A stand-in for the result of a step, on a stage that does not come to its end. It cannot be used for anything."""

    def __init__(self, place: str) -> None:
        self.__dict__["_place"] = place

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NoResultError(f"{self.__dict__['_place']} uses what a step returned, which exists on last stages only.")

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __int__ = __contains__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __lt__ = __gt__ = __le__ = __ge__ = _refuse

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> NoReturn:
        raise NoResultError(f"{getattr(function, '__name__', function)} was given what a step returned elsewhere.")


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


def gather_metrics_over(
    module: LightningModule, callbacks: Sequence[Callback], group: ProcessGroup, ends_early: Callable[[], bool]
) -> Callable[[], None]:
    """Make torchmetrics objects of ``module`` and of ``callbacks`` compute over ``group``, unless they have a rule of
    their own. Return a function that undoes it. ``ends_early`` returns whether a step runs that ends before this worker
    can update what the step updates."""
    metrics = {name: metric for name, metric in metrics_of(module, callbacks).items() if metric.dist_sync_fn is None}

    def check(name: str) -> None:
        if ends_early() and not metrics[name].update_called:
            raise ConfigurationError(
                f"The metric {name!r} is computed in a step on a stage that has never updated it: steps end where "
                "their stage ends, and the update comes later. Compute it in on_train_epoch_end, or keep what the "
                "beginning of a step needs in an attribute of the block that uses it."
            )

    for name, metric in metrics.items():
        metric.dist_sync_fn = _GatherOverStage(group, partial(check, name))

    def undo() -> None:
        for metric in metrics.values():
            metric.dist_sync_fn = None

    return undo


def is_gathered(metric: Metric) -> bool:
    """Return whether ``metric`` is gathered from the pipelines' workers of one stage."""
    return isinstance(metric.dist_sync_fn, _GatherOverStage)


def has_own_rule(metric: Metric) -> bool:
    """Return whether the user has said how ``metric`` is gathered from processes."""
    return not (metric.dist_sync_fn is None or is_gathered(metric))
