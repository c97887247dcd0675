"""Reads and merges the logged values that Lightning collects under private names.

When several pipelines have each evaluated a part of the data, their results are merged as if one process had evaluated
all of it: logged values as ``self.log(reduce_fx=...)`` says, and the states of torchmetrics objects by their own
``dist_reduce_fx``. As for lightning_internals.py, tests/test_lightning_internals.py says what each private name is for.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any, TypeGuard

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

_EXACT = (dim_zero_sum, dim_zero_max, dim_zero_min, dim_zero_cat)
"""Reductions of a metric's states whose result does not depend on which pipeline evaluated what."""


_MANY = 1000  # containers with more values are not searched for metrics


def is_metric(value: object) -> TypeGuard[Metric]:
    """Return whether ``value`` is an object of torchmetrics. ``isinstance`` would ask 250 classes about each new class,
    which takes half a millisecond."""
    return Metric in type(value).__mro__


def adopt_metrics(trainer: Trainer, values: Mapping[str, Tensor]) -> None:
    """Make ``trainer.callback_metrics`` hold ``values``, now and whenever Lightning makes it anew from the results."""
    on_step = trainer._logger_connector._first_loop_iter is not None
    results = trainer._results
    for _, result in results.valid_items() if results else ():
        _, name = results._forked_name(result, on_step)  # type: ignore[union-attr]
        if name in values:
            setattr(result, "_forward_cache" if on_step else "_computed", values[name])
    trainer.callback_metrics.update(values)


def values_to_reduce(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Return how each value was logged whose next reduction needs other workers, by key, in the order of the
    reductions."""
    results = trainer._results
    return {
        key: _options(result.meta)
        for key, result in (results.valid_items() if results else ())
        if result.meta.on_epoch and (result.meta.sync.should or not result.is_tensor)
    }


def expect_values(trainer: Trainer, each: Mapping[str, Mapping[str, Any]]) -> None:
    """Make ``trainer`` reduce these values next, in this order; to those that it has not logged it contributes nothing.

    Args:
        trainer: about to reduce what it has logged.
        each: how a value was logged, by its key, as :func:`values_to_reduce` returns it.
    """
    results: Any = trainer._results
    for key, options in each.items():
        name = options["metric_attribute"]
        if key in results and results[key].has_reset:  # logged in an earlier epoch
            del results[key]
        if key not in results:
            none = torch.zeros((), device=trainer.strategy.root_device)
            value = none if name is None else trainer.lightning_module.get_submodule(name)
            results.log(value=value, batch_size=0, sync_dist_fn=trainer.strategy.reduce, **options)
            if name is None:
                results[key].meta.sync.should = True
                least = {"max": -math.inf, "min": math.inf}.get(options["reduce_fx"], 0.0)
                results[key].value = torch.full_like(results[key].value, least)
    results.update({key: results.pop(key) for key in each})


def names_logged_by_step(trainer: Trainer) -> set[str]:
    """Return the names of the values that this batch's training step has logged."""
    results = trainer.fit_loop.epoch_loop._results
    logged = [result for _, result in results.valid_items() if result.meta.on_step]
    return {name for result in logged for name in (result.meta.name, results._forked_name(result, True)[1])}


def metrics_of(module: LightningModule, callbacks: Sequence[object]) -> dict[str, Metric]:
    """Return the torchmetrics objects of ``module`` and of the user's callbacks, also those in containers, by a name
    that is the same in all processes. Metrics of a collection that share a state then refer to it, too."""
    found: dict[str, Metric] = {}
    known: set[int] = set()

    def add(place: str, modules: Iterable[tuple[str, nn.Module]]) -> None:
        for name, part in modules:
            if isinstance(part, MetricCollection):
                part.items(copy_state=False)
            if is_metric(part) and id(part) not in known:
                known.add(id(part))
                found[f"{place}{name}"] = part

    add("", module.named_modules())
    owners = [*module.named_modules(), *((f"callback {number}", each) for number, each in enumerate(callbacks))]
    for path, owner in owners:
        attributes = {} if is_metric(owner) else getattr(owner, "__dict__", {})
        for place, part in _nested(path, attributes):
            add(f"{place} ", part.named_modules())
    return found


def _nested(place: str, value: Any, depth: int = 3) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in a container and in the containers nested in it."""
    if isinstance(value, nn.Module):
        yield place, value
    elif isinstance(value, (dict, list, tuple)) and depth and len(value) <= _MANY:
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _nested(f"{place}.{name}", item, depth - 1)


def pack_metrics(metrics: Mapping[str, Metric]) -> bytes:
    """Pack the states of torchmetrics objects."""
    data = io.BytesIO()
    torch.save({name: metric.metric_state for name, metric in metrics.items()}, data)
    return data.getvalue()


def unpack_metrics(metrics: Mapping[str, Metric], packed: bytes) -> None:
    """Give torchmetrics objects the states that another worker has packed with :func:`pack_metrics`. Their update
    counts stay as they are."""
    states = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
    for name, metric in metrics.items():
        for key, value in states.get(name, {}).items():
            setattr(metric, key, tree_map(partial(_moved, metric.device), value))
        metric._computed = None


def _moved(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(device)


def value_of_batch(metric: Metric) -> Any:
    """Return the value of ``metric`` for the last batch alone, which ``self.log`` shows for a step; or None."""
    return metric._forward_cache


def set_value_of_batch(metric: Metric, value: Tensor) -> None:
    """Set the value that ``self.log`` shows for a step."""
    metric._forward_cache = value  # type: ignore[assignment]


def metric_counts(module: LightningModule) -> dict[str, int]:
    """Return how often each torchmetrics object in ``module`` has been updated, by its name."""
    return {name: metric.update_count for name, metric in _metrics(module).items()}


def updated_metrics(module: LightningModule, before: Mapping[str, int]) -> dict[str, Metric]:
    """Return the torchmetrics objects in ``module`` that have been updated since :func:`metric_counts` returned
    ``before``."""
    return {name: metric for name, metric in _metrics(module).items() if metric.update_count != before.get(name)}


def why_not_merged(metrics: Mapping[str, Metric], has_own_rule: Callable[[Metric], bool]) -> str | None:
    """Return why the states of ``metrics`` cannot be merged, naming one of them; None if they can.

    Args:
        metrics: by their names.
        has_own_rule: returns whether a metric has the user's own ``dist_sync_fn``.
    """
    for name, metric in metrics.items():
        if has_own_rule(metric):
            return f"the metric {name!r} has a dist_sync_fn of its own"
        for state, reduction in metric._reductions.items():
            if reduction not in _EXACT:
                rule = getattr(reduction, "__name__", reduction)
                return (
                    f"the state {state!r} of the metric {name!r} has dist_reduce_fx={rule}, and those with 'sum', "
                    "'max', 'min' or 'cat' can be merged"
                )
    return None


def pack_results(trainer: Trainer, metrics: Mapping[str, Metric]) -> bytes:
    """Pack what ``trainer`` has logged in the evaluation of a dataloader, and the states of ``metrics``."""
    results: Any = trainer._results
    logged = {key: _packed(result) for key, result in results.valid_items() if result.meta.on_epoch}
    data = io.BytesIO()
    torch.save([logged, {name: _states(metric) for name, metric in metrics.items()}], data)
    return data.getvalue()


def merge_results(trainer: Trainer, each: Sequence[bytes]) -> None:
    """Replace the results of ``trainer`` by those of several pipelines, packed by :func:`pack_results`.

    Args:
        trainer: the trainer, whose own results are among them.
        each: the results of all pipelines, in the same order on all of them, so that all merge to the same bits.
    """
    parts = [torch.load(io.BytesIO(data), weights_only=True) for data in each]
    results: Any = trainer._results
    module = trainer.lightning_module
    for key in dict.fromkeys(key for logged, _ in parts for key in logged):
        said = [logged[key] for logged, _ in parts if key in logged]
        options = said[0]["options"]
        name = options["metric_attribute"]
        value = said[0]["states"]["value"] if name is None else module.get_submodule(name)
        if key not in results:  # this pipeline has never logged it; it may do so later with other options
            results.log(value=value, batch_size=1, **options)
            results[f"{key} of others"] = results.pop(key)
            key = f"{key} of others"
        elif results[key].has_reset:  # logged in an earlier evaluation only
            results.update_metrics(key, value, 1)
        _merge_logged(results[key], said)
    metrics = _metrics(module)
    for name in dict.fromkeys(name for _, states in parts for name in states):
        _merge_states(metrics[name], [states[name] for _, states in parts if name in states])


def _metrics(module: LightningModule) -> dict[str, Metric]:
    return {name: metric for name, metric in module.named_modules() if is_metric(metric)}


def _packed(result: Any) -> dict[str, Any]:
    """Return how a value was logged, and its states; none for a torchmetrics object, which packs its own."""
    kept = ("value", "cumulated_batch_size") if result.meta.is_mean_reduction else ("value",)
    return {
        "options": _options(result.meta),
        "states": {name: getattr(result, name).detach().cpu() for name in kept} if result.is_tensor else {},
    }


def _options(meta: Any) -> dict[str, Any]:
    """Return the options with which a value was logged."""
    suffix = f".{meta.dataloader_idx}" if meta.add_dataloader_idx and meta.dataloader_idx is not None else ""
    same = ("name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
    options = {name: getattr(meta, name) for name in (*same, "metric_attribute")}
    return {"fx": meta.fx.removesuffix(suffix), "reduce_fx": _reduction(meta), **options}


def _reduction(meta: Any) -> str:
    known = {"max": meta.is_max_reduction, "min": meta.is_min_reduction, "sum": meta.is_sum_reduction}
    return next((name for name, holds in known.items() if holds), "mean")


def _merge_logged(result: Any, said: Sequence[Mapping[str, Any]]) -> None:
    for name in said[0]["states"]:
        values = [each["states"][name] for each in said]
        kind = reduce(torch.promote_types, [value.dtype for value in values])
        values = [value.double() if value.is_floating_point() else value for value in values]
        merge: Callable[..., Tensor] = {"max": torch.amax, "min": torch.amin}.get(_reduction(result.meta), torch.sum)
        setattr(result, name, merge(torch.stack(values), 0).to(result.value.device, kind))
    result._computed = None


def _states(metric: Metric) -> list[Tensor]:
    """Return the tensors that ``metric`` would gather from each process, in its own order."""
    found: list[Tensor] = []

    def note(tensor: Tensor, group: Any = None) -> list[Tensor]:
        found.append(tensor.detach().cpu())
        return [tensor]

    metric.sync(dist_sync_fn=note, distributed_available=lambda: True)
    metric.unsync()
    return found


def _merge_states(metric: Metric, each: Sequence[Sequence[Tensor]]) -> None:
    """Let ``metric`` reduce the states of all pipelines, and keep the outcome as its own state."""
    own, columns = metric.metric_state, zip(*each, strict=True)

    def gathered(tensor: Tensor, group: Any = None) -> list[Tensor]:
        return [part.to(tensor.device) for part in next(columns)]

    metric.sync(dist_sync_fn=gathered, distributed_available=lambda: True)
    merged = metric.metric_state
    metric.unsync()
    for name, value in merged.items():
        is_list = isinstance(own[name], list) and not isinstance(value, list)
        setattr(metric, name, [value] if is_list else value)
    metric._computed = None
