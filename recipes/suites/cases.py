"""One training of ``suite=throughput`` or ``suite=convergence``: what determines it, and the command that runs it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast, get_args

import hydra

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity import Delays, Heterogeneity, Slowed
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.simulate import Schedule, Work, simulate
from recipes.suites.ratios import refuse_unknown

REFERENCES = ("lightning_ddp", "bare_torch")


@dataclass(frozen=True)
class Named:
    """A method, a condition or a workload: its name in a suite's configuration, and what Hydra builds it from (without
    seeds); None for what is not built so."""

    name: str
    specification: Mapping[str, Any] | None


def seeded(specification: Mapping[str, Any], seed: int) -> Any:
    """Return what Hydra builds from a specification, with ``seed`` where it takes one."""
    return hydra.utils.instantiate({**specification, **({"seed": seed} if "seed" in specification else {})})


def named(specifications: Mapping[str, Mapping[str, Any]], kind: str, name: str) -> Named:
    """One of a suite's ``methods``, ``heterogeneity`` or ``workloads``.

    Raises:
        ConfigurationError: it is not among them.
    """
    refuse_unknown(f"among suite.{kind}", [name], specifications[kind])
    return Named(name, specifications[kind][name])


@dataclass(frozen=True)
class Case:
    """Parameters that determine a training, whatever it computes.

    Args:
        panel: the part of the grid that it belongs to.
        method: of synchronisation, or an outside reference.
        condition: what slows workers down.
        num_stages: M.
        num_pipelines: N.
        schedule: of the pipelines.
        num_micro_batches: m.
        iterations: in all.
        warm_up: how many of them do not count.
        scale: multiplies emulated times, and the delays.
        seed: of the delays and the weights.
    """

    panel: str
    method: Named
    condition: Named
    num_stages: int
    num_pipelines: int
    schedule: str
    num_micro_batches: int
    iterations: int
    warm_up: int
    scale: float
    seed: int

    @property
    def shape(self) -> str:
        """M × N, as the keys of the ratios have it."""
        return f"{self.num_stages}x{self.num_pipelines}"

    @property
    def workers(self) -> int:
        """The number of workers of all pipelines."""
        return self.num_stages * self.num_pipelines

    def seeded(self, what: Named) -> Any:
        """Return what Hydra builds from a specification, with the seed of this case where it takes one."""
        return seeded(what.specification or {}, self.seed)

    @property
    def slowness(self) -> Heterogeneity:
        """Delays are multiplied by the scale; speeds need not be, since they are relative."""
        built: Heterogeneity = self.seeded(self.condition)
        return replace(built, scale=built.scale * self.scale) if isinstance(built, Delays) else built


@dataclass(frozen=True)
class EmulatedCase(Case):
    """A training whose workers sleep instead of computing.

    Args:
        micro_batch_seconds: of one micro-batch on one stage, forward and backward, without delays.
        num_parameters: of a stage.
    """

    micro_batch_seconds: float
    num_parameters: int

    workload: ClassVar[Named] = Named("emulated", None)

    @property
    def iteration_seconds(self) -> float:
        """The seconds of a mini-batch without delays."""
        slots = self.num_micro_batches + (0 if self.schedule == "pipedream" else self.num_stages - 1)
        return slots * self.micro_batch_seconds * self.scale

    def bound(self, policy: PolicyConfig) -> float | None:
        """Mini-batches per second of all pipelines that are possible under ``policy``, by simulation, where only
        computing takes time; None for a schedule that is not simulated."""
        if self.schedule not in get_args(Schedule):
            return None
        m = 1 if self.schedule == "pipedream" else self.num_micro_batches
        work = Work(
            self.num_stages,
            self.num_pipelines,
            self.iterations,
            self.num_micro_batches * self.micro_batch_seconds * self.scale,
            cast(Schedule, self.schedule),
            m,
            self.slowness,
        )
        return sum(simulate(policy, work).rates(self.warm_up))


@dataclass(frozen=True)
class RealCase(Case):
    """A training that computes.

    Args:
        workload: the specifications of its ``model`` and ``data``.
        pace: how many times slower than a core each worker's device is, see
            :class:`~lightning_sdpipe.heterogeneity.Slowed`.
        variance_correction: of Adam, in the methods that average models.
        data: ``"sharded"``, or ``"auto"`` for batches that are dealt where the method allows it.
        exchange: what Hydra builds it from; None for full precision without overlap.
        depths: the stages of each pipeline, where they are unlike; ``num_stages`` is the largest then.
    """

    workload: Named
    pace: float
    variance_correction: bool = False
    data: Literal["sharded", "auto"] = "sharded"
    exchange: Mapping[str, Any] | None = None
    depths: Sequence[int] = ()

    @property
    def shape(self) -> str:
        return "+".join(map(str, self.depths)) or super().shape

    @property
    def workers(self) -> int:
        return sum(self.depths) or super().workers

    @property
    def slowness(self) -> Heterogeneity:
        return Slowed(super().slowness, self.pace)


EMULATED = EmulatedCase.workload.name

AnyCase = EmulatedCase | RealCase


def command(case: AnyCase) -> str:
    """Run this case of ``suite=throughput`` alone."""
    own: tuple[str, ...] = ("micro_batch_seconds", "num_parameters") if isinstance(case, EmulatedCase) else ("pace",)
    if isinstance(case, RealCase) and case.depths:
        own = (*own, "depths")
    shared = ("num_stages", "num_pipelines", "schedule", "num_micro_batches", "iterations", "warm_up")
    panel = {
        "workload": case.workload.name,
        **{name: getattr(case, name) for name in (*shared, *own)},
        **{"heterogeneity": [case.condition.name], "methods": [case.method.name], "repeats": 1, "once": []},
    }
    settings: dict[str, Any] = {"scale": case.scale, "only": [case.panel], f"grid.{case.panel}": panel}
    return suite_command("throughput", case.seed, settings | specifications(case))


def specifications(case: AnyCase) -> dict[str, Any]:
    """Return those of the method, the condition and the workload, as settings of a suite."""
    kinds = {"heterogeneity": case.condition, "methods": case.method, "workloads": case.workload}
    return {f"{kind}.{what.name}": what.specification for kind, what in kinds.items() if what.specification is not None}


def suite_command(suite: str, seed: int, settings: Mapping[str, Any]) -> str:
    """Run a suite with these settings."""
    overrides = [f"suite.{name}={value}" for name, value in _flat(settings)]
    return shlex.join(["python", "-m", "recipes.bench", f"suite={suite}", f"seed={seed}", *overrides])


def _flat(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    flat: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat += [(f"{name}.{inner}", text) for inner, text in _flat(value)]
        elif name not in ("_target_", "seed"):
            shown = f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
            flat.append((name, "null" if value is None else shown))
    return flat


def only_delays(case: AnyCase) -> Delays:
    """Return the delays that an outside reference is given: it can sleep before the forward of a mini-batch.

    Raises:
        ConfigurationError: real compute, stages where it has none, or another heterogeneity.
    """
    leave_out = f"leave it out of suite.grid.{case.panel}.methods."
    if isinstance(case, RealCase):
        raise ConfigurationError(f"{case.method.name} is only measured with emulated compute; {leave_out}")
    if case.method.name == "lightning_ddp" and case.num_stages != 1:
        raise ConfigurationError(f"lightning_ddp has no stages, and {case.num_stages} are asked for; {leave_out}")
    slowness = case.slowness
    if not isinstance(slowness, Delays) or slowness.draws != "iteration":
        raise ConfigurationError(
            f"{case.method.name} can only be delayed once per iteration, which is not what suite.heterogeneity."
            f"{case.condition.name} asks; {leave_out}"
        )
    return slowness
