"""The benchmarks: ``python -m recipes.bench suite=scheduler json=scheduler.json``.

It prints the measurements, and ratios of two things measured in the same run beside their goals.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import shlex
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from recipes.suites import machine
from recipes.suites.grid import Ratio, Ratios, Row, shown


def measure(name: str, parameters: Mapping[str, Any], seed: int, command: str) -> tuple[dict[str, Any], frozenset[str]]:
    """Run a suite.

    Args:
        name: name of a suite in ``recipes/suites``.
        parameters: arguments of its ``run``.
        seed: seed of all randomness.
        command: the command line, for the record.

    Returns:
        The contents of the file, and the families of ratios (the part of their keys before the slash) for which lower
        is better.
    """
    suite = importlib.import_module(f"recipes.suites.{name}")
    load_before = os.getloadavg()[0]
    rows, ratios = suite.run(**parameters, seed=seed)
    report = {
        "suite": name,
        "command": command,
        "seed": seed,
        "versions": machine.versions(),
        "machine": machine.description() | {"load_before": load_before, "load_after": os.getloadavg()[0]},
        "rows": rows,
        "ratios": ratios,
    }
    return report, suite.LOWER_IS_BETTER


def is_met(key: str, ratio: Ratio, lower_is_better: Collection[str]) -> bool:
    """Return whether the value is on the right side of the goal."""
    if key.partition("/")[0] in lower_is_better:
        return bool(ratio["value"] <= ratio["goal"])
    return bool(ratio["value"] >= ratio["goal"])


def row_tables(rows: Sequence[Row]) -> str:
    """Return a table for each run of rows with the same columns."""
    tables = []
    for columns, group in groupby(rows, key=_columns):
        tables.append(_table([columns, *[[shown(row[column]) for column in columns] for row in group]]))
    return "\n\n".join(tables)


def ratio_table(ratios: Ratios, lower_is_better: Collection[str]) -> str:
    """Return a table of each ratio beside its goal."""
    lines = [("ratio", "value", "low to high", "goal", "", "meaning")]
    for key, ratio in ratios.items():
        free = ratio["goal"] is None  # measured for information only
        sign = "≤" if key.partition("/")[0] in lower_is_better else "≥"
        spread = f"{shown(ratio['low'])} to {shown(ratio['high'])}"
        verdict = "" if free else "met" if is_met(key, ratio, lower_is_better) else "missed"
        goal = "" if free else f"{sign} {shown(ratio['goal'])}"
        lines.append((key, shown(ratio["value"]), spread, goal, verdict, ratio["meaning"]))
    return _table(lines)


def _columns(row: Row) -> tuple[str, ...]:
    return tuple(name for name, value in row.items() if not isinstance(value, (list, dict)))  # only in the file


def _table(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


@hydra.main(version_base="1.3", config_path="../conf", config_name="bench")
def main(config: DictConfig) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that contexts clean up
    name = HydraConfig.get().runtime.choices["suite"]
    parameters: Any = OmegaConf.to_container(config.suite, resolve=True)
    command = shlex.join(["python", "-m", "recipes.bench", *sys.argv[1:]])
    report, lower_is_better = measure(name, parameters, config.seed, command)
    used = report["machine"]
    print(row_tables(report["rows"]))
    print(f"\n{used['processor']}, {used['cores']} cores; load {used['load_before']:.1f} before, ", end="")
    print(f"{used['load_after']:.1f} after; seed {report['seed']}")
    print(", ".join(f"{package} {version}" for package, version in report["versions"].items()), end="\n\n")
    print(ratio_table(report["ratios"], lower_is_better))
    if config.json:
        Path(config.json).write_text(json.dumps(finite(report), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """Return ``value`` as JSON can hold it, with None for infinite numbers, as of samples until an unreached goal."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    return [*map(finite, value)] if isinstance(value, (list, tuple)) else value


if __name__ == "__main__":
    main()
