"""Layers that are frozen or unfrozen while a run goes on.

Freezing determines which gradients exist and travel, which parameters are averaged, and which boundary between stages
needs a gradient. So a change is taken over between two mini-batches, where nothing is under way and all pipelines are
together; until then all go by what was agreed last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.buckets import FlatBucket, flatten
from lightning_sdpipe.lightning_internals import Method, of_its_class, replace, take_groups_to_restore
from lightning_sdpipe.p2p import waiting_for
from lightning_sdpipe.topology.groups import ProcessGroups


class Freezing:
    """Tracks which parameters of a stage train. As a context around a step it refuses changes within: then the block
    ends with a ConfigurationError.

    Args:
        module: the whole module. Parameters of other stages are on ``meta``, and have ``requires_grad`` all the same.
        parameters: this stage's, about in the order in which a backward completes their gradients.
        groups: this worker's process groups.
        together: tensors over the same memory.
        sections: that of each parameter, if its replicas depend on it.

    Raises:
        ConfigurationError: ranks differ in which parameters train, or in which modules are in training mode. All ranks
            must construct it.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        groups: ProcessGroups,
        together: Sequence[Sequence[Tensor]] = (),
        sections: Mapping[nn.Parameter, int] = MappingProxyType({}),
    ) -> None:
        self._module = module
        self._named = list(module.named_parameters())
        modes = {name: m.training for name, m in module.named_modules()}
        self._parameters = parameters
        self._groups = groups
        self._together = together
        self._sections = sections
        self.generation = 0
        """Number of changes; equal on all stages."""
        self.trained: list[nn.Parameter] = []
        """Parameters of ``parameters`` that train, in their order. The list itself changes."""
        self.buckets: list[FlatBucket] = []
        """Buckets of all ``parameters``. The list itself changes."""
        self._refuse_different(self._flags(), "comparing which layers train")
        different = self._different(list(modes.values()), "comparing training modes")
        if different is not None:
            raise ConfigurationError(
                f"Module {list(modes)[different]!r} is in training mode on some ranks only. Every rank has every "
                "module, those of other stages too: call train() and eval() on the same modules on every rank."
            )
        self._agree()

    def changed(self) -> bool:
        """Return whether the user has frozen or unfrozen anything since :meth:`take_over`."""
        return self._flags() != self._agreed

    def refuse_new_parameters(self) -> None:
        """Raise ConfigurationError if the module has parameters that it had not when it was cut."""
        known = {id(p) for _, p in self._named}
        new = next((name for name, p in self._module.named_parameters() if id(p) not in known), None)
        if new is not None:
            raise ConfigurationError(
                f"{new!r} was added to {type(self._module).__name__} after it had been cut, so no stage owns it. Make "
                "all parameters in __init__, configure_model or setup; later, change their values, as by "
                "layer.reset_parameters()."
            )

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the name of ``parameter`` in the module."""
        return next((name for name, named in self._named if named is parameter), "")

    def take_over(self) -> None:
        """Take over what the user has changed. All workers of the run must call it, and nothing may be under way.

        Raises:
            ConfigurationError: it was changed on some ranks only.
            WorkerFailedError: another rank is gone, or has not changed anything within the timeout.
        """
        self._refuse_different(self._flags(), "agreeing on which layers train (requires_grad has changed)")
        self.generation += 1
        self._agree()

    def __enter__(self) -> None:
        """Enter a step, in which changes are refused."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if (error is None or isinstance(error, Exception)) and self.changed():
            raise ConfigurationError(
                "requires_grad was changed within training_step, which runs once for each micro-batch. Freeze and "
                "unfreeze layers in on_train_epoch_start or on_train_batch_start."
            ) from error

    def _refuse_different(self, flags: Sequence[bool], doing: str) -> None:
        different = self._different(flags, doing)
        if different is not None:
            raise ConfigurationError(
                f"requires_grad of {self._named[different][0]!r} was set on some ranks only. Every rank has "
                "every parameter, most of them on the meta device: set requires_grad of those too, through the module "
                "(not through parameters kept from before training), and in all pipelines at the same batch."
            )

    def _different(self, flags: Sequence[bool], doing: str) -> int | None:
        """Return the place of the first of ``flags`` that is not the same on all ranks."""
        mine = torch.tensor(flags, dtype=torch.uint8)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        with waiting_for(self._groups.world, doing):
            dist.all_gather(gathered, mine)
        places = (torch.stack(gathered) != mine).any(0).nonzero()
        return int(places[0]) if len(places) else None

    def _flags(self) -> list[bool]:
        return [parameter.requires_grad for _, parameter in self._named]

    def _agree(self) -> None:
        self._agreed = self._flags()
        self.trained[:] = [p for p in self._parameters if p.requires_grad]
        self.buckets.clear()  # before the new ones are made, so that old memory is let go of meanwhile
        self.buckets += flatten(self._parameters, self._together, self._sections)


Groups = list[dict[str, Any]]


def adapt_finetuning(callbacks: Sequence[Callback], whole_groups: Callable[[int], Groups]) -> Callable[[], None]:
    """Let finetuning callbacks remember the groups of the whole optimizer, and find what is in a group by identity:
    Lightning compares values, which those of other stages do not have. Return a function that undoes the second."""
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
