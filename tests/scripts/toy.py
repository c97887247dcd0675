"""A script that only sleeps, fails, or ends on command: what tests let `sdpipe run` supervise. Argument: a directory.

Every rank says there that it runs (``runs-PIPELINE-RANK`` with its process number and environment), and does what
``do-PIPELINE-RANK`` says as soon as that is there; ``do-all`` is for everybody.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main(directory: Path) -> None:
    pipeline, rank = os.environ["SDPIPE_PIPELINE"], os.environ["RANK"]
    told = {name: value for name, value in os.environ.items() if name.startswith(("SDPIPE_", "MASTER_", "LOCAL_"))}
    told |= {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")} | {"pid": str(os.getpid())}
    saying = directory / f".runs-{pipeline}-{rank}"
    saying.write_text(json.dumps(told))
    saying.rename(directory / f"runs-{pipeline}-{rank}")
    print(f"rank {rank} of pipeline {pipeline} runs", flush=True)
    while True:
        for orders in (directory / f"do-{pipeline}-{rank}", directory / "do-all"):
            if orders.exists():
                order = orders.read_text()
                if orders.name != "do-all":
                    orders.unlink()
                obey(*order.split(maxsplit=1))
        time.sleep(0.01)


def obey(verb: str, what: str = "") -> None:
    match verb:
        case "raise":
            raise ValueError(what)
        case "exit":
            sys.exit(int(what))
        case "repeat":
            for _ in range(int(what) // 100):
                print("x" * 99)
            sys.stdout.flush()
        case "child":  # in its process group, and deaf to polite words
            helper = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
            Path(what).write_text(str(helper.pid))
        case "deaf":
            import signal

            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
