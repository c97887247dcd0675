"""Checks of the strategy's options: their names, types and values, before anything is built from them."""

from __future__ import annotations

import difflib
import inspect
import numbers
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from lightning_sdpipe.errors import ConfigurationError, nearest
from lightning_sdpipe.worker.options import LOOPED

# Examples for options that are easily written wrongly.
_FOR_EXAMPLE = {
    "sync": "AllReduce()",
    "exchange": '"eight_bit", or Exchange(EightBit(), overlap="step")',
    "delays": "Delays(probability=0.1, seconds=0.3)",
    "partition": '"parameters", or [3, 2]: the number of blocks of each stage',
    "num_stages": "2, or [1, 2, 2]: those of each pipeline",
    "blocks": '["model.embeddings", "model.layers.*"]',
    "timeout": "timedelta(minutes=10)",
}

# Options of Lightning's DDPStrategy and torch's DistributedDataParallel, which its further options go to.
_OF_DDP = {
    **dict.fromkeys(
        ["ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"],
        "sync= says what is averaged, and when",
    ),
    "bucket_cap_mb": "sync=AllReduce(bucket_mib=...) sets the size of buckets",
    "find_unused_parameters": "parameters without a gradient are allowed",
    "broadcast_buffers": "buffers are averaged over the pipelines before validation and at the end of an epoch",
    **dict.fromkeys(
        [
            *("static_graph", "gradient_as_bucket_view", "mixed_precision", "init_sync", "device_ids", "output_device"),
            *("dim", "process_group", "check_reduction", "delay_all_reduce_named_params", "param_to_hook_all_reduce"),
            *("device_mesh", "skip_all_reduce_unused_params"),
        ],
        "leave it out",
    ),
}

_SAID_ELSEWHERE = {
    "num_pipelines": "the number of pipelines follows: devices × num_nodes / num_stages. Give num_stages here, and the "
    "other two to the Trainer",
    "batch_size": "the loader's batch_size holds, and is that of one pipeline",
    **dict.fromkeys(["devices", "num_nodes", "precision"], "give it to the Trainer"),
}


def check(given: Mapping[str, Any], unknown: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for options that cannot be meant so.

    Args:
        given: all options by name.
        unknown: those that are no options.
        hints: the types of ``given``.
    """
    for name in unknown:
        if name in _OF_DDP:
            raise ConfigurationError(
                f"{name} is an option of DistributedDataParallel, which SDPipeStrategy does not use: {_OF_DDP[name]}."
            )
        if name in _SAID_ELSEWHERE:
            raise ConfigurationError(f"{name} is not an option of SDPipeStrategy: {_SAID_ELSEWHERE[name]}.")
        raise ConfigurationError(f"{name} is not an option of SDPipeStrategy{nearest(name, given)}")
    for name, value in given.items():
        _check_type(name, value, hints[name])
    _check_values(given)


def _check_type(name: str, value: Any, hint: Any) -> None:
    if _accepts(hint, value):
        return
    if inspect.isclass(value):
        raise ConfigurationError(
            f"{name}={value.__name__} is a class; give an object of it: {name}={value.__name__}()."
        )
    choices = [choice for each in _alternatives(hint) for choice in _choices(each)]
    if isinstance(value, str) and choices:
        others = "" if _alternatives(hint) == (hint,) else f", or {_described(hint)}"
        raise ConfigurationError(f"{name}={value!r} is not known; use one of {choices}{others}{_close(value, choices)}")
    example = f", such as {_FOR_EXAMPLE[name]}" if name in _FOR_EXAMPLE else ""
    raise ConfigurationError(f"{name}={value!r} is not allowed: give {_described(hint)}{example}.")


def _check_values(given: Mapping[str, Any]) -> None:
    schedule, stages, micro_batches = given["schedule"], given["num_stages"], given["num_micro_batches"]
    for name in ("stages_per_worker", "num_micro_batches") + (("num_stages",) if isinstance(stages, int) else ()):
        if given[name] is not None and given[name] < 1:
            raise ConfigurationError(f"{name}={given[name]} is not allowed; use 1 or more.")
    if not isinstance(stages, int):
        if not stages or min(stages) < 1:
            raise ConfigurationError(
                f"num_stages={list(stages)} is not allowed; give the stages of each pipeline, 1 or more each."
            )
        stages = max(stages)
    if schedule in LOOPED and (stages < 2 or given["stages_per_worker"] < 2):
        raise ConfigurationError(
            f"schedule={schedule!r} needs num_stages and stages_per_worker of 2 or more; given {stages} and "
            f"{given['stages_per_worker']}."
        )
    if schedule not in LOOPED and given["stages_per_worker"] != 2:
        raise ConfigurationError(
            f"stages_per_worker={given['stages_per_worker']} has no meaning with schedule={schedule!r}, under which a "
            f"worker runs one stage. Leave it out, or use one of {LOOPED}."
        )
    if schedule == "pipedream" and (micro_batches or 1) > 1:
        raise ConfigurationError(
            f"num_micro_batches={micro_batches} does not go with schedule='pipedream', which does not split "
            "mini-batches. Leave it out, or use schedule='1f1b'."
        )
    if given["on_checkpoint_error"] == "continue" and given["save_distributed_checkpoint"]:
        raise ConfigurationError(
            "on_checkpoint_error='continue' does not go with save_distributed_checkpoint, of which every rank writes a "
            "part. Use 'stop', or leave one of the two out."
        )
    if given["timeout"] <= timedelta(0):
        raise ConfigurationError(f"timeout={given['timeout']} is not allowed; give more than nothing.")


def _accepts(hint: Any, value: Any) -> bool:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return any(_accepts(each, value) for each in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return any(type(choice) is type(value) and choice == value for choice in typing.get_args(hint))
    if hint is Any:
        return True
    if hint in (int, float):
        return isinstance(value, numbers.Integral if hint is int else numbers.Real) and not isinstance(value, bool)
    if typing.get_origin(hint) is Sequence:
        (element,) = typing.get_args(hint)
        return isinstance(value, Sequence) and not isinstance(value, str) and all(_accepts(element, v) for v in value)
    return isinstance(value, hint) and not inspect.isclass(value)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _choices(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def _close(value: str, choices: Iterable[str]) -> str:
    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else "."


def _described(hint: Any) -> str:
    def name(each: Any) -> str:
        if typing.get_origin(each) is typing.Literal:
            return " or ".join(map(repr, typing.get_args(each)))
        if typing.get_origin(each) is Sequence:
            return f"a list of {name(typing.get_args(each)[0]).removeprefix('a ')}"
        return "None" if each is types.NoneType else str(each.__name__)

    return " or ".join(map(name, _alternatives(hint)))
