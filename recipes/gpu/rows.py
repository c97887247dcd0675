"""Rows of the report: each is tried in its own process, within a time limit, and written before the next one."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from recipes.gpu.running import Machine
from recipes.suites.grid import shown

Values = dict[str, Any]
_DRY = 10
"""Factor of a row's time limit on a CPU, which may have other things to do."""


class NotPossible(Exception):
    """The row cannot be tried on this machine; the message says what it needs."""


@dataclass(frozen=True)
class Row:
    """One trial.

    Args:
        name: name in the report.
        work: returns what was measured, by name; raises if something is wrong.
        seconds: limit of time.
        goals: upper bounds of some values.
    """

    name: str
    work: Callable[[Machine], Values]
    seconds: float
    goals: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a row: ``result`` is "passed", "failed", "not possible" or "not reached"."""

    name: str
    result: str
    seconds: float = 0.0
    values: Values = field(default_factory=dict)
    goals: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    details: str = ""


@dataclass
class Report:
    """The outcomes so far, in ``gpu-report.json`` and ``gpu-report.md``.

    Args:
        folder: folder for the two files.
        about: facts about the whole report.
    """

    folder: Path
    about: Mapping[str, Any]
    outcomes: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Print ``outcome``, and write the report with it."""
        self.outcomes.append(outcome)
        print(" ".join(_cells(outcome)), flush=True)
        text = json.dumps({**self.about, "rows": list(map(asdict, self.outcomes))}, indent=1, ensure_ascii=False)
        (self.folder / "gpu-report.json").write_text(f"{text}\n", encoding="utf-8")
        (self.folder / "gpu-report.md").write_text(self.table(), encoding="utf-8")

    def table(self) -> str:
        """Return the report as Markdown."""
        head = "\n".join(f"- {name}: {value}" for name, value in self.about.items())
        rows = [("what", "result", "s", "found"), ("---",) * 4, *map(_cells, self.outcomes)]
        return "\n".join([head, "", *(f"| {' | '.join(row)} |" for row in rows), ""])


def _cells(outcome: Outcome) -> tuple[str, str, str, str]:
    found = [f"{name} {shown(value)}{_verdict(outcome, name)}" for name, value in outcome.values.items()]
    said = "; ".join([*found, *([outcome.reason] if outcome.reason else [])])
    return outcome.name, outcome.result, f"{outcome.seconds:.0f}", said.replace("|", "/").replace("\n", " ")


def _verdict(outcome: Outcome, name: str) -> str:
    if name not in outcome.goals:
        return ""
    goal = outcome.goals[name]
    return f" ({'met' if outcome.values[name] <= goal else 'missed'}: at most {goal:g})"


def run(rows: Sequence[Row], machine: Machine, report: Report, seconds: float) -> None:
    """Try the rows in turn until ``seconds`` have passed; failures are written to the report like successes."""
    began = time.monotonic()
    for row in rows:
        if time.monotonic() - began >= seconds:
            report.add(Outcome(row.name, "not reached", reason=f"{seconds:g} s were over"))
        else:
            report.add(attempt(row, machine, report.folder / "gpu-report.log"))


def attempt(row: Row, machine: Machine, log: Path) -> Outcome:
    """Try a row in a forked process, which opens the device anew and prints to ``log``; all processes that it started
    end with it."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_try, args=(row, machine, log, send))
    began = time.monotonic()
    sys.stdout.flush()
    process.start()
    send.close()
    limit = row.seconds * (_DRY if machine.dry else 1)
    outcome: Values = {"result": "failed", "reason": f"it was not done within {limit:g} s"}
    try:
        if wait([receive], limit):
            outcome = receive.recv()
    except EOFError:
        process.join()
        outcome = {"result": "failed", "reason": f"its process ended with status {process.exitcode}"}
    finally:
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # all of its processes have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return Outcome(row.name, seconds=time.monotonic() - began, goals=dict(row.goals), **outcome)


def _try(row: Row, machine: Machine, log: Path, send: Connection) -> None:
    os.setpgid(0, 0)
    with open(log, "a") as file:  # it gets what Lightning, torch and NCCL print
        print(f"\n--- {row.name}", file=file, flush=True)
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    try:
        outcome: Values = {"result": "passed", "values": row.work(machine)}
    except NotPossible as said:
        outcome = {"result": "not possible", "reason": str(said)}
    except BaseException as error:
        whole = "".join(traceback.format_exception(error))
        last = [line for line in whole.strip().splitlines() if line.strip()][-1]
        outcome = {"result": "failed", "reason": last[:500], "details": whole[-4000:]}
    send.send(outcome)
