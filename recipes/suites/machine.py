"""The measuring machine: its description, and how to keep emulated workers from competing for its cores.

A worker that sleeps instead of computing still uses the processor, for messages, the optimizer and Lightning. If that
kept the cores busy, workers would wait for cores, which no real device does. So emulated times and delays are stretched
by a factor until less than half of the cores' time is used.
"""

from __future__ import annotations

import math
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("lightning-sdpipe", "torch", "lightning", "pyzmq", "msgspec", "transformers")
AIM = 0.4
"""The share of the cores' time to use; half would leave no room for methods that use more than the measured one."""


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def needed_scale(processor_seconds: float, iteration_seconds: float, num_cores: int) -> float:
    """Return the factor for all times, at least 1, in tenths, that keeps the cores busy for :data:`AIM` of the time.

    Args:
        processor_seconds: seconds of processor time that all processes together use for one iteration.
        iteration_seconds: seconds of an iteration without delays.
        num_cores: number of the machine's cores.
    """
    scale = processor_seconds / (AIM * num_cores * iteration_seconds)
    return max(1.0, math.ceil(10 * scale) / 10)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter."""
    return {"python": platform.python_version()} | {p: v for p in PACKAGES if (v := _version(p))}


def description() -> dict[str, Any]:
    """Return the system, the processor and the number of cores."""
    cpu = Path("/proc/cpuinfo")
    models = [line.partition(":")[2].strip() for line in cpu.read_text().splitlines() if line.startswith("model name")]
    return {"system": platform.system(), "processor": (models or [platform.machine()])[0], "cores": os.cpu_count()}


def setting() -> dict[str, Any]:
    """Return the conditions on which a measurement depends besides its parameters."""
    return {"versions": versions(), "machine": description(), "usable_cores": cores()}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
