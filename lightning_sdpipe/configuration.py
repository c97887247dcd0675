"""Checks a Hydra configuration against the classes that it names, before anything starts.

The types come from the classes' own signatures, so no second list of options can differ from them.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hydra.errors import HydraException, MissingConfigException
from hydra.utils import get_object
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from lightning_sdpipe.errors import ConfigurationError, nearest


def check(config: DictConfig, typed: Sequence[str] = ("lightning_sdpipe",)) -> None:
    """Raise ConfigurationError for a name or a type that the class or function of a ``_target_`` does not take.

    Values that cannot be resolved yet, such as a directory that Hydra will make, are ignored.

    Args:
        config: the configuration, or a part of it.
        typed: packages whose type hints are checked; for other packages only names are checked.
    """
    for path, node in _targets(config, ""):
        _check_target(path, node, typed)


def explain(error: HydraException | OmegaConfBaseException, groups: Iterable[str] = ()) -> str:
    """Return Hydra's message about a configuration that it cannot compose, with the nearest valid name.

    Args:
        error: the exception that Hydra raised.
        groups: the names of the configuration's groups, which are valid, too.
    """
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={name} does not exist{nearest(name, error.options)}"
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
        parent, name = cause.parent_node, str(cause.key)
        path = str(cause.full_key)
        taken = parameters(get_object(parent._target_)) if "_target_" in parent else {}
        if name in taken:
            return f"{path} is an option of {parent._target_} that the configuration leaves out: write +{path}=…"
        names = [*map(str, parent), *taken, *(groups if parent._get_parent() is None else ())]
        return f"{path} does not exist{nearest(name, names)}"
    return f"{error}" if cause is error else f"{error}\n{cause}"


def parameters(target: Any) -> dict[str, Any]:
    """Return the named parameters of ``target`` and their types, with those that a class passes to its parents."""
    classes = inspect.getmro(target) if inspect.isclass(target) else (target,)
    found: dict[str, Any] = {}
    for each in classes:
        signature, hints = _signature(each), _hints(each)
        named = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        found = {p.name: hints.get(p.name, Any) for p in named} | found
        if not _takes_more(signature):
            break
    return found


def _check_target(path: str, node: DictConfig, typed: Sequence[str]) -> None:
    target = get_object(node._target_)
    known = parameters(target)
    ours = str(target.__module__).partition(".")[0] in typed
    for key, value in _resolved(node):
        if key not in known and (ours or not _takes_more(_signature(target))):
            raise ConfigurationError(f"{path}.{key} is not an option of {target.__name__}{nearest(key, known)}")
        if ours and key in known and not OmegaConf.is_config(value):
            _check_type(f"{path}.{key}", value, known[key])


def _check_type(path: str, value: Any, hint: Any) -> None:
    if _accepts(hint, value):
        return
    if typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
        allowed = ", ".join(map(str, choices))
        raise ConfigurationError(f"{path}={value} is not one of {allowed}{nearest(str(value), choices)}")
    raise ConfigurationError(f"{path}={value!r} must be {_name(hint)}.")


def _accepts(hint: Any, value: Any) -> bool:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return any(_accepts(each, value) for each in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if hint is types.NoneType or value is None:
        return value is None and hint in (types.NoneType, Any)
    try:
        option = OmegaConf.structured(dataclasses.make_dataclass("Option", [("value", hint, MISSING)]))
    except OmegaConfBaseException:
        return True  # a type that OmegaConf does not know: the class checks it
    try:
        option.value = value
    except ValidationError:
        return False
    return True


def _targets(node: Any, path: str) -> Iterator[tuple[str, DictConfig]]:
    if isinstance(node, DictConfig) and "_target_" in node:
        yield path, node
    for key, value in _resolved(node):
        if isinstance(value, DictConfig | ListConfig) and not OmegaConf.is_interpolation(node, key):
            yield from _targets(value, f"{path}.{key}" if path else str(key))


def _resolved(node: DictConfig | ListConfig) -> Iterator[tuple[Any, Any]]:
    """Yield the entries of ``node`` that are options and that can be resolved."""
    keys = list(node) if isinstance(node, DictConfig) else range(len(node))
    for key in keys:
        if OmegaConf.is_missing(node, key) or key in ("_target_", "_partial_", "_recursive_", "_convert_", "_args_"):
            continue
        try:
            yield key, node[key]
        except OmegaConfBaseException:
            continue


def _hints(target: Any) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for each in (target, target.__init__) if inspect.isclass(target) else (target,):  # values of a policy are fields
        with suppress(NameError, TypeError):  # a name that is imported for type checkers only
            found |= typing.get_type_hints(each)
    return found


def _signature(target: Any) -> inspect.Signature:
    try:
        return inspect.signature(target)
    except ValueError:  # a class that is written in C
        return inspect.signature(lambda **options: None)


def _takes_more(signature: inspect.Signature) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def _name(hint: Any) -> str:
    return hint.__name__ if inspect.isclass(hint) else str(hint)
