"""Lightning's finetuning callbacks on a worker that holds a stage: its optimizer's groups lack the other stages'."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.optim import Optimizer

from lightning_sdpipe.lightning_internals import Method, of_its_class, replace, restore, take_groups_to_restore

Groups = list[dict[str, Any]]


def adapt(callbacks: Sequence[Callback], whole_groups: Callable[[], Groups]) -> Callable[[], None]:
    """Let finetuning callbacks remember the groups of the whole optimizer, and find what is in a group by identity:
    Lightning compares values, which those of other stages do not have. Return a function that undoes it."""
    finetuning = [callback for callback in callbacks if isinstance(callback, BaseFinetuning)]
    if not finetuning:
        return lambda: None

    def stored(callback: BaseFinetuning) -> Callable[..., None]:
        def store(pl_module: LightningModule, index: int, number_before: int, _: Groups) -> None:
            of_its_class(callback, Method.STORE_GROUPS)(pl_module, index, number_before, whole_groups())

        return store

    for callback in finetuning:
        replace(callback, Method.STORE_GROUPS, stored(callback))
    original = BaseFinetuning.__dict__["filter_on_optimizer"]
    BaseFinetuning.filter_on_optimizer = staticmethod(_new_to)  # type: ignore[method-assign, assignment]

    def undo() -> None:
        BaseFinetuning.filter_on_optimizer = original  # type: ignore[method-assign]
        for callback in finetuning:
            restore(callback, Method.STORE_GROUPS)

    return undo


def _new_to(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [p for p in parameters if id(p) not in known]


def restore_groups(trainer: Trainer, optimizer: Optimizer) -> None:
    """Add the groups that a finetuning callback had added when it was saved, so that their state can be loaded.

    Lightning does so in ``on_fit_start``, before which this strategy cannot load the callback's state.
    """
    named = dict(trainer.lightning_module.named_parameters())
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BaseFinetuning):
            for group in take_groups_to_restore(callback)[len(optimizer.param_groups) :]:
                optimizer.add_param_group({**group, "params": [named[name] for name in group["params"]]})
