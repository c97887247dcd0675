"""``make demo``: the same training twice under the same delays, with SDPipe's synchronisation and with all-reduce."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RULES = {"SDPipe": "semi_decentralized", "all-reduce": "all_reduce"}


def main() -> None:
    logs = Path(tempfile.mkdtemp(prefix="sdpipe-demo-"))
    print("2 pipelines × 2 stages on handwritten digits; one worker in ten sleeps 0.15 s at each iteration.\n")
    rows = {name: run(rule, logs / rule) for name, rule in RULES.items()}
    print(table(rows))
    print(f"\nLogs, checkpoints and configurations: {logs}")


def run(rule: str, output: Path) -> dict[str, Any]:
    """Trains in processes of its own; what they print is shown, and goes to ``train.log`` too."""
    command = [
        *(sys.executable, "-m", "recipes.train", "experiment=digits", "num_stages=2", "trainer.devices=4"),
        *(f"sync={rule}", "heterogeneity=b", f"hydra.run.dir={output}"),
    ]
    print("$", " ".join(["python", *command[1:]]), flush=True)
    subprocess.run(command, check=True)
    summary: dict[str, Any] = json.loads((output / "summary.json").read_text())
    return summary


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'':12} {'samples/s':>10} {'val. accuracy':>14} {'mean group size':>16}"]
    lines += [
        f"{name:12} {row['samples_per_second']:10.0f} {row['metrics']['val_accuracy']:14.1%} "
        f"{row['mean_group_size']:16.2f}"
        for name, row in rows.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
