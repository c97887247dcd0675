"""A table of a Hydra sweep's jobs, for any Hydra application: name :class:`SweepTable` in ``hydra.callbacks``."""

from __future__ import annotations

import atexit
import csv
import json
import logging
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, get_args

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.worker.launching import job

_log = logging.getLogger(__name__)

OnFailure = Literal["continue", "stop"]


@dataclass(frozen=True)
class Row:
    """One job: its overrides, its outcome, and its figures."""

    number: int
    overrides: Mapping[str, str]
    status: str
    seconds: float
    figures: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


class SweepTable(Callback):
    """Frees each job's connections when it ends, and writes a row for it.

    ``summary.csv`` in the sweep's directory has all columns and grows with each job; the terminal gets a table when
    the sweep ends, even by an exception. A job's figures come from the JSON file that it leaves in its output
    directory, if any; nested names are joined by dots.

    Args:
        on_failure: after a job that failed, ``"continue"`` with the next, or ``"stop"``. The exit status shows the
            failure either way.
        file: name of the JSON file in a job's output directory.
        columns: figures for the terminal; ``*`` stands for any text.

    Raises:
        ConfigurationError: ``on_failure`` has another value.
    """

    def __init__(
        self, on_failure: OnFailure = "continue", file: str = "summary.json", columns: Sequence[str] = ("*",)
    ) -> None:
        if on_failure not in get_args(OnFailure):
            raise ConfigurationError(f"on_failure={on_failure!r} is not known; use one of {list(get_args(OnFailure))}.")
        self._on_failure = on_failure
        self._file = file
        self._columns = tuple(columns)
        self._directory: Path | None = None
        self._rows: list[Row] = []

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._directory = Path(config.hydra.sweep.dir).absolute()
        atexit.register(self._print)  # a sweep with a failed job ends in an exception

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._started = time.monotonic()

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        seconds = time.monotonic() - self._started
        failed = job_return.status != JobStatus.COMPLETED
        if failed and self._directory is not None:
            error = job_return._return_value
            _log.error(f"Job {config.hydra.job.num} failed: {_choices(config)}", exc_info=error)
            traceback.clear_frames(error.__traceback__)  # they would keep the Trainer and its connections
        job.end()
        if self._directory is None:
            return
        output = Path(config.hydra.runtime.output_dir) / self._file
        row = Row(
            config.hydra.job.num,
            _choices(config),
            "failed" if failed else "done",
            seconds,
            {} if failed or not output.exists() else dict(_flat(json.loads(output.read_text()))),
            f"{type(job_return._return_value).__name__}: {job_return._return_value}" if failed else "",
        )
        self._rows.append(row)
        _write(self._directory / "summary.csv", self._rows)
        if failed and self._on_failure == "stop":
            raise SystemExit(1)

    def _print(self) -> None:
        if self._rows:
            print(f"\n{table(self._rows, self._columns)}\n\n{self._directory}/summary.csv", flush=True)


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Return the rows as text with aligned columns: the overrides that differ between jobs, and the figures that match
    ``columns``."""
    names = [name for row in rows for name in row.overrides]
    varied = [name for name in dict.fromkeys(names) if len({row.overrides.get(name) for row in rows}) > 1]
    figures = [name for pattern in columns for row in rows for name in row.figures if fnmatch(name, pattern)]
    figures = [name for name in dict.fromkeys(figures) if name != "seconds"]
    lines = [["job", *varied, "status", "seconds", *(name.rpartition(".")[2] for name in figures), ""]]
    for row in rows:
        chosen = [row.overrides.get(name, "") for name in varied]
        shown = [_shown(row.figures.get(name, "")) for name in figures]
        lines.append([str(row.number), *chosen, row.status, _shown(row.seconds), *shown, _first_line(row.error)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _write(path: Path, rows: Sequence[Row]) -> None:
    own: list[dict[str, Any]] = [
        {"job": row.number, **row.overrides, "status": row.status, "seconds": _shown(row.seconds)} for row in rows
    ]
    lines = [{**each, **row.figures, **each, "error": row.error} for each, row in zip(own, rows, strict=True)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for line in lines for name in line)))
        writer.writeheader()
        writer.writerows(lines)


def _choices(config: DictConfig) -> dict[str, str]:
    overrides = (str(override).partition("=") for override in config.hydra.overrides.task)
    return {name.lstrip("+"): value for name, _, value in overrides}


def _flat(figures: Mapping[str, Any], prefix: str = "") -> Mapping[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in figures.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _first_line(text: str) -> str:
    line = text.partition("\n")[0]
    return line if len(line) <= 80 else line[:79] + "…"
