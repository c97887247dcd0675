"""``make demo``: the same training with SDPipe's synchronisation and with all-reduce, where workers stall, and where
one device is always slower than the others."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RULES = {"SDPipe": "semi_decentralized", "all-reduce": "all_reduce"}
COLOURS = {"SDPipe": "tab:blue", "all-reduce": "tab:gray"}
STALLS = ("num_stages=2", "trainer.max_epochs=6", "heterogeneity=b")
GENERATIONS = ("num_stages=1", "trainer.max_epochs=4", "heterogeneity=generations")

Figures = Mapping[str, dict[str, Any]]


def main() -> None:
    logs = Path(tempfile.mkdtemp(prefix="sdpipe-demo-"))
    print("1. 2 pipelines × 2 stages on handwritten digits; one worker in ten sleeps 0.15 s at each iteration.\n")
    stalls = {name: run(rule, STALLS, logs / f"stalls-{rule}") for name, rule in RULES.items()}
    print("\n2. 4 pipelines on handwritten digits; the fourth device is always half as fast as the others.\n")
    generations = {name: run(rule, GENERATIONS, logs / f"generations-{rule}") for name, rule in RULES.items()}
    print(f"\nWorkers that stall\n{table(stalls)}\n\nOne slower device\n{table(generations)}")
    draw(stalls, generations, logs / "demo.png")
    print(f"\nFigure: {logs / 'demo.png'}\nLogs, checkpoints and configurations: {logs}")


def run(rule: str, settings: Sequence[str], output: Path) -> dict[str, Any]:
    """Trains in processes of its own; what they print is shown, and goes to ``train.log`` too."""
    command = [
        *(sys.executable, "-m", "recipes.train", "experiment=digits", "trainer.devices=4", *settings),
        *(f"sync={rule}", "strategy.start_method=fork", f"hydra.run.dir={output}"),
    ]
    print("$", " ".join(["python", *command[1:]]), flush=True)
    subprocess.run(command, check=True)
    summary: dict[str, Any] = json.loads((output / "summary.json").read_text())
    return summary


def table(rows: Figures) -> str:
    lines = [f"{'':12} {'s per epoch':>12} {'samples/s':>10} {'val. accuracy':>14} {'mean group size':>16}"]
    lines += [
        f"{name:12} {epoch_seconds(row):12.2f} {row['samples_per_second']:10.0f} "
        f"{row['metrics']['val_accuracy']:14.1%} {row['mean_group_size']:16.2f}"
        for name, row in rows.items()
    ]
    return "\n".join(lines)


def epoch_seconds(row: Mapping[str, Any]) -> float:
    """Of a whole epoch, with its validation, after the first one."""
    return float(statistics.median(row["epoch_seconds"]))


def draw(stalls: Figures, generations: Figures, file: Path) -> None:
    """The seconds of an epoch, and as points those of each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    parts = {"one worker in ten stalls": stalls, "one of four devices at half speed": generations}
    for axis, (title, rows) in zip(figure.subplots(1, 2), parts.items(), strict=True):
        for place, (name, row) in enumerate(rows.items()):
            seconds = epoch_seconds(row)
            axis.bar(place, seconds, color=COLOURS[name])
            axis.scatter([place] * len(row["epoch_seconds"]), row["epoch_seconds"], color="black", s=8, zorder=2)
            axis.annotate(f"{seconds:.1f} s", (place, seconds / 2), ha="center", color="white")
        axis.set_xticks(range(len(rows)), list(rows))
        axis.set_title(title, fontsize=10)
    figure.axes[0].set_ylabel("s per epoch, validation included")
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
