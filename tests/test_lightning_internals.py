"""That Lightning still has what it keeps private and the package uses; if not, what that was for, and where to mend it.

A symbol that has moved or changed fails here by its name. What the functions of ``lightning_internals`` do with it is
tested where the package uses them.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import lightning
import pytest

from tests.test_bars import INTERNALS, LIGHTNING, knows_lightning, modules, of_the_package, tree

# INTERNALS is imported in tests only: it may fail to be, and the tests say why.


NAMES = {
    "fabric.loggers.csv_logs.CSVLogger": ["_version", "_experiment"],
    "fabric.loggers.csv_logs._ExperimentWriter": ["_check_log_dir_exists()"],
    "fabric.loggers.tensorboard.TensorBoardLogger": ["_version"],
    "fabric.strategies.launchers.subprocess_script": ["_basic_subprocess_cmd()", "_ChildProcessObserver"],
    "fabric.strategies.launchers.subprocess_script._ChildProcessObserver": ["_run()"],
    "fabric.utilities.cloud_io": ["_is_local_file_protocol(path)"],
    "fabric.utilities.device_dtype_mixin": ["_update_properties(root, device, dtype)"],
    "fabric.utilities.distributed": [
        "_init_dist_connection(cluster_environment, torch_distributed_backend, global_rank, world_size, kwargs)",
        "_set_num_threads_if_needed(num_processes)",
    ],
    "pytorch.callbacks.StochasticWeightAveraging": ["_average_model"],
    "pytorch.callbacks.WeightAveraging": ["_average_model"],
    "pytorch.callbacks.finetuning.BaseFinetuning": [
        "_store(pl_module, opt_idx, num_param_groups, current_param_groups)",
        "_restarting",
        "_internal_optimizer_metadata",
    ],
    "pytorch.callbacks.model_checkpoint.ModelCheckpoint": [
        "_train_time_interval",
        "_last_time_checked",
        "_every_n_train_steps",
    ],
    "pytorch.callbacks.throughput_monitor.ThroughputMonitor": ["_throughputs"],
    "pytorch.callbacks.timer.Timer": ["_duration", "_start_time", "_offset", "_interval"],
    "pytorch.core.mixins.hparams_mixin.HyperparametersMixin": ["_hparams"],
    "pytorch.core.module.LightningModule": [
        "_on_before_batch_transfer(batch, dataloader_idx)",
        "_compiler_ctx",
        "_trainer",
    ],
    "pytorch.loops.evaluation_loop._EvaluationLoop": ["_data_source", "_data_fetcher", "_store_dataloader_outputs()"],
    "pytorch.loops.fetchers": ["_DataFetcher", "_PrefetchDataFetcher"],
    "pytorch.loops.fetchers._DataFetcher": ["_start_profiler", "_stop_profiler"],
    "pytorch.loops.fit_loop": ["_last_val_time"],
    "pytorch.loops.fit_loop._FitLoop": ["_data_source", "_combined_loader", "_data_fetcher", "_can_stop_early"],
    "pytorch.loops.prediction_loop._PredictionLoop": ["_data_source", "_combined_loader", "_predictions"],
    "pytorch.loops.training_epoch_loop._TrainingEpochLoop": [
        "_should_check_val_fx(data_fetcher)",
        "_should_accumulate()",
        "_get_monitor_value(key)",
        "_broadcast_sigterm_tensor()",
        "_should_check_val_epoch()",
        "_skip_next_val",
        "_update_learning_rates(interval, update_plateau_schedulers)",
        "_batches_that_stepped",
        "_results",
    ],
    "pytorch.overrides.distributed": ["_IndexBatchSamplerWrapper"],
    "pytorch.overrides.distributed._IndexBatchSamplerWrapper": ["_batch_sampler"],
    "pytorch.plugins.io.wrapper": ["_WrappingCheckpointIO"],
    "pytorch.plugins.precision.precision.Precision": ["_after_closure(model, optimizer)"],
    "pytorch.profilers.pytorch.PyTorchProfiler": ["_record_module_names"],
    "pytorch.strategies.ddp.DDPStrategy": [
        "_configure_launcher()",
        "_get_process_group_backend()",
        "_timeout",
        "_process_group_backend",
        "_layer_sync",
    ],
    "pytorch.strategies.launchers": ["_MultiProcessingLauncher", "_SubprocessScriptLauncher"],
    "pytorch.strategies.launchers.launcher": ["_Launcher"],
    "pytorch.strategies.launchers.multiprocessing._MultiProcessingLauncher": [
        "_collect_rank_zero_results(trainer, results)",
        "_recover_results_in_main_process(worker_output, trainer)",
        "_wrapping_function(process_idx, trainer, function, args, kwargs, return_queue, global_states)",
        "_strategy",
    ],
    "pytorch.strategies.parallel.ParallelStrategy": ["_parallel_devices"],
    "pytorch.strategies.strategy.Strategy": ["_launcher", "_checkpoint_io", "_lightning_module"],
    "pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector": ["_loaded_checkpoint"],
    "pytorch.trainer.connectors.data_connector": ["_worker_check(trainer, dataloader, name)"],
    "pytorch.trainer.connectors.logger_connector.logger_connector._LoggerConnector": ["_first_loop_iter"],
    "pytorch.trainer.connectors.logger_connector.result": ["_get_default_dtype()", "_computed"],
    "pytorch.trainer.connectors.logger_connector.result._ResultCollection": ["_forked_name(result_metric, on_step)"],
    "pytorch.trainer.connectors.logger_connector.result._ResultMetric": ["_reductions", "_forward_cache"],
    "pytorch.trainer.connectors.signal_connector._SignalConnector": [
        "_sigterm_notifier_fn(signum, _)",
        "_slurm_sigusr_handler_fn(signum, _)",
    ],
    "pytorch.trainer.setup": ["_val_check_time_interval"],
    "pytorch.trainer.trainer.Trainer": [
        "_signal_connector",
        "_checkpoint_connector",
        "_evaluation_loop",
        "_logger_connector",
        "_results",
    ],
    "pytorch.utilities.combined_loader.CombinedLoader": ["_mode", "_spec", "_iterables"],
}
"""By the module or class of ``lightning`` that declares them; with their parameters besides ``self`` where the package
calls or replaces them."""


@pytest.mark.parametrize(("place", "symbol"), [(place, each) for place, names in NAMES.items() for each in names])
def test_lightning_still_has(place: str, symbol: str) -> None:
    name, parenthesis, takes = symbol.removesuffix(")").partition("(")
    where, version = f"lightning.{place}.{name}", f"Lightning {lightning.__version__}"
    to_do = f"Find what has taken its place, and mend {'; '.join(_uses(name))}"
    try:
        holder = _resolve(f"lightning.{place}")
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{version} has no lightning.{place} ({error}). {to_do}.")
    assert _declares(holder, name), f"{version} has no {where} any more. {to_do}."
    if parenthesis:
        found = ", ".join(each for each in inspect.signature(getattr(holder, name)).parameters if each != "self")
        assert found == takes, f"{where} takes {found} in {version}, and took {takes}. {to_do}."


def _private_names(node: ast.AST) -> set[str]:
    """Of Lightning's, within a definition."""
    found = set()
    for each in ast.walk(node):
        match each:
            case ast.ImportFrom(module=str(module), names=names) if module.startswith(LIGHTNING):
                found |= {alias.name for alias in names}
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                found.add(name)
    return {name for name in found if re.fullmatch("_[a-z]\\w*", name, re.IGNORECASE)}


def _uses(name: str) -> list[str]:
    """Where the package names it, and what for."""
    found = []
    for node in (node for module in INTERNALS for node in tree(module).body if name in _private_names(node)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append(f"{node.name}: {(ast.get_docstring(node) or '').partition(chr(10))[0]}")
        else:
            found.append(ast.unparse(node))
    return found


def test_the_table_names_all_that_the_package_uses() -> None:
    found = set().union(*(_private_names(tree(module)) for module in INTERNALS))
    assert found == {symbol.partition("(")[0] for names in NAMES.values() for symbol in names}


def test_functions_to_mend_are_used() -> None:
    bodies = [node for module in INTERNALS for node in tree(module).body]
    functions = {node.name for node in bodies if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}
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
