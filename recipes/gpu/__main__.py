"""``python3 -m recipes.gpu``: tries the package on the GPUs of this machine, and writes a report.

It needs torch, lightning, pyzmq and msgspec, and neither root, a compiler nor a network. Results are written as they
come, to gpu-report.json and gpu-report.md; gpu-report.log has the output of the trials.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking for GPUs must not open them: processes are forked

import torch

from recipes.gpu import checks, shares
from recipes.gpu.rows import Report, run
from recipes.gpu.running import Machine
from recipes.harness.processes import in_processes

PARTS = {"checks": (checks.ROWS, 290.0), "shares": (shares.ROWS, 350.0)}
"""The rows of each part, and the seconds after which, by default, no further row begins."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 if a row failed."""
    parser = argparse.ArgumentParser(prog="recipes.gpu", description=__doc__)
    add = parser.add_argument
    add("--only", choices=PARTS, help="checks: does it work, and what does it cost; shares: unlike devices out of one")
    add("--seconds", type=float, help="after which no further row begins (290 for checks, 350 for shares)")
    add("--dry", action="store_true", help="on the CPU, with tiny models: does the script itself work?")
    add("--out", type=Path, default=Path(), help="folder for the report (%(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # a fork copies only one thread
    # In a child, since without NVML, asking opens the GPUs.
    count = 0 if options.dry else in_processes(1, lambda rank: torch.cuda.device_count())[0]
    if not count and not options.dry:
        print("torch finds no CUDA device here; --dry tries the script itself on the CPU", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a row's processes end
    options.out.mkdir(parents=True, exist_ok=True)
    about = {"on": time.strftime("%Y-%m-%d %H:%M"), "command": " ".join(["python3 -m recipes.gpu", *sys.argv[1:]])}
    if options.dry:
        about["device"] = "none: a dry run on the CPU, whose figures mean nothing"
    report = Report(options.out, about)
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        machine = Machine("cuda" if count else "cpu", count, Path(folder), options.dry)
        for part in [options.only] if options.only else PARTS:
            rows, limit = PARTS[part]
            run(rows, machine, report, limit if options.seconds is None else options.seconds)
    return int(any(outcome.result == "failed" for outcome in report.outcomes))


if __name__ == "__main__":
    sys.exit(main())
