"""That Lightning still has what it keeps private and the package uses; if not, what that was for, and where to mend it.

A symbol that has moved or changed fails here by its name. What the functions of ``lightning_internals`` do with it is
tested where the package uses them.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import lightning
import pytest

from tests.test_bars import INTERNALS, LIGHTNING, PACKAGE, knows_lightning, modules, of_the_package, tree

# INTERNALS is imported in tests only: it may fail to be, and the table says why.


@dataclass(frozen=True)
class Symbol:
    """One name.

    Args:
        place: the module or class that declares it, after ``lightning.``.
        name: without the place.
        use: what the package uses it for.
        mend: the function or the name in lightning_internals.py or lightning_results.py; for what is overridden, the
            class that does.
        takes: names of its parameters besides ``self``, for what the package calls or replaces.
    """

    place: str
    name: str
    use: str
    mend: str
    takes: str | None = None


_LAUNCHERS = "pytorch.strategies.launchers"
_EPOCH = "pytorch.loops.training_epoch_loop._TrainingEpochLoop"
_RESULTS = "pytorch.trainer.connectors.logger_connector.result"
_FETCHERS = "pytorch.loops.fetchers"
_TRAINER = "pytorch.trainer.trainer.Trainer"
_DDP = "pytorch.strategies.ddp.DDPStrategy"
_STRATEGY = "pytorch.strategies.strategy.Strategy"
_SIGNALS = "pytorch.trainer.connectors.signal_connector._SignalConnector"
_SAVING = "pytorch.callbacks.model_checkpoint.ModelCheckpoint"
_THROUGHPUT = "pytorch.callbacks.throughput_monitor.ThroughputMonitor"
_FINETUNING = "pytorch.callbacks.finetuning.BaseFinetuning"
_PROCESSES = "pytorch.strategies.launchers.multiprocessing._MultiProcessingLauncher"
_OBSERVER = "fabric.strategies.launchers.subprocess_script._ChildProcessObserver"
_SCRIPT = "fabric.strategies.launchers.subprocess_script"
_CONNECT = "cluster_environment torch_distributed_backend global_rank world_size kwargs"

SYMBOLS = [
    Symbol(_SCRIPT, "_basic_subprocess_cmd", "starts the processes of a script", "command_of_this_script", ""),
    Symbol(_SCRIPT, "_ChildProcessObserver", "ends a job one of whose processes failed", "ChildProcessObserver"),
    Symbol("fabric.utilities.cloud_io", "_is_local_file_protocol", "writes whole files", "is_local_path", "path"),
    Symbol(
        *("fabric.utilities.device_dtype_mixin", "_update_properties"),
        *("tells a module whose tensors have moved its device", "note_device", "root device dtype"),
    ),
    Symbol(
        *("fabric.utilities.distributed", "_init_dist_connection", "opens the process group through a store of ours"),
        *("open_process_group", _CONNECT),
    ),
    Symbol(
        *("fabric.utilities.distributed", "_set_num_threads_if_needed", "shares out the cores of a machine"),
        *("set_num_threads", "num_processes"),
    ),
    Symbol(_FETCHERS, "_DataFetcher", "makes fetchers of dealt and joint batches", "DataFetcher"),
    Symbol(_FETCHERS, "_PrefetchDataFetcher", "makes the fetcher of uneven data", "PrefetchDataFetcher"),
    Symbol(f"{_FETCHERS}._DataFetcher", "_start_profiler", "counts the time of fetching", "profiled"),
    Symbol(f"{_FETCHERS}._DataFetcher", "_stop_profiler", "counts the time of fetching", "profiled"),
    Symbol(
        *("pytorch.overrides.distributed", "_IndexBatchSamplerWrapper"),
        *("deals the batches of prediction", "IndexBatchSampler"),
    ),
    Symbol(
        *("pytorch.overrides.distributed._IndexBatchSamplerWrapper", "_batch_sampler"),
        *("deals the batches of prediction", "batches_of, set_batches"),
    ),
    Symbol("pytorch.plugins.io.wrapper", "_WrappingCheckpointIO", "writes whole files", "WrappingCheckpointIO"),
    Symbol(_LAUNCHERS, "_MultiProcessingLauncher", "makes the launcher for spawn and fork", "MultiProcessingLauncher"),
    Symbol(_LAUNCHERS, "_SubprocessScriptLauncher", "makes the launcher of scripts", "SubprocessScriptLauncher"),
    Symbol(
        *("pytorch.trainer.connectors.data_connector", "_worker_check", "hints at more workers", "suggest_workers"),
        "trainer dataloader name",
    ),
    Symbol(f"{_LAUNCHERS}.launcher", "_Launcher", "names the type of launchers", "Launcher"),
    Symbol(_RESULTS, "_get_default_dtype", "adds up logged values as Lightning does", "type_of_logged_values", ""),
    # overridden
    Symbol(
        *("fabric.loggers.csv_logs._ExperimentWriter", "_check_log_dir_exists"),
        *("keeps the rows of an earlier leader", "worker.elastic.leader._Appending", ""),
    ),
    Symbol(
        *(_PROCESSES, "_collect_rank_zero_results", "leaves out a part of a module"),
        *("worker.launching.launcher.WholeModelLauncher", "trainer results"),
    ),
    Symbol(
        *(_PROCESSES, "_recover_results_in_main_process", "makes room for buffers that have grown"),
        *("worker.launching.launcher.WholeModelLauncher", "worker_output trainer"),
    ),
    Symbol(
        *(_PROCESSES, "_wrapping_function", "tells other workers of a failure"),
        *(
            "worker.launching.launcher.WholeModelLauncher",
            "process_idx trainer function args kwargs return_queue global_states",
        ),
    ),
    Symbol(_DDP, "_configure_launcher", "chooses the launcher", "strategy.strategy.SDPipeStrategy", ""),
    Symbol(_DDP, "_get_process_group_backend", "opens gloo, too", "strategy.strategy.SDPipeStrategy", ""),
    Symbol(_OBSERVER, "_run", "ends a job one of whose processes failed", "worker.launching.launcher._Observer", ""),
    # replaced on one object
    Symbol(_EPOCH, "_should_check_val_fx", "validates together, by the clock", "Method.VALIDATES", "data_fetcher"),
    Symbol(_EPOCH, "_should_accumulate", "closes windows of dealt batches", "Method.ACCUMULATES", ""),
    Symbol(_EPOCH, "_get_monitor_value", "refuses a schedule's own values", "Method.MONITORED_VALUE", "key"),
    Symbol(_EPOCH, "_broadcast_sigterm_tensor", "keeps workers from waiting", "Method.BROADCAST_SIGTERM", ""),
    Symbol(
        *("pytorch.core.module.LightningModule", "_on_before_batch_transfer"),
        *("begins the random stream of a batch", "Method.BEFORE_TRANSFER", "batch dataloader_idx"),
    ),
    Symbol(
        *("pytorch.plugins.precision.precision.Precision", "_after_closure"),
        *("begins the random stream of an update", "Method.AFTER_CLOSURE", "model optimizer"),
    ),
    Symbol(
        *(_FINETUNING, "_store", "stores the groups of all stages", "Method.STORE_GROUPS"),
        "pl_module opt_idx num_param_groups current_param_groups",
    ),
    # strategies and launchers
    Symbol(_DDP, "_start_method", "chooses the launcher", "start_method"),
    Symbol(_DDP, "_timeout", "opens the process group", "collective_timeout"),
    Symbol(_DDP, "_process_group_backend", "opens the process group", "set_process_group_backend"),
    Symbol(
        "pytorch.strategies.parallel.ParallelStrategy",
        "_parallel_devices",
        "has a job's devices",
        "set_parallel_devices",
    ),
    Symbol(_STRATEGY, "_launcher", "has a launcher of ours", "set_launcher"),
    Symbol(_STRATEGY, "_checkpoint_io", "writes whole files", "given_checkpoint_io, set_checkpoint_io"),
    Symbol(_STRATEGY, "_lightning_module", "keeps meta tensors where they are", "without_module"),
    Symbol(_DDP, "_layer_sync", "refuses sync_batchnorm", "syncs_batchnorm"),
    Symbol("pytorch.core.module.LightningModule", "_compiler_ctx", "refuses torch.compile(model)", "is_compiled"),
    Symbol(_PROCESSES, "_strategy", "tells other workers of a failure", "strategy_of"),
    # signals, resuming
    Symbol(
        *(_TRAINER, "_signal_connector", "handles signals"),
        "mark_sigterm_received, on_sigterm, on_requeue_signal, connectors",
    ),
    Symbol(_SIGNALS, "_sigterm_notifier_fn", "ends this worker alone", "on_sigterm", "signum _"),
    Symbol(_SIGNALS, "_slurm_sigusr_handler_fn", "declines to requeue", "on_requeue_signal", "signum _"),
    Symbol(
        _TRAINER, "_checkpoint_connector", "gives newcomers a state", "checkpoint_of, resume_from_state, connectors"
    ),
    Symbol(
        *("pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector", "_loaded_checkpoint"),
        *("resumes from another worker's state", "resume_from_state"),
    ),
    # loops
    Symbol("pytorch.loops.fit_loop._FitLoop", "_data_source", "takes samples before training", "data_source"),
    Symbol("pytorch.loops.evaluation_loop._EvaluationLoop", "_data_source", "takes samples, too", "data_source"),
    Symbol("pytorch.loops.prediction_loop._PredictionLoop", "_data_source", "takes samples, too", "data_source"),
    Symbol("pytorch.loops.fit_loop._FitLoop", "_combined_loader", "knows loaders that are even", "loaders"),
    Symbol("pytorch.loops.prediction_loop._PredictionLoop", "_combined_loader", "collects predictions", "loaders"),
    Symbol("pytorch.loops.prediction_loop._PredictionLoop", "_predictions", "collects predictions", "predictions"),
    Symbol("pytorch.loops.fit_loop._FitLoop", "_data_fetcher", "gives other batches", "fetcher, set_fetcher"),
    Symbol("pytorch.loops.evaluation_loop._EvaluationLoop", "_data_fetcher", "shares out batches", "set_fetcher"),
    Symbol(_TRAINER, "_evaluation_loop", "knows the number of a batch", "evaluation_loop"),
    Symbol(_EPOCH, "_should_check_val_epoch", "knows the next sync point", "validates_in_this_epoch", ""),
    Symbol("pytorch.loops.fit_loop._FitLoop", "_can_stop_early", "ends a segment of dealt batches", "may_stop_early"),
    Symbol(_EPOCH, "_skip_next_val", "ends an epoch whose last batch is in a checkpoint", "skip_next_validation"),
    Symbol(
        *(_EPOCH, "_update_learning_rates", "steps schedules by the progress of all", "step_schedulers"),
        "interval update_plateau_schedulers",
    ),
    Symbol(_EPOCH, "_batches_that_stepped", "logs at the steps of all", "logged_steps, set_logged_steps"),
    # the clock
    Symbol("pytorch.trainer.setup", "_val_check_time_interval", "validates by the clock", "seconds_between"),
    Symbol("pytorch.loops.fit_loop", "_last_val_time", "validates together", "due_by_clock, seconds_left"),
    Symbol("pytorch.callbacks.timer.Timer", "_duration", "looks at the clock together", "seconds_between"),
    Symbol("pytorch.callbacks.timer.Timer", "_start_time", "sets clocks by the leader's", "set_seconds_left"),
    Symbol("pytorch.callbacks.timer.Timer", "_offset", "sets clocks by the leader's", "set_seconds_left"),
    Symbol("pytorch.callbacks.timer.Timer", "_interval", "looks at the clock together", "seconds_between"),
    Symbol(_SAVING, "_train_time_interval", "looks at the clock together", "seconds_between"),
    Symbol(_SAVING, "_last_time_checked", "looks at the clock together", "seconds_left, set_seconds_left"),
    # callbacks
    Symbol(_SAVING, "_every_n_train_steps", "knows the next sync point", "steps_between_saves"),
    Symbol("pytorch.profilers.pytorch.PyTorchProfiler", "_record_module_names", "refuses hooks", "records_modules"),
    Symbol(_THROUGHPUT, "_throughputs", "counts pipelines", "count_pipelines"),
    Symbol("pytorch.callbacks.WeightAveraging", "_average_model", "makes averages equal", "average_model"),
    Symbol("pytorch.callbacks.StochasticWeightAveraging", "_average_model", "makes averages equal", "average_model"),
    Symbol(_FINETUNING, "_restarting", "loads optimizers before callbacks", "take_groups_to_restore"),
    Symbol(_FINETUNING, "_internal_optimizer_metadata", "adds groups before loading", "take_groups_to_restore"),
    # logged values
    Symbol(_TRAINER, "_logger_connector", "gives all workers the same metrics", "lightning_results.adopt_metrics"),
    Symbol(
        *("pytorch.trainer.connectors.logger_connector.logger_connector._LoggerConnector", "_first_loop_iter"),
        *("gives all workers the same metrics", "lightning_results.adopt_metrics"),
    ),
    Symbol(
        *(_TRAINER, "_results", "gives all workers the same metrics"),
        "lightning_results.adopt_metrics, lightning_results.values_to_reduce, lightning_results.expect_values, "
        "lightning_results.pack_results, lightning_results.merge_results",
    ),
    Symbol(
        *(f"{_RESULTS}._ResultMetric", "_reductions", "knows which of torchmetrics' states can be merged"),
        "lightning_results.why_not_merged",
    ),
    Symbol(
        *("pytorch.loops.evaluation_loop._EvaluationLoop", "_store_dataloader_outputs"),
        *("lets all pipelines reduce the same values", "Method", ""),
    ),
    Symbol(_EPOCH, "_results", "knows what a step has logged", "lightning_results.names_logged_by_step"),
    Symbol(
        *(f"{_RESULTS}._ResultCollection", "_forked_name", "finds a metric by its name"),
        *("lightning_results.adopt_metrics, lightning_results.names_logged_by_step", "result_metric on_step"),
    ),
    Symbol(
        f"{_RESULTS}._ResultMetric",
        "_forward_cache",
        "gives all workers the same metrics, and logs those of a step",
        "lightning_results.adopt_metrics, lightning_results.value_of_batch, lightning_results.set_value_of_batch",
    ),
    Symbol(
        *(_RESULTS, "_computed", "gives all workers the same metrics"),
        "lightning_results.adopt_metrics, lightning_results.merge_results, lightning_results.unpack_metrics",
    ),
    Symbol("fabric.loggers.csv_logs.CSVLogger", "_version", "goes on with the leader's", "known_version, set_version"),
    Symbol("fabric.loggers.tensorboard.TensorBoardLogger", "_version", "goes on with the leader's", "known_version"),
    Symbol("fabric.loggers.csv_logs.CSVLogger", "_experiment", "goes on with the leader's file", "has_writer"),
    # modules, loaders
    Symbol("pytorch.core.module.LightningModule", "_trainer", "finds the optimizer of a rehearsal", "trainer_of"),
    Symbol(
        "pytorch.core.mixins.hparams_mixin.HyperparametersMixin",
        "_hparams",
        "follows hyperparameters",
        "OF_EVERY_MODULE",
    ),
    Symbol("pytorch.utilities.combined_loader.CombinedLoader", "_mode", "takes samples", "goes_one_by_one"),
    Symbol("pytorch.utilities.combined_loader.CombinedLoader", "_spec", "gives other batches", "as_combined"),
    Symbol("pytorch.utilities.combined_loader.CombinedLoader", "_iterables", "shows loaders", "show_loaders"),
]


@pytest.mark.parametrize("symbol", SYMBOLS, ids=lambda symbol: f"{symbol.place.rpartition('.')[2]}.{symbol.name}")
def test_lightning_still_has(symbol: Symbol) -> None:
    where = f"lightning.{symbol.place}.{symbol.name}"
    to_do = f"By it the package {symbol.use}. Find what has taken its place, and mend {symbol.mend}"
    try:
        place = _resolve(f"lightning.{symbol.place}")
    except (ImportError, AttributeError) as error:
        pytest.fail(f"Lightning {lightning.__version__} has no lightning.{symbol.place} ({error}). {to_do}.")
    there = _declares(place, symbol.name)
    assert there, f"Lightning {lightning.__version__} has no {where} any more. {to_do}."
    if symbol.takes is not None:
        takes = [name for name in inspect.signature(getattr(place, symbol.name)).parameters if name != "self"]
        was = symbol.takes.split()
        assert takes == was, f"{where} takes {takes} in Lightning {lightning.__version__}, and took {was}. {to_do}."


def test_the_table_names_all_that_the_package_uses() -> None:
    found = set()
    for node in (node for module in INTERNALS for node in ast.walk(tree(module))):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.startswith(LIGHTNING):
                found |= {alias.name for alias in names}
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                found.add(name)
    assert {name for name in found if re.fullmatch("_[a-z]\\w*", name, re.IGNORECASE)} == {s.name for s in SYMBOLS}


def test_functions_to_mend_exist_and_are_used() -> None:
    bodies = [node for module in INTERNALS for node in tree(module).body]
    functions = {node.name for node in bodies if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}
    for symbol in SYMBOLS:
        for name in symbol.mend.split(", "):
            place = PACKAGE if re.match("(worker|strategy|lightning_results)\\.", name) else INTERNALS[0]
            _resolve(f"{place}.{name}")
    others = "".join(path.read_text() for name, path in modules().items() if name not in INTERNALS)
    assert [name for name in functions if not re.search(rf"\b{name}\b", others)] == []


def test_what_is_overridden_is_listed() -> None:
    methods = ((kind, name) for kind in _classes() for name, value in vars(kind).items() if callable(value))
    found = {name for kind, name in methods if _is_lightnings(kind, name)}
    assert found == set(import_module(INTERNALS[0]).OVERRIDDEN)


def _resolve(path: str) -> Any:
    """A module, a class or an attribute, by its full name."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            found = getattr(found, name)
        return found
    raise ImportError(f"there is no {path}")


def _declares(place: Any, name: str) -> bool:
    """As an attribute of a class or module, or of an object to which its code assigns it."""
    kinds = [place] if isinstance(place, ModuleType) else [kind for kind in place.__mro__ if kind is not object]
    return hasattr(place, name) or any(name in _assigned(kind) for kind in kinds)


@cache
def _assigned(kind: Any) -> frozenset[str]:
    if not (kind.__module__ if isinstance(kind, type) else kind.__name__).startswith(("lightning.", "torchmetrics.")):
        return frozenset()
    text = inspect.getsource(kind)
    return frozenset(re.findall(r"\.(_\w+)(?:: [^=\n]+)? = ", text)) | frozenset(re.findall(r", self\.(_\w+) = ", text))


def _classes() -> Iterator[type]:
    """Those of the package that may have bases of Lightning's."""
    for name in of_the_package():
        if knows_lightning(name):
            yield from (kind for kind in vars(import_module(name)).values() if _is_of(kind, name))


def _is_of(kind: Any, module: str) -> bool:
    return isinstance(kind, type) and kind.__module__ == module


def _is_lightnings(kind: type, name: str) -> bool:
    """Is it a private name that a class of Lightning's declares, too?"""
    bases = [base for base in kind.__mro__[1:] if base.__module__.startswith(LIGHTNING)]
    return name.startswith("_") and not name.startswith("__") and any(name in vars(base) for base in bases)
