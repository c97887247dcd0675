"""What only the last stage of a pipeline can do, because the results of a step exist there alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.distributed import ProcessGroup
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

# These work on what the evaluation steps returned or collected. The end of a *training* epoch is also where modules
# change their own parameters, so that hook runs on every stage.
_RESULT_HOOKS = ("on_validation_epoch_end", "on_test_epoch_end", "on_predict_epoch_end")
_BATCH_END_HOOKS = ("on_validation_batch_end", "on_test_batch_end", "on_predict_batch_end")


def leave_results_to_the_last_stage(
    module: LightningModule, callbacks: Sequence[Callback], is_last: bool
) -> Callable[[], None]:
    """On every other stage, hooks that deal with the results of evaluation do nothing: those of ``module``, and those
    of callbacks that write predictions. Returns what undoes it."""
    if is_last:
        return lambda: None
    silenced: list[tuple[Any, str]] = [(module, name) for name in (*_RESULT_HOOKS, *_BATCH_END_HOOKS)]
    writers = [callback for callback in callbacks if isinstance(callback, BasePredictionWriter)]
    silenced += [(writer, name) for writer in writers for name in ("on_predict_batch_end", "on_predict_epoch_end")]
    for owner, name in silenced:
        owner.__dict__[name] = _nothing

    def undo() -> None:
        for owner, name in silenced:
            owner.__dict__.pop(name, None)

    return undo


def _nothing(*_: Any, **__: Any) -> None:
    """In the place of a hook."""


class _GatherOverStage:
    """How a metric's states come together: from the pipelines' last stages, not from all ranks."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def __call__(self, result: Tensor, group: Any = None) -> list[Tensor]:
        return gather_all_tensors(result, group or self._group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _GatherOverStage:
        return self  # metrics are cloned, process groups cannot be


def gather_metrics_over(module: LightningModule, group: ProcessGroup) -> Callable[[], None]:
    """Makes torchmetrics objects of ``module`` compute over ``group``, unless they have a rule of their own. Returns
    what undoes it."""
    metrics = [m for m in module.modules() if isinstance(m, Metric) and m.dist_sync_fn is None]
    for metric in metrics:
        metric.dist_sync_fn = _GatherOverStage(group)

    def undo() -> None:
        for metric in metrics:
            metric.dist_sync_fn = None

    return undo
