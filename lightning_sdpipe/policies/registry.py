"""Registry of policies, by name or by import path, and their values as plain data.

A policy's values cross process borders as JSON and are checked on both sides, the built-in ones and a user's own alike.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

import msgspec

from lightning_sdpipe.errors import ConfigurationError, check_integer, nearest
from lightning_sdpipe.policies.built_in import POLICIES
from lightning_sdpipe.policies.per_pipeline import PerPipeline
from lightning_sdpipe.policies.policy import Policy, PolicyConfig

BUILT_IN: Mapping[str, type[PolicyConfig]] = {kind.registered: kind for kind in POLICIES}
"""The class of each built-in policy's values, by name."""

_TYPE = "type"


def build(config: PolicyConfig, num_stages: int, num_pipelines: int, depths: Sequence[int] = ()) -> Policy:
    """Make the policy of ``config`` for ``num_stages`` × ``num_pipelines`` workers, or, with ``depths``, the stages of
    pipelines that are cut differently, one that decides about whole pipelines.

    Raises:
        ConfigurationError: a number is below 1, or the result of ``make_policy`` is not a policy.
    """
    check_integer("num_stages", num_stages, 1, "stages of a pipeline")
    check_integer("num_pipelines", num_pipelines, 1, "pipelines")
    policy = config.make_policy(1 if depths else num_stages, num_pipelines)
    missing = [name for name in ("on", "deadline") if not callable(getattr(policy, name, None))]
    if missing:
        raise ConfigurationError(
            f"{name_of(config)} makes a {type(policy).__name__}, which has no {' and no '.join(missing)}; "
            "derive it from lightning_sdpipe.policies.GroupPolicy"
        )
    return PerPipeline(policy, depths) if depths else policy


def find(name: str) -> type[PolicyConfig]:
    """Return the class of the values of the policy with that name, or at that import path (``package.module:Class``).

    Raises:
        ConfigurationError: there is no such policy, or its module cannot be imported.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    module_name, separator, class_name = name.partition(":")
    if not separator:
        raise ConfigurationError(
            f"there is no policy {name!r}{nearest(name, BUILT_IN)} One of your own is given by its import path, as in "
            "my_package.policies:RoundRobin"
        )
    try:
        found: Any = import_module(module_name)
        for part in class_name.split("."):
            found = getattr(found, part)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ConfigurationError(
            f"the policy {name} cannot be imported: {type(error).__name__}: {error}. Modules are looked for in the "
            f"working directory, PYTHONPATH and the installed packages: {', '.join(_folders())}"
        ) from error
    if not (inspect.isclass(found) and issubclass(found, PolicyConfig)):
        raise ConfigurationError(
            f"{name} is {found!r}; a policy is named by the class of its values, which derives from "
            "lightning_sdpipe.policies.PolicyConfig and makes the policy in make_policy(num_stages, num_pipelines)"
        )
    return found


def name_of(config: PolicyConfig) -> str:
    """Return the name by which :func:`find` finds the class of ``config``, in another process too.

    Raises:
        ConfigurationError: another process cannot import it.
    """
    kind = type(config)
    if BUILT_IN.get(kind.registered) is kind:
        return kind.registered
    path = f"{kind.__module__}:{kind.__qualname__}"
    if kind.__module__ == "__main__" or "<locals>" in path:
        where = "a function" if "<locals>" in path else "the script that is run"
        raise ConfigurationError(
            f"{kind.__qualname__} is defined in {where}, where the scheduler, a process of its own, cannot import it; "
            f"move it to a module: from my_policies import {kind.__name__}"
        )
    return path


def make(name: str, values: Mapping[str, object]) -> PolicyConfig:
    """Make and check the values of the policy called ``name``.

    Raises:
        ConfigurationError: there is no such policy, or a value is unknown or not allowed.
    """
    kind = find(name)
    for value in values:
        if value not in kind.__struct_fields__:
            raise ConfigurationError(f"{value} is not a value of {name}{nearest(value, kind.__struct_fields__)}")
    try:
        return msgspec.convert({name: math.inf if value == "inf" else value for name, value in values.items()}, kind)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{error}; given for {name}: {dict(values)!r}") from error


def from_text(name: str, settings: Iterable[str]) -> PolicyConfig:
    """Make the values of a policy from a command line: ``settings`` are NAME=VALUE with values in JSON, or else text.

    Raises:
        ConfigurationError: see :func:`make`.
    """
    values: dict[str, object] = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator:
            raise ConfigurationError(f"--set {setting} is not NAME=VALUE, as in --set window=0.05")
        try:
            values[key] = json.loads(value)
        except ValueError:
            values[key] = value
    return make(name, values)


def check(config: PolicyConfig) -> None:
    """Refuse values that the scheduler's process would refuse, or would receive changed.

    Raises:
        ConfigurationError: the values are refused; the message says why.
    """
    plain = to_plain(config)
    if from_plain(plain) != config:
        raise ConfigurationError(f"{config} does not survive being written down as {plain}; use numbers and strings")


def to_plain(config: PolicyConfig) -> dict[str, Any]:
    """Return ``config`` as plain values that survive strict JSON, an infinite number included."""
    plain: dict[str, Any] = msgspec.to_builtins(config)
    return {_TYPE: name_of(config)} | {name: "inf" if value == math.inf else value for name, value in plain.items()}


def from_plain(plain: object) -> PolicyConfig:
    """Reverse :func:`to_plain` and check every value again."""
    if not (isinstance(plain, dict) and isinstance(plain.get(_TYPE), str)):
        raise ConfigurationError(f'a policy must be an object with a "{_TYPE}", but this is not: {plain!r}')
    values = dict(plain)
    return make(values.pop(_TYPE), values)


def to_json(config: PolicyConfig) -> str:
    """Return ``config`` as one line of JSON."""
    return json.dumps(to_plain(config), allow_nan=False)


def from_json(text: str | bytes) -> PolicyConfig:
    """Reverse :func:`to_json`."""
    try:
        plain = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"a policy must be JSON, but this is not: {text!r}") from error
    return from_plain(plain)


def _folders() -> Iterable[str]:
    return [folder or "." for folder in sys.path if not folder.endswith((".zip", "lib-dynload"))]
