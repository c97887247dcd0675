"""``make versions``: the tests on other versions of Python and torch, each in an environment of its own.

A row whose interpreter or packages cannot be had is "not available". Tests run as in ``make quick``, and then one file
for each room that starts processes; give paths of tests to run those instead.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = (
    ("3.11", "2.9"),
    ("3.11", "2.13"),
    ("3.11", "2.14"),
    ("3.11", "2.15"),
    ("3.12", "2.11"),
    ("3.13", "2.15"),
    ("3.14", "2.15"),
)
PROCESSES = (
    "tests/checkpoints/test_distributed.py",
    "tests/data/test_same_samples.py",
    "tests/exchange/test_pairs.py",
    "tests/features/test_4_complex.py",
    "tests/loop/test_every_checkpoint.py",
    "tests/partition/test_in_trainer.py",
    "tests/pipeline/test_late_updates.py",
    "tests/placement/test_in_trainer.py",
    "tests/strategy/test_accelerators.py",
    "tests/supervision/test_command.py",
    "tests/sync/test_asynchronous_pairs.py",
    "tests/topology/test_groups.py",
    "tests/worker/elastic/test_checkpoints.py",
)
QUICK = ("-m", "not distributed and not slow", "--hypothesis-profile=quick", "--dist=worksteal")
_COUNTS = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows, and print each as it ends; the exit status is 1 if a test of one failed."""
    parser = argparse.ArgumentParser(prog="recipes.tools.versions", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="PYTHON/TORCH", help="rows, as 3.11/2.9 (default: all)")
    parser.add_argument("--folder", type=Path, default=ROOT / ".versions", help="of the environments (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the environments, several GB each")
    parser.add_argument("tests", nargs="*", help="paths of tests, instead of those of make quick and of the rooms")
    options = parser.parse_args(arguments)
    failed = False
    print("| Python | torch | result | tests | seconds | on |\n|---|---|---|---|---|---|", flush=True)
    for python, torch in ROWS:
        if options.only and f"{python}/{torch}" not in options.only:
            continue
        began, place = time.monotonic(), options.folder / f"{python}-{torch}"
        interpreter = place / "bin" / "python"
        if (reason := make(interpreter, python, torch)) is not None:
            result, tests = "not available", reason
        else:
            passed, tests = run(interpreter, options.tests, place.with_suffix(f"{place.suffix}.log"))
            result, failed = "passed" if passed else "failed", failed or not passed
            python, torch = versions(interpreter)
        if not options.keep:
            shutil.rmtree(place, ignore_errors=True)
        cells = (python, torch, result, tests, f"{time.monotonic() - began:.0f}", time.strftime("%Y-%m-%d"))
        print(f"| {' | '.join(cells)} |", flush=True)
    return int(failed)


def interpreters(python: str) -> Iterator[str]:
    """Yield possible interpreters of this version: on the path, or among pyenv's."""
    if (found := shutil.which(f"python{python}")) is not None:
        yield found
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    yield from map(str, sorted(pyenv.glob(f"versions/{python}.*/bin/python"), reverse=True))


def make(interpreter: Path, python: str, torch: str) -> str | None:
    """Make the environment of ``interpreter`` unless it exists; return why it cannot be made, or None.

    Versions are those in constraints.txt, except torch's.
    """
    place = interpreter.parents[1]
    if (place / "ready").exists():
        return None
    for found in interpreters(python):
        if subprocess.run([found, "-m", "venv", "--clear", place], capture_output=True, check=False).returncode == 0:
            break
    else:
        return f"no Python {python}"
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("torch==")]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join([*pins, f"torch=={torch}.*"]))
        constraints.flush()
        command = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*command, "-c", constraints.name, "-e", f"{ROOT}[recipes,dev]"],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        return str(said[-1]).removeprefix("ERROR: ").replace("|", "/")
    (place / "ready").touch()
    return None


def run(interpreter: Path, tests: Sequence[str], log: Path) -> tuple[bool, str]:
    """Run the tests, with their output in ``log``; return whether all passed, and a summary of their outcomes."""
    calls = [tests] if tests else [QUICK, PROCESSES]
    counts: dict[str, int] = {}
    passed = True
    with open(log, "w+") as output:
        for call in calls:
            command = [str(interpreter), "-m", "pytest", "-p", "no:cacheprovider", *call]
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{interpreter.parent}:{os.environ['PATH']}"}
            done = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output, check=False)
            passed = passed and done.returncode == 0
        output.seek(0)
        ends = [line for line in output if re.search(r"\d+ \w+.* in [\d.]+s", line)]
    for line in ends:
        for number, what in _COUNTS.findall(line):
            counts[what] = counts.get(what, 0) + int(number)
    return passed, ", ".join(f"{number} {what}" for what, number in counts.items()) or f"see {log}"


def versions(interpreter: Path) -> tuple[str, str]:
    """Return the versions of Python and torch, as in ``3.11.7`` and ``2.9.1``."""
    asks = "import platform, torch; print(platform.python_version(), torch.__version__)"
    said = subprocess.run([interpreter, "-c", asks], capture_output=True, text=True, check=True).stdout.split()
    return said[0], said[1]


if __name__ == "__main__":
    sys.exit(main())
