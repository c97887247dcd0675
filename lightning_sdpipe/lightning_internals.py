"""Plain names for what the package uses of Lightning's private ones.

Lightning may change these in any release. Nothing else in the package names them except lightning_results.py, for
logged values. tests/test_lightning_internals.py says what each is used for and, when Lightning has changed one, which
function to mend.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from lightning.fabric.loggers.csv_logs import CSVLogger
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd as command_of_this_script
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver as ChildProcessObserver
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol as is_local_path
from lightning.fabric.utilities.device_dtype_mixin import _update_properties as note_device
from lightning.fabric.utilities.distributed import _init_dist_connection as open_process_group
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as set_num_threads
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    ModelCheckpoint,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loops.fetchers import _DataFetcher as DataFetcher
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher as PrefetchDataFetcher
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper as IndexBatchSampler
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO as WrappingCheckpointIO
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as MultiProcessingLauncher
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.launcher import _Launcher as Launcher
from lightning.pytorch.trainer.connectors.data_connector import _worker_check as suggest_workers
from lightning.pytorch.trainer.connectors.logger_connector.result import _get_default_dtype as type_of_logged_values
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.utils._pytree import tree_unflatten

__all__ = [  # those renamed here; the functions and classes below are public, too
    "ChildProcessObserver",
    "DataFetcher",
    "IndexBatchSampler",
    "Launcher",
    "MultiProcessingLauncher",
    "PrefetchDataFetcher",
    "SubprocessScriptLauncher",
    "WrappingCheckpointIO",
    "command_of_this_script",
    "is_local_path",
    "note_device",
    "open_process_group",
    "set_num_threads",
    "suggest_workers",
    "type_of_logged_values",
]

OVERRIDDEN = {
    "_check_log_dir_exists": "ExperimentWriter: a leader that takes over appends to the file of metrics",
    "_collect_rank_zero_results": "MultiProcessingLauncher: a part of a module is not brought home",
    "_configure_launcher": "Strategy: the launchers check before they start anything",
    "_get_process_group_backend": "DDPStrategy: tensors on the CPU travel, too",
    "_recover_results_in_main_process": "MultiProcessingLauncher: buffers that have grown find room",
    "_run": "ChildProcessObserver: the others end only if this process does not know that one has failed",
    "_wrapping_function": "MultiProcessingLauncher: a worker tells the others why it fails",
}
"""Private methods of Lightning's that classes of the package override under the same names."""


class Method(StrEnum):
    """Private methods of Lightning's that are replaced on one object for a run."""

    VALIDATES = "_should_check_val_fx"  # of an epoch's loop: is validation due after this batch?
    ACCUMULATES = "_should_accumulate"  # of an epoch's loop: do the gradients of this batch wait for those of others?
    MONITORED_VALUE = "_get_monitor_value"  # of an epoch's loop: the metric that a plateau schedule follows
    BROADCAST_SIGTERM = "_broadcast_sigterm_tensor"  # of an epoch's loop: called before every batch
    BEFORE_TRANSFER = "_on_before_batch_transfer"  # of a module: called first with every batch
    AFTER_CLOSURE = "_after_closure"  # of a precision plugin: gradients are computed, and the optimizer steps next
    STORE_RESULTS = "_store_dataloader_outputs"  # of an evaluation's loop: reduces values at the end of a dataloader
    STORE_GROUPS = "_store"  # of a finetuning callback: keeps the groups of the optimizer


def current(owner: Any, method: Method) -> Callable[..., Any]:
    """Return the method as it is now, replaced or not."""
    found: Callable[..., Any] = getattr(owner, method.value)
    return found


def of_its_class(owner: Any, method: Method) -> Callable[..., Any]:
    """Return the method as ``owner``'s class has it."""
    found: Callable[..., Any] = _method(owner, method.value)
    return found


class Replacement(partial[Any]):
    """A function in place of the method ``name`` of ``owner``. A copy of ``owner`` has the class's method again."""

    def __new__(cls, function: Callable[..., Any], owner: Any, name: str) -> Replacement:
        made = super().__new__(cls, function)
        vars(made).update(vars(function), owner=owner, name=name)
        return made

    def __reduce__(self) -> Any:
        return _method, (vars(self)["owner"], vars(self)["name"])


def _method(owner: Any, name: str) -> Any:
    return getattr(type(owner), name).__get__(owner)


def replace(owner: Any, method: Method, replacement: Callable[..., Any]) -> None:
    """Make Lightning call ``replacement`` in place of ``owner``'s method."""
    vars(owner)[method.value] = Replacement(replacement, owner, method.value)


def restore(owner: Any, method: Method) -> None:
    """Restore ``owner``'s method to that of its class."""
    vars(owner).pop(method.value, None)


def collective_timeout(strategy: Any) -> timedelta | None:
    """Return the time that collectives may take."""
    timeout: timedelta | None = strategy._timeout
    return timeout


def set_parallel_devices(strategy: Any, devices: Sequence[torch.device] | None) -> None:
    """Set ``strategy.parallel_devices``."""
    strategy._parallel_devices = devices


def compute_on_cpu(trainer: Any) -> None:
    """Make ``trainer`` compute on the CPU, in a process that cannot use its accelerator."""
    set_parallel_devices(trainer.strategy, [torch.device("cpu")] * len(trainer.strategy.parallel_devices))
    if hasattr(trainer.precision_plugin, "device"):  # that of autocast
        trainer.precision_plugin.device = "cpu"


def set_launcher(strategy: Any, launcher: Launcher) -> None:
    """Set ``strategy.launcher``."""
    strategy._launcher = launcher


def set_process_group_backend(strategy: Any, backend: str) -> None:
    """Set ``strategy.process_group_backend``."""
    strategy._process_group_backend = backend


def given_checkpoint_io(strategy: Any) -> CheckpointIO | None:
    """Return the plugin that ``strategy`` was given, or None, where its property ``checkpoint_io`` would make one."""
    io: CheckpointIO | None = strategy._checkpoint_io
    return io


def set_checkpoint_io(strategy: Any, io: CheckpointIO) -> None:
    """Set ``strategy.checkpoint_io``."""
    strategy._checkpoint_io = io


@contextmanager
def without_module(strategy: Any) -> Iterator[None]:
    """Hide the module from ``strategy`` within the block."""
    module, strategy._lightning_module = strategy._lightning_module, None
    try:
        yield
    finally:
        strategy._lightning_module = module


def syncs_batchnorm(strategy: Any) -> bool:
    """Return whether ``strategy`` converts BatchNorm so that all ranks compute its statistics together."""
    return getattr(strategy, "_layer_sync", None) is not None


def is_compiled(module: LightningModule) -> bool:
    """Return whether the user gave the Trainer the result of ``torch.compile(module)``."""
    return module._compiler_ctx is not None


def strategy_of(launcher: MultiProcessingLauncher) -> Any:
    """Return the strategy whose processes ``launcher`` starts."""
    return launcher._strategy


def mark_sigterm_received(trainer: Trainer) -> None:
    """Set ``trainer.received_sigterm``."""
    trainer._signal_connector.received_sigterm = True


def connectors(trainer: Trainer) -> tuple[object, ...]:
    """Return the parts of ``trainer`` that handle signals and checkpoints."""
    return trainer._signal_connector, trainer._checkpoint_connector


def on_sigterm(trainer: Trainer, handler: Callable[..., None]) -> None:
    """Make Lightning register ``handler`` for SIGTERM."""
    trainer._signal_connector._sigterm_notifier_fn = handler  # type: ignore[method-assign]


def on_requeue_signal(trainer: Trainer, handler: Callable[..., None]) -> None:
    """Make Lightning register ``handler`` for the signal by which Slurm asks a job to requeue itself."""
    trainer._signal_connector._slurm_sigusr_handler_fn = handler  # type: ignore[method-assign]


def checkpoint_of(trainer: Trainer) -> dict[str, Any]:
    """Return the contents of a checkpoint written now."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def resume_from_state(trainer: Trainer, state: dict[str, Any]) -> None:
    """Make Lightning resume from ``state`` once, in place of any checkpoint."""
    connector: Any = trainer._checkpoint_connector

    def resume_start(*_: Any, **__: Any) -> None:
        del connector.resume_start
        connector._loaded_checkpoint = state

    connector.resume_start = resume_start


def resume_from(trainer: Trainer, choose: Callable[[Any], Any]) -> None:
    """Make Lightning resume once from the checkpoint that ``choose`` returns, given the path, or None, from which
    Lightning would resume."""
    connector: Any = trainer._checkpoint_connector

    def resume_start(path: Any = None, **more: Any) -> None:
        del connector.resume_start
        connector.resume_start(choose(path), **more)

    connector.resume_start = resume_start


def data_source(loop: Any) -> Any:
    """Return the source that makes the dataloaders of ``loop``."""
    return loop._data_source


def loaders(loop: Any) -> Sequence[Any]:
    """Return the dataloaders of ``loop``; none before it has begun."""
    return () if loop._combined_loader is None else loop._combined_loader.flattened


def show_loaders(loop: Any, shown: Callable[[Any], Any]) -> None:
    """Show users of the Trainer ``shown(loader)`` in place of each dataloader of ``loop``."""
    if (combined := loop._combined_loader) is not None:
        combined._iterables = tree_unflatten([*map(shown, combined.flattened)], combined._spec)


def fetcher(loop: Any) -> DataFetcher | None:
    """Return the object that fetches batches for ``loop``, a training or evaluation loop."""
    found: DataFetcher | None = loop._data_fetcher
    return found


def set_fetcher(loop: Any, fetcher: DataFetcher) -> None:
    """Set the object that fetches batches for ``loop``, a training or evaluation loop."""
    loop._data_fetcher = fetcher


def evaluation_loop(trainer: Trainer) -> Any:
    """Return the loop of validation or testing that is running."""
    return trainer._evaluation_loop


def predictions(trainer: Trainer) -> list[list[Any]]:
    """Return what ``predict_step`` has returned for each batch of each dataloader."""
    found: list[list[Any]] = trainer.predict_loop._predictions
    return found


def validates_in_this_epoch(trainer: Trainer) -> bool:
    """Return whether this training epoch has validation."""
    return trainer.fit_loop.epoch_loop._should_check_val_epoch()


def may_stop_early(trainer: Trainer) -> bool:
    """Return whether ``trainer.should_stop`` takes effect now: ``min_epochs`` and ``min_steps`` are reached."""
    return trainer.fit_loop._can_stop_early


def skip_next_validation(trainer: Trainer) -> None:
    """Skip validation at the end of this turn of training."""
    trainer.fit_loop.epoch_loop._skip_next_val = True


def step_schedulers(trainer: Trainer, plateau: bool) -> None:
    """Step the learning rate schedulers that step with each update: those on a plateau, or the others."""
    trainer.fit_loop.epoch_loop._update_learning_rates(interval="step", update_plateau_schedulers=plateau)


def logged_steps(trainer: Trainer) -> int:
    """Return the step number that loggers get with values."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def set_logged_steps(trainer: Trainer, number: int) -> None:
    """Set the number that :func:`logged_steps` returns."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = number


@contextmanager
def due_by_clock(owner: Any, now: bool) -> Iterator[None]:
    """Within the block, suspend what ``owner`` does by the clock, unless the ranks agreed that it is due ``now``."""
    timer, saves = isinstance(owner, Timer), isinstance(owner, ModelCheckpoint)
    name = "_duration" if timer else "_train_time_interval" if saves else "_last_val_time"
    before = getattr(owner, name)
    if not now:
        setattr(owner, name, None if timer or saves else math.inf)
    try:
        yield
    finally:
        setattr(owner, name, before)


def seconds_between(owner: Any) -> Any:
    """Return the seconds after which a Timer ends training, a callback saves, or a Trainer validates; None if it does
    not go by the clock."""
    if isinstance(owner, Timer):
        return owner._duration if owner._interval == "step" else None
    if isinstance(owner, ModelCheckpoint):
        interval = owner._train_time_interval
        return None if interval is None else interval.total_seconds()
    return getattr(owner, "_val_check_time_interval", None)  # set when training begins


def seconds_left(owner: Any) -> float:
    """Return the seconds until ``owner`` next ends training, saves or validates by the clock."""
    if isinstance(owner, Timer):
        return float(seconds_between(owner) - owner.time_elapsed())
    before: Any = owner._last_time_checked if isinstance(owner, ModelCheckpoint) else owner._last_val_time
    return float(seconds_between(owner) - (time.monotonic() - before))


def set_seconds_left(owner: Any, seconds: float) -> None:
    """Set what :func:`seconds_left` returns."""
    before = time.monotonic() + seconds - seconds_between(owner)
    if isinstance(owner, Timer):
        owner._start_time[RunningStage.TRAINING] = before + owner._offset
    else:
        setattr(owner, "_last_time_checked" if isinstance(owner, ModelCheckpoint) else "_last_val_time", before)


def steps_between_saves(callback: Callback) -> int:
    """Return the number of steps between saves of ``callback``; 0 if it does not save by steps."""
    steps: int = getattr(callback, "_every_n_train_steps", 0)
    return steps


def average_model(callback: Callback) -> nn.Module | None:
    """Return the averaged copy of the module that one of Lightning's callbacks keeps; None if it keeps none."""
    if not isinstance(callback, StochasticWeightAveraging | WeightAveraging):
        return None
    average: nn.Module | None = callback._average_model
    return average


def take_groups_to_restore(callback: BaseFinetuning) -> Mapping[int, list[dict[str, Any]]]:
    """Take each optimizer's groups that ``callback`` has loaded from a checkpoint, so that it does not restore them."""
    if not callback._restarting:
        return {}
    callback._restarting = False
    return callback._internal_optimizer_metadata


def known_version(logger: Any) -> Any:
    """Return the number of this run if ``logger`` numbers its runs, else None."""
    return logger.version if hasattr(logger, "_version") else None


def set_version(logger: Any, version: int | str) -> None:
    """Set ``logger.version``."""
    logger._version = version


def has_writer(logger: CSVLogger) -> bool:
    """Return whether ``logger`` has a writer already."""
    return logger._experiment is not None


def set_writer(logger: CSVLogger, writer: ExperimentWriter) -> None:
    """Set the writer of ``logger``."""
    logger._experiment = writer


def count_pipelines(monitor: ThroughputMonitor, pipelines: int, stages: float) -> None:
    """Make ``monitor`` treat a pipeline, whose ``stages`` compute at the same time, as one device."""
    for throughput in monitor._throughputs.values():
        throughput.world_size = pipelines
        throughput.available_flops = monitor.available_flops and monitor.available_flops * stages


def records_modules(profiler: Any) -> bool:
    """Return whether ``profiler`` puts hooks around every module."""
    return getattr(profiler, "_record_module_names", False) is True


OF_EVERY_MODULE = frozenset({*vars(nn.Module()), *vars(LightningModule()), "log"} - {"_hparams"})
"""Attributes of a module that are not the user's; ``_hparams`` is left out, since hyperparameters are."""


def trainer_of(module: nn.Module) -> Any:
    """Return the Trainer that runs ``module``, or None. The public property would raise in place of None."""
    return vars(module).get("_trainer")


def goes_one_by_one(loader: CombinedLoader) -> bool:
    """Return whether ``loader`` finishes each dataloader before it begins the next."""
    return loader._mode == "sequential"


def as_combined(loader: CombinedLoader, batch: Any) -> Any:
    """Return ``batch``, of the only dataloader in ``loader``, in the structure that the user gave."""
    return tree_unflatten([batch], loader._spec)


@contextmanager
def profiled(fetcher: DataFetcher) -> Iterator[None]:
    """Make Lightning's profiler count the time of the block as time to fetch a batch."""
    fetcher._start_profiler()
    try:
        yield
    finally:
        fetcher._stop_profiler()


def batches_of(sampler: IndexBatchSampler) -> Any:
    """Return the source of the batches of ``sampler``, which remembers the indices that it yields."""
    return sampler._batch_sampler


def set_batches(sampler: IndexBatchSampler, batches: Any) -> None:
    """Set the source of the batches of ``sampler``."""
    sampler._batch_sampler = batches
