"""A running average of the weights: each worker keeps that of its stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from lightning_sdpipe.checkpoints.worker import Checkpoints
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.buckets import as_real

Average = Callable[[Tensor, Tensor, Any], Tensor]
AverageMany = Callable[[Any, Any, Any], None]

_CURRENT, _REST = "current_model_state", "averaging_state"  # Lightning's names, so that its callback reads them


class SDPipeWeightAveraging(Callback):
    """Averages the weights over the steps of a run, as Lightning's ``WeightAveraging`` and ``EMAWeightAveraging`` do.
    Those copy the whole module; here each worker keeps one copy of its own stage.

    Validation runs on the average. Checkpoints have it as their ``state_dict``, beside the weights with which training
    continues (``current_model_state``), and the module has it after training. If pipelines train models of their own,
    each has its own average. Where their models are made equal (before validation, checkpoints and the end of an
    epoch), their averages are, too: they become their mean, or with ``AllReduce`` that of the pipeline that has trained
    longest. Steps are counted by ``trainer.global_step``, so the averages of a fast and a slow pipeline weigh the same
    steps alike; a pipeline whose count rises by several at once adds its weights that many times.

    Override :meth:`should_update` to choose other moments. With ``update_every_n_steps=0`` and
    ``update_starting_at_epoch=k`` the ends of epochs are averaged, which is what ``StochasticWeightAveraging`` does,
    without its learning rates (torch's ``SWALR`` in ``configure_optimizers`` has them) and without its last pass for
    the statistics of BatchNorm, which are averaged as well.

    Args:
        device: where the average is kept, such as ``"cpu"``; by default where the stage is.
        use_buffers: whether buffers are averaged, too; otherwise the average has those of the last update.
        decay: decay of an exponential average; by default all updates count equally.
        update_every_n_steps: optimizer steps between two updates of the average; 0 for the ends of epochs only.
        update_starting_at_step: first step after which the average is updated, counted from 0.
        update_starting_at_epoch: also update it at the end of each epoch from this one on, counted from 0.
        avg_fn: used instead of ``decay``, as in :class:`torch.optim.swa_utils.AveragedModel`: takes the average so far,
            the current tensor and the number of averaged ones, and returns the new average.
        multi_avg_fn: the same in place, for lists of tensors.

    Raises:
        ConfigurationError: several ways to average are given, or a number is out of its range.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float | None = None,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        avg_fn: Average | None = None,
        multi_avg_fn: AverageMany | None = None,
    ) -> None:
        ways = {"decay": decay, "avg_fn": avg_fn, "multi_avg_fn": multi_avg_fn}
        given = [f"{name}=…" for name, value in ways.items() if value is not None]
        if len(given) > 1:
            raise ConfigurationError(f"{' and '.join(given)} say how to average: give one of them.")
        if decay is not None and not 0 <= decay <= 1:
            raise ConfigurationError(f"decay={decay} is not between 0 and 1, such as 0.999.")
        if update_every_n_steps < 0:
            raise ConfigurationError(
                f"update_every_n_steps={update_every_n_steps} is negative: give a number of steps, or 0 for the ends "
                "of epochs only."
            )
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch
        self._device = None if device is None else torch.device(device)
        self._use_buffers = use_buffers
        self._avg_fn = avg_fn if decay is None else get_ema_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._multi_avg_fn = multi_avg_fn
        self._states: Checkpoints | None = None
        self._alike: list[Tensor] = []
        self._average: AveragedModel | None = None
        self._steps = 0  # updates that it was asked about
        self._buffers = set[str]()  # those that were there when the fit began; later ones are not averaged

    def __repr__(self) -> str:
        """Return the description that joining pipelines compare."""
        numbers = self.update_every_n_steps, self.update_starting_at_step, self.update_starting_at_epoch
        every, step, epoch = numbers
        when = f"update_every_n_steps={every}, update_starting_at_step={step}, update_starting_at_epoch={epoch}"
        return f"{type(self).__name__}(use_buffers={self._use_buffers}, decay={self.decay}, {when})"

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to average after this optimizer step, or else at the end of this epoch; both count from 0. It
        must return the same on all workers."""
        if step_idx is not None:
            start, every = self.update_starting_at_step or 0, self.update_every_n_steps
            return step_idx >= start and every > 0 and step_idx % every == 0
        start_epoch = self.update_starting_at_epoch
        return epoch_idx is not None and start_epoch is not None and epoch_idx >= start_epoch

    def connect(self, states: Checkpoints, alike: list[Tensor]) -> None:
        """Begin a fit. ``states`` saves its module; tensors added to ``alike`` are made equal where models are."""
        self._states, self._alike = states, alike

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._states is None:
            raise ConfigurationError(
                f"{type(self).__name__} averages the stages of an SDPipeStrategy. With "
                f"{type(trainer.strategy).__name__} use lightning.pytorch.callbacks.EMAWeightAveraging or "
                "WeightAveraging, which take the same arguments."
            )
        self._buffers = {name for name, _ in pl_module.named_buffers()}
        device = self._device or trainer.strategy.root_device
        average = AveragedModel(nn.Module(), device, self._avg_fn, self._multi_avg_fn, self._use_buffers)
        held = self._held(pl_module)
        copies = _flat_copies(list(tensors_in(held)), device)
        for (name, _), copy in zip(held.named_parameters(), copies, strict=False):
            average.module.register_parameter(name, nn.Parameter(copy, requires_grad=False))
        for (name, _), copy in zip(held.named_buffers(), copies[len(list(held.parameters())) :], strict=True):
            average.module.register_buffer(name, copy)
        self._alike += [*_memory(tensors_in(average.module)), average.n_averaged]
        self._average = average

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for step in range(self._steps, trainer.global_step):
            if self.should_update(step_idx=step):
                self._averaged.update_parameters(self._held(pl_module))
        self._steps = trainer.global_step

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.should_update(epoch_idx=trainer.current_epoch):
            self._averaged.update_parameters(self._held(pl_module))

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._average is not None:
            self._swap(pl_module)

    on_validation_epoch_end = on_validation_epoch_start  # the second swap puts the weights back

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for average, current in self._pairs(pl_module):
            current.data.copy_(average)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._average = self._states = None
        self._alike = []

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._average is None or self._states is None:  # a run is over, and the module has the average
            return
        checkpoint[_CURRENT] = checkpoint["state_dict"]
        pairs = self._pairs(pl_module)
        own = {_place(current): average for average, current in pairs if current.numel()}
        live = {current.untyped_storage().data_ptr() for _, current in pairs}
        self._swap(pl_module)
        try:
            state = self._states.module_state()
            checkpoint["state_dict"] = {name: _lasting(value, own, live) for name, value in state.items()}
        finally:
            self._swap(pl_module)
        checkpoint[_REST] = {"n_averaged": self._average.n_averaged}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._average is None or self._states is None:
            return
        for average, current in self._pairs(pl_module):  # whose state_dict has been loaded
            average.copy_(current.data)
        if _CURRENT in checkpoint and _REST in checkpoint:
            self._average.n_averaged.copy_(checkpoint[_REST]["n_averaged"])
            self._states.load_module(checkpoint[_CURRENT], pl_module.strict_loading)
        else:
            rank_zero_warn(
                f"The checkpoint was written without {type(self).__name__}: the average begins with its weights."
            )

    @property
    def _averaged(self) -> AveragedModel:
        assert self._average is not None, "on_fit_start makes it"
        return self._average

    def _pairs(self, module: LightningModule) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of this stage's tensors: the average, and the present value."""
        averages = [tensor.detach() for tensor in tensors_in(self._averaged.module)]
        return list(zip(averages, tensors_in(self._held(module)), strict=True))

    def _held(self, module: LightningModule) -> nn.Module:
        """Return what this worker holds of ``module``, as a module of its own."""
        assert self._states is not None
        held = nn.Module()
        for number, parameter in enumerate(p for p in module.parameters() if not p.is_meta):
            held.register_parameter(f"parameter{number}", parameter)
        averaged = ((name, buffer) for name, buffer in module.named_buffers() if name in self._buffers)
        for number, buffer in enumerate(buffer for name, buffer in averaged if self._states.holds(name)):
            held.register_buffer(f"buffer{number}", buffer)
        return held

    def _swap(self, module: LightningModule) -> None:
        for average, current in self._pairs(module):
            before = current.data.clone()
            current.data.copy_(average)
            average.copy_(before)


def averaging_of(callbacks: Sequence[Callback]) -> SDPipeWeightAveraging | None:
    """Return the averaging callback among ``callbacks``, if there is one.

    Raises:
        ConfigurationError: there are several.
    """
    found = [callback for callback in callbacks if isinstance(callback, SDPipeWeightAveraging)]
    if len(found) > 1:
        raise ConfigurationError(
            f"The Trainer has {len(found)} SDPipeWeightAveraging callbacks, and a checkpoint has one average. Give one."
        )
    return found[0] if found else None


def tensors_in(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of ``module``."""
    return chain(module.parameters(), module.buffers())


def _flat_copies(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy ``tensors``, one after another in a contiguous tensor for each dtype, so that few are exchanged."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    left = {dtype: torch.empty(size, dtype=dtype, device=device) for dtype, size in sizes.items()}
    copies = []
    for tensor in tensors:
        memory, left[tensor.dtype] = left[tensor.dtype].tensor_split([tensor.numel()])
        copies.append(memory.view(tensor.shape).copy_(tensor.detach()))
    return copies


def _memory(copies: Iterator[Tensor]) -> list[Tensor]:
    """Return the contiguous tensors in which :func:`_flat_copies` has put the copies."""
    flat = {}
    for copy in copies:
        storage = copy.untyped_storage()
        if storage.nbytes():
            whole = torch.empty(0, dtype=copy.dtype, device=copy.device)
            flat[storage.data_ptr()] = as_real(whole.set_(storage))
    return list(flat.values())


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _lasting(value: Any, own: Mapping[tuple[Any, ...], Tensor], live: Set[int]) -> Any:
    """Return ``value``, read while the module held the average, in memory that keeps it when the weights return."""
    if not isinstance(value, Tensor) or value.is_meta or value.untyped_storage().data_ptr() not in live:
        return value
    return own[_place(value)] if _place(value) in own else value.clone()
