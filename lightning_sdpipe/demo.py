"""``sdpipe demo``: trains on handwritten digits with SDPipe and with all-reduce, where one device is slow, and where
workers stall.

All workers run on this machine and emulate devices: most of a step is sleep, in place of a larger model, so that a few
cores suffice. Training, data and messages are real. Other programs would slow some workers more than others, so the
machine is measured first; if it is busy, the sleeps become longer, or no verdict is given.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdpipe.command_line import Parser, check_installed
from lightning_sdpipe.errors import check_integer, shape
from lightning_sdpipe.heterogeneity.delays import Delays
from lightning_sdpipe.heterogeneity.emulate import EmulatedBlock
from lightning_sdpipe.heterogeneity.injector import Heterogeneity
from lightning_sdpipe.heterogeneity.slowdowns import Static
from lightning_sdpipe.seeing import report
from lightning_sdpipe.seeing.page import in_one_line
from lightning_sdpipe.seeing.recording import of_log
from lightning_sdpipe.strategy import SDPipeStrategy

METHODS = {"SDPipe": "semi_decentralized", "all-reduce": "all_reduce"}
COLOURS = {"SDPipe": "tab:blue", "all-reduce": "tab:orange"}
WORKERS = 4
REAL, EMULATED, SLEEPS = 0.008, 0.06, 4
"""Seconds of work and seconds of sleep in a step of a device at full speed, and the number of its sleeps."""
WAITED = 0.05
"""Largest ratio of the time that a step may wait for a core to its emulated time, for figures that count."""
LONGEST = 2.0
"""Largest factor by which sleeps become longer; the demo then takes some four minutes."""
CALM = 1.5
"""Largest ratio of the factor measured after the runs to the one before them at which a verdict is given."""


@dataclass(frozen=True)
class Scene:
    """A situation in which methods are compared; ``slow`` names the one device that is slowed down, if any."""

    title: str
    slow: str
    num_stages: int
    slowness: Heterogeneity
    batch_size: int


SCENES = (
    Scene(
        "one of four devices at half speed",
        "pipeline 3",
        1,
        Static((1.0, 1.0, 1.0, 2.0)),
        8,  # small, so that the slow device, which gets the fewest batches, makes enough updates to be named
    ),
    Scene("each worker stalls in one iteration of ten", "", 2, Delays(probability=0.1, seconds=0.4, seed=1), 32),
)


@dataclass(frozen=True)
class Figures:
    """Figures of one training run. An epoch's time includes its validation; the first epoch counts only if it is the
    only one. ``line`` is the run's last line."""

    epoch_seconds: list[float]
    accuracy: float
    line: str

    @property
    def median(self) -> float:
        return statistics.median(self.epoch_seconds)


def main(arguments: Sequence[str]) -> None:
    """Train with both methods in each scene, then draw and print the comparison."""
    parser = Parser("demo", "Compares SDPipe with all-reduce on handwritten digits, in about two minutes.")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(), metavar="DIRECTORY", help="for the figure and the report"
    )
    parser.add_argument("--epochs", type=int, default=5, help="number of epochs of each of the four runs")
    options = parser.parse_args(arguments)
    _check(options.epochs)
    _hush()
    factor = longer(*measured())
    if factor > LONGEST:
        print("This machine is busy: the figures below are no measure of the methods. Run it again when it is idle.\n")
    elif factor >= 1.05:
        print(f"This machine is a little busy, so the emulated devices take {factor:.1f} times as long.\n")
    with tempfile.TemporaryDirectory(prefix="sdpipe-demo-") as directory:
        compared = [
            _compare(number, scene, options.epochs, Path(directory), factor) for number, scene in enumerate(SCENES, 1)
        ]
        results = [rows for rows, _ in compared]
        _draw(results, options.output / "sdpipe-demo.png")
        print(f"Figure: {options.output / 'sdpipe-demo.png'}")
        if not report.missing():
            report.write(
                _folder(Path(directory), "SDPipe", SCENES[0]) / "scheduler.jsonl", options.output / "sdpipe-demo.html"
            )
            print(f"Report: {options.output / 'sdpipe-demo.html'}, of SDPipe with {SCENES[0].title}")
    hidden = "" if compared[0][1] else ", which a busy machine may hide"
    print(f"\nThe last line of each run with a slow device ({SCENES[0].slow}){hidden}:")
    for name, figures in results[0].items():
        print(f"   {name:12}{figures.line}")


def measured(loops: int = 100, sleeps: int = 15) -> tuple[float, float]:
    """Return the share of a core that a busy loop gets on this machine now, and the seconds by which a sleep of 20 ms
    overruns."""
    shares, late = [], []
    for _ in range(loops):
        begun, busy = time.perf_counter(), time.process_time()
        while time.process_time() < busy + REAL / 2:
            pass
        shares.append((time.process_time() - busy) / (time.perf_counter() - begun))
    for _ in range(sleeps):
        begun = time.perf_counter()
        time.sleep(0.02)
        late.append(time.perf_counter() - begun - 0.02)
    return statistics.fmean(shares), statistics.fmean(late)


def longer(share: float, late: float) -> float:
    """Return the factor, 1 or more, by which sleeps must grow so that waiting for a core is at most :data:`WAITED` of
    a step."""
    waited = REAL * (1 / share - 1) + SLEEPS * late
    return max(1.0, waited / (WAITED * EMULATED))


def _check(epochs: int) -> None:
    check_integer("--epochs", epochs, 1, "epochs")
    check_installed("the demo", "demo", "sklearn", "matplotlib")


def _hush() -> None:
    """Suppress Lightning's and torch's hints about this script."""
    torch.set_num_threads(1)  # several workers share a core
    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.WARNING)
    for category in (DeprecationWarning, FutureWarning, UserWarning):
        warnings.filterwarnings("ignore", module=r"(torch|lightning)\.", category=category)


def _compare(number: int, scene: Scene, epochs: int, directory: Path, factor: float) -> tuple[dict[str, Figures], bool]:
    """Return the figures of each method, and whether the machine was calm enough for a verdict."""
    mesh = shape(scene.num_stages, WORKERS // scene.num_stages)
    print(f"{number}. {scene.title.capitalize()} ({mesh}, emulated)\n")
    sleep = 1.0 if factor > LONGEST else factor
    rows = {name: _train(name, scene, epochs, _folder(directory, name, scene), sleep) for name in METHODS}
    slowest = max(row.median for row in rows.values())
    print(f"\n   {'':12}{'s per epoch':>12}{'speedup':>10}{f'accuracy after {epochs} epochs':>26}")
    for name, row in rows.items():
        print(f"   {name:12}{row.median:12.2f}{slowest / row.median:10.2f}{row.accuracy:26.1%}")
    calm = factor <= LONGEST and longer(*measured()) <= CALM * factor  # and still is after the runs
    print(f"\n   {verdict(rows) if calm else 'No verdict, since this machine is busy: run it again.'}\n", flush=True)
    return rows, calm


def verdict(rows: dict[str, Figures]) -> str:
    """Return what the figures say, good or bad."""
    ours, theirs = rows.values()
    ratio, points = theirs.median / ours.median, 100 * (ours.accuracy - theirs.accuracy)
    if abs(ratio - 1) < 0.05:
        said = "An epoch took as long with all-reduce as with SDPipe"
    elif ratio > 1:
        said = f"An epoch took {ratio:.2f} times as long with all-reduce as with SDPipe"
    else:
        said = f"SDPipe did not help here: its epochs took {1 / ratio:.2f} times as long as those with all-reduce"
    if abs(points) < 0.05:
        return f"{said}; the accuracy is the same."
    return f"{said}; SDPipe's accuracy is {abs(points):.1f} points {'higher' if points > 0 else 'lower'}."


def _folder(directory: Path, name: str, scene: Scene) -> Path:
    """Return the folder of a run."""
    return directory / f"{name}-{scene.num_stages}"


def _train(name: str, scene: Scene, epochs: int, directory: Path, factor: float) -> Figures:
    L.seed_everything(1, verbose=False)
    directory.mkdir()
    file = directory / "figures.json"
    trainer = L.Trainer(
        accelerator="cpu",
        devices=WORKERS,
        strategy=SDPipeStrategy(
            num_stages=scene.num_stages,
            sync=METHODS[name],
            delays=scene.slowness,
            log_dir=directory,
            start_method="fork",
        ),
        max_epochs=epochs,
        num_sanity_val_steps=0,
        callbacks=[_Bar(name, file)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train, val = _digits()
    loader = DataLoader(train, scene.batch_size, shuffle=True, drop_last=True)
    trainer.fit(DigitsModule(factor), loader, DataLoader(val, 64))
    return Figures(**json.loads(file.read_text()), line=in_one_line(of_log(directory / "scheduler.jsonl")))


class _Bar(L.Callback):
    """Shows a run's progress, and writes its figures to a file, since rank 0 is not the user's process.

    Args:
        name: name of the run.
        file: file for the figures.
    """

    def __init__(self, name: str, file: Path) -> None:
        self._name = name
        self._file = file
        self._starts: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._starts.append(time.perf_counter())
        self._show(trainer, trainer.current_epoch)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            seconds = [end - start for start, end in pairwise([*self._starts, time.perf_counter()])]
            accuracy = float(trainer.callback_metrics["val_accuracy"])
            self._file.write_text(json.dumps({"epoch_seconds": seconds[1:] or seconds, "accuracy": accuracy}))
        self._show(trainer, len(self._starts))

    def _show(self, trainer: L.Trainer, done: int) -> None:
        total = trainer.max_epochs
        assert total is not None
        if trainer.is_global_zero and (sys.stdout.isatty() or done == total):
            end = "\n" if done == total else "\r"
            bar = "━" * (24 * done // total)
            each = (time.perf_counter() - self._starts[0]) / max(1, done)
            left = f", {(total - done) * each:.0f} s left" if 0 < done < total else ""
            print(f"   {self._name:12}{bar:24} {done}/{total} epochs{left:14}".rstrip(), end=end, flush=True)


class DigitsModule(L.LightningModule):
    """A small convolutional network for 8 × 8 images in ten classes, whose forward and backward together sleep for
    ``factor`` × 60 ms."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        each, channels = factor * EMULATED / SLEEPS, 24
        self.net = nn.Sequential(
            EmulatedBlock(each * 2 / 3, each * 4 / 3),
            nn.Conv2d(1, channels, 3, padding=1),
            *[nn.Sequential(nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)) for _ in range(3)],
            nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, 10)),
            EmulatedBlock(each * 2 / 3, each * 4 / 3),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("val_accuracy", (self.net(images).argmax(-1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def _digits() -> tuple[TensorDataset, TensorDataset]:
    """Load scikit-learn's 1797 handwritten digits: 1437 to train on, 360 to validate."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.5
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, val = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[val], labels[val])


def _draw(results: Sequence[dict[str, Figures]], file: Path) -> None:
    """Draw a bar for the median epoch time of each method, and a point for each epoch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    figure.suptitle("How long an epoch takes, with SDPipe and with all-reduce", fontsize=13)
    for axis, scene, rows in zip(figure.subplots(1, len(SCENES)), SCENES, results, strict=True):
        for place, (name, row) in enumerate(rows.items()):
            axis.bar(place, row.median, color=COLOURS[name], hatch="" if place == 0 else "//", edgecolor="white")
            axis.scatter([place] * len(row.epoch_seconds), row.epoch_seconds, color="black", s=10, zorder=2)
            box = {"facecolor": "white", "edgecolor": "none"}
            text = f"{row.median:.1f} s"
            axis.annotate(text, (place, row.median / 2), ha="center", fontsize=12, weight="bold", bbox=box)
        axis.set_xticks(
            range(len(rows)), [f"{name}\n{row.accuracy:.1%} right" for name, row in rows.items()], fontsize=11
        )
        axis.set_title(scene.title, fontsize=11)
    figure.axes[0].set_ylabel("seconds per epoch (lower is better)", fontsize=11)
    note = "bars: medians; dots: epochs, with validation; four emulated devices on one machine"
    figure.supxlabel(note, fontsize=10)
    figure.savefig(file, dpi=150)
