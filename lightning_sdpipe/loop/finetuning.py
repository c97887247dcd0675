"""Lightning's finetuning callbacks, where an optimizer's groups hold the parameters of one stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_sdpipe.lightning_internals import Method, of_its_class, replace, take_groups_to_restore

Groups = list[dict[str, Any]]


def adapt_finetuning(callbacks: Sequence[Callback], whole_groups: Callable[[int], Groups]) -> Callable[[], None]:
    """Let finetuning callbacks remember the groups of the whole optimizer, and find what is in a group by identity:
    Lightning compares values, which parameters of other stages do not have. Return a function that undoes the
    latter."""
    finetuning = [callback for callback in callbacks if isinstance(callback, BaseFinetuning)]

    def stored(callback: BaseFinetuning) -> Callable[..., None]:
        def store(pl_module: LightningModule, index: int, number_before: int, _: Groups) -> None:
            of_its_class(callback, Method.STORE_GROUPS)(pl_module, index, number_before, whole_groups(index))

        return store

    for callback in finetuning:
        replace(callback, Method.STORE_GROUPS, stored(callback))
    original = BaseFinetuning.__dict__["filter_on_optimizer"]
    BaseFinetuning.filter_on_optimizer = staticmethod(_new_to)  # type: ignore[method-assign, assignment]
    return partial(setattr, BaseFinetuning, "filter_on_optimizer", original)


def _new_to(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    given = [*parameters]
    new = [p for p in given if id(p) not in known]
    if len(new) < len(given):
        rank_zero_warn(
            "Parameters that are unfrozen are in a group of the optimizer already, and stay there. Give it in "
            "configure_optimizers those that train from the beginning: filter(lambda p: p.requires_grad, "
            "self.parameters())."
        )
    return new


def restore_groups(trainer: Trainer, optimizers: Sequence[Optimizer]) -> None:
    """Add the groups that a finetuning callback had added when it was saved, so that their state can be loaded.

    Lightning does so in ``on_fit_start``, before which this strategy cannot load the callback's state.
    """
    named = dict(trainer.lightning_module.named_parameters())
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BaseFinetuning):
            for number, groups in take_groups_to_restore(callback).items():
                for group in groups[len(optimizers[number].param_groups) :]:
                    parameters = [named[name] for name in group["params"]]
                    optimizers[number].add_param_group({**group, "params": parameters})
