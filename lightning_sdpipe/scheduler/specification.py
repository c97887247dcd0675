"""Which policy to build, as plain data: it crosses process borders and is checked before anything starts."""

from __future__ import annotations

import json
import math
import random
from typing import Any, TypeAlias

import msgspec

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.scheduler.ad_psgd import ADPSGDPolicy, AsynchronousADPSGDPolicy
from lightning_sdpipe.scheduler.all_reduce import AllReducePolicy
from lightning_sdpipe.scheduler.local_sgd import LocalSGDPolicy
from lightning_sdpipe.scheduler.policy import GroupPolicy
from lightning_sdpipe.scheduler.semi_decentralized import SemiDecentralizedPolicy


class SemiDecentralizedSpec(msgspec.Struct, frozen=True, tag="semi_decentralized", forbid_unknown_fields=True):
    """SDPipe's policy.

    ``window`` is in seconds (inf too), or ``"auto"``: until those came who are expected soon. ``connectivity`` is P in
    rounds, None to enforce nothing. ``max_group`` None means 4 beyond eight pipelines.
    """

    window: float | str = "auto"
    connectivity: int | None = 10
    min_group: int = 2
    max_group: int | None = None

    def __post_init__(self) -> None:
        if self.window == "inf":  # how JSON and YAML users can write it
            msgspec.structs.force_setattr(self, "window", math.inf)
        if isinstance(self.window, bool) or (isinstance(self.window, str) and self.window != "auto"):
            raise _refusal("window", self.window, 'seconds from 0 to inf, or "auto"')
        if not isinstance(self.window, str) and not self.window >= 0:  # NaN is refused too
            raise _refusal("window", self.window, 'seconds from 0 to inf, or "auto"')
        _check_integer("connectivity", self.connectivity, 1, "rounds, or null to enforce nothing")
        _check_integer("min_group", self.min_group, 1, "workers", optional=False)
        _check_integer("max_group", self.max_group, 2, "workers, or null to choose")
        if self.max_group is not None and self.max_group < self.min_group:
            raise _refusal("max_group", self.max_group, f"at least min_group, which is {self.min_group}")
        if self.max_group is not None and self.window == math.inf:
            raise ConfigurationError(
                f"max_group={self.max_group} contradicts window=inf, which makes one group of all workers; "
                "leave max_group out or choose a finite window"
            )


class AllReduceSpec(msgspec.Struct, frozen=True, tag="all_reduce", forbid_unknown_fields=True):
    """Everybody averages with everybody in every iteration."""


class LocalSGDSpec(msgspec.Struct, frozen=True, tag="local_sgd", forbid_unknown_fields=True):
    """Everybody averages with everybody in each iteration that ``every`` divides."""

    every: int

    def __post_init__(self) -> None:
        _check_integer("every", self.every, 1, "iterations", optional=False)


class NoSyncSpec(msgspec.Struct, frozen=True, tag="no_sync", forbid_unknown_fields=True):
    """Nobody ever averages: the bound on speed."""


class ADPSGDSpec(msgspec.Struct, frozen=True, tag="ad_psgd", forbid_unknown_fields=True):
    """Averaging with one random partner; ``asynchronous`` does not wait for it to be ready."""

    seed: int = 0
    asynchronous: bool = False

    def __post_init__(self) -> None:
        _check_integer("seed", self.seed, 0, "any", optional=False)


PolicySpec: TypeAlias = SemiDecentralizedSpec | AllReduceSpec | LocalSGDSpec | NoSyncSpec | ADPSGDSpec


def build(spec: PolicySpec, num_stages: int, num_pipelines: int) -> GroupPolicy:
    """The policy that ``spec`` describes, for ``num_stages`` × ``num_pipelines`` workers."""
    for name, value in (("num_stages", num_stages), ("num_pipelines", num_pipelines)):
        if value < 1:
            raise _refusal(name, value, "an integer from 1")
    match spec:
        case SemiDecentralizedSpec():
            return SemiDecentralizedPolicy(
                num_stages,
                num_pipelines,
                window="auto" if isinstance(spec.window, str) else spec.window,
                connectivity=spec.connectivity,
                min_group=spec.min_group,
                max_group=spec.max_group,
            )
        case AllReduceSpec():
            return AllReducePolicy(num_stages, num_pipelines)
        case LocalSGDSpec():
            return LocalSGDPolicy(num_stages, num_pipelines, every=spec.every)
        case NoSyncSpec():
            return LocalSGDPolicy(num_stages, num_pipelines, every=None)
        case ADPSGDSpec(asynchronous=True):
            return AsynchronousADPSGDPolicy(num_stages, num_pipelines, rng=random.Random(spec.seed))
        case ADPSGDSpec():
            return ADPSGDPolicy(num_stages, num_pipelines, seed=spec.seed)


def to_builtins(spec: PolicySpec) -> dict[str, Any]:
    """``spec`` as plain values that survive strict JSON, an infinite window included."""
    plain: dict[str, Any] = msgspec.to_builtins(spec)
    return {name: "inf" if value == math.inf else value for name, value in plain.items()}


def from_builtins(plain: object) -> PolicySpec:
    """The inverse of :func:`to_builtins`, with every value checked again."""
    try:
        spec: PolicySpec = msgspec.convert(plain, PolicySpec)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{error}; the policy given was {plain!r}") from error
    return spec


def to_json(spec: PolicySpec) -> str:
    """``spec`` as one line of JSON."""
    return json.dumps(to_builtins(spec), allow_nan=False)


def from_json(text: str | bytes) -> PolicySpec:
    """The inverse of :func:`to_json`."""
    try:
        plain = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"a policy must be JSON, but this is not: {text!r}") from error
    return from_builtins(plain)


def _refusal(name: str, value: object, allowed: str) -> ConfigurationError:
    return ConfigurationError(f"{name}={value!r} is not allowed; give {allowed}")


def _check_integer(name: str, value: object, least: int, unit: str, *, optional: bool = True) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _refusal(name, value, f"an integer from {least} ({unit})")
