"""Refusals, before training, of what Lightning offers and a pipeline cannot do, with the reason and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    LearningRateFinder,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, default_collate

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.lightning_internals import (
    Method,
    is_compiled,
    of_its_class,
    records_modules,
    replace,
    syncs_batchnorm,
)
from lightning_sdpipe.lightning_results import names_logged_by_step
from lightning_sdpipe.partition.chain import compiled_as_one
from lightning_sdpipe.pipeline.micro_batches import part_sizes

ONE_STAGE = "with num_stages=1 this works"
_OF_BATCHES = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks that may change the number of samples in a batch."""


def refuse_unsupported(trainer: Trainer, cut: bool) -> None:
    """Raise ConfigurationError for options of the Trainer or the module that do not go with a pipeline; some only where
    the module is ``cut`` into several stages."""
    module = trainer.lightning_module
    if cut and is_compiled(module):
        raise ConfigurationError(compiled_as_one(type(module).__name__))
    if cut and trainer.state.fn == TrainerFn.FITTING and not module.automatic_optimization:
        raise ConfigurationError(
            f"{type(module).__name__} uses manual optimization. A pipeline runs forward and backward of several "
            f"micro-batches in an order of its own, so the optimization must be automatic; {ONE_STAGE}."
        )
    if cut and takes_iterator(module):
        raise ConfigurationError(
            f"{type(module).__name__}.training_step takes a dataloader_iter. A mini-batch is split into micro-batches "
            f"before the step sees it: take the batch instead; {ONE_STAGE}."
        )
    if syncs_batchnorm(trainer.strategy):
        raise ConfigurationError(
            "sync_batchnorm=True would make every pipeline wait for all others in every layer. Leave it out: the "
            "statistics of BatchNorm are averaged over the pipelines before every validation and checkpoint."
        )
    if cut and records_modules(trainer.profiler):  # type: ignore[attr-defined]
        raise ConfigurationError(
            f"{type(trainer.profiler).__name__} times every module by hooks before and after it, and blocks of other "  # type: ignore[attr-defined]
            "stages do not run. Give it record_module_names=False: labels such as 'sdpipe:forward 0' say what a worker "
            "does."
        )
    for callback in trainer.callbacks if cut else ():  # type: ignore[attr-defined]
        _refuse_callback(trainer, callback)


def takes_iterator(module: LightningModule) -> bool:
    """Return whether the training step of ``module`` takes batches from an iterator itself."""
    return is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True)


def refuse_small_batches(module: LightningModule, loader: Any, num_micro_batches: int) -> None:
    """Raise ConfigurationError if every batch of ``loader`` has fewer samples than micro-batches, as far as that is
    known without asking it for one."""
    if not isinstance(loader, DataLoader) or loader.collate_fn is not default_collate or loader.batch_size is None:
        return
    if not hasattr(module, "split_batch") and not any(is_overridden(name, module) for name in _OF_BATCHES):
        part_sizes(loader.batch_size, num_micro_batches)


_CALLBACKS: Mapping[tuple[type[Callback], ...], str] = {
    (StochasticWeightAveraging, WeightAveraging): (
        "keeps a second copy of the whole model, and each worker holds its own stage only. Use "
        "lightning_sdpipe.SDPipeWeightAveraging, which averages that: SDPipeWeightAveraging(decay=0.999) for an "
        "exponential average, and with update_every_n_steps=0, update_starting_at_epoch=... for the ends of epochs"
    ),
    (ModelPruning,): (
        "replaces parameters by others while training goes on, when the model has been cut. Prune the trained model "
        "afterwards, with torch.nn.utils.prune"
    ),
    (LearningRateFinder,): (
        "stops where the loss grows, and the loss exists on last stages only. Find the learning rate with a smaller "
        "model in one process"
    ),
}
"""Callbacks that do not go with a cut model, with the reason and what to do."""


def _refuse_callback(trainer: Trainer, callback: Callback) -> None:
    why = next((said for kinds, said in _CALLBACKS.items() if isinstance(callback, kinds)), None)
    if isinstance(callback, OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False):
        trainer.callbacks.remove(callback)  # type: ignore[attr-defined]  # else it acts on this very exception
        why = (
            "would save a checkpoint after a failure, when the stages that are gone cannot give their part. Save at "
            "intervals: ModelCheckpoint(every_n_train_steps=...)"
        )
    if why is not None:
        raise ConfigurationError(f"{type(callback).__name__} {why}; {ONE_STAGE}.")


def leave_out_example(module: LightningModule) -> Callable[[], None]:
    """Take ``example_input_array`` off the module, with a warning: the summary and loggers would run it through the
    whole model, which no worker has. Return a function that puts it back."""
    example = module.example_input_array
    if example is None:
        return lambda: None
    module.example_input_array = None
    rank_zero_warn(
        "example_input_array is left out in this run, since no worker holds the whole model to run it through: the "
        "model summary shows no sizes, and loggers get no graph."
    )

    return lambda: setattr(module, "example_input_array", example)


def refuse_uninitialised(module: nn.Module) -> None:
    """Raise ConfigurationError if ``module`` has lazy parameters or buffers that have no shape yet."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    lazy = next((name for name, tensor in tensors if is_lazy(tensor)), None)
    if lazy is not None:
        raise ConfigurationError(
            f"{lazy!r} of {type(module).__name__} has no shape before its module has run, so it is not known what a "
            "stage holds. Run the lazy modules once on a batch in __init__ or setup, or give their sizes."
        )


@contextmanager
def refuse_several_optimizers(cut: bool) -> Iterator[None]:
    """Where the module is ``cut``, replace Lightning's error about several optimizers, which recommends manual
    optimization."""
    try:
        yield
    except RuntimeError as error:
        if not cut or "multiple optimizers" not in str(error):
            raise
        raise ConfigurationError(
            "configure_optimizers returned several optimizers; a pipeline steps exactly one. Use one optimizer with "
            f"several parameter groups; {ONE_STAGE}, by manual optimization."
        ) from error


def refuse_own_values(trainer: Trainer, why: str | None) -> None:
    """Refuse a plateau schedule by step that monitors what a training step has logged.

    Such a value is that of a pipeline's own batch, and exists on its last stage only. Those of validation, and of
    whole epochs, are the same on all workers.

    Args:
        trainer: about to fit.
        why: the reason why all workers must step alike; None if each pipeline may have a learning rate of its own.

    Raises:
        ConfigurationError: such a schedule asks for its value, at its first step.
    """
    loop: Any = trainer.fit_loop.epoch_loop

    def monitored(name: str) -> Any:
        value = of_its_class(loop, Method.MONITORED_VALUE)(name)
        by_step = [c for c in trainer.lr_scheduler_configs if c.reduce_on_plateau and c.interval == "step"]
        found = [config for config in by_step if config.monitor == name]
        if found and (name in names_logged_by_step(trainer) or (value is None and found[0].strict)):
            schedule = type(found[0].scheduler).__name__
            raise ConfigurationError(
                f"{schedule} steps with interval='step' and monitors {name!r}, which is not the same on all workers: "
                f"it is of a pipeline's own batch, and {why}. Give interval='epoch', or monitor what validation logs, "
                "with frequency=val_check_interval."
            )
        return value

    if why is not None:
        replace(loop, Method.MONITORED_VALUE, monitored)
