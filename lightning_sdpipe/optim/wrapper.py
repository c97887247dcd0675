"""Base of optimizers that add something to another optimizer's steps."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sdpipe.errors import ConfigurationError


class OptimizerWrapper(Optimizer):
    """Shares ``param_groups`` and ``state`` with the wrapped optimizer, ``self.optimizer``.

    So learning-rate schedulers, hooks, ``state_dict`` and ``GradScaler`` treat it as that optimizer, and a checkpoint
    of the bare optimizer can be loaded.
    """

    _kept: ClassVar[tuple[str, ...]] = ()  # names of attributes that copies and pickles keep

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform one step.

        Args:
            closure: evaluates the model and returns the loss; it runs first, and its value is returned.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @abstractmethod
    def _step(self) -> None:
        """Step with the present gradients; autograd records nothing."""

    def _trained(self, group: dict[str, Any]) -> Iterator[Tensor]:
        """Yield the parameters of a group that have a gradient."""
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                raise RuntimeError(f"{type(self).__name__} does not support sparse gradients; use dense ones")
            yield param

    @abstractmethod
    def _check(self, group: dict[str, Any]) -> None:
        """Raise ConfigurationError if the wrapper cannot handle a group of parameters."""

    def _refuse_options(self, group: dict[str, Any], why: str) -> None:
        """Raise ConfigurationError if the group has options that make the wrapped optimizer compute in a graph."""
        for option in ("capturable", "differentiable"):
            if group.get(option):
                name = type(self).__name__
                raise ConfigurationError(
                    f"{name} cannot wrap an optimizer with {option}=True, since {why}: set {option}=False."
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to this and the wrapped optimizer, which share their groups.

        Raises:
            ConfigurationError: see the class.
        """
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except ConfigurationError:
            del self.param_groups[-1]
            raise

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self._kept}
        return {**super().__getstate__(), "optimizer": self.optimizer, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "optimizer" in state:  # unpickled or copied
            super().__setstate__(state)
        else:  # load_state_dict: the wrapped class updates old checkpoints
            self.optimizer.__setstate__(state)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
