"""The memory that methods and exchanges hold besides parameters, gradients and the optimizer's state: the peak of a
training beside that of the same training without synchronisation, in copies of the model."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

import lightning_sdpipe as sdp
from lightning_sdpipe.errors import ConfigurationError
from recipes.suites import trainings
from recipes.suites.pipeline.memory import MIB, LinearChain, reset_peak, resident
from recipes.suites.ratios import Ratios, Row, ratio, rotated

WORKERS = 3
BATCH = 2
BASELINE = "nosync"
CASES: Mapping[str, tuple[Any, sdp.Exchange]] = {
    BASELINE: (sdp.NoSync(), sdp.Exchange()),
    "all_reduce": (sdp.AllReduce(), sdp.Exchange()),
    "all_reduce/eight_bit": (sdp.AllReduce(), sdp.Exchange(sdp.EightBit())),
    "all_reduce/one_bit": (sdp.AllReduce(), sdp.Exchange(sdp.OneBit())),
    "local_sgd": (sdp.LocalSGD(every=1), sdp.Exchange()),
    "local_sgd/eight_bit": (sdp.LocalSGD(every=1), sdp.Exchange(sdp.EightBit())),
    "local_sgd/free": (sdp.LocalSGD(every=1), sdp.Exchange(overlap="free")),
    "diloco": (sdp.DiLoCo(every=2), sdp.Exchange()),
    "partial_reduce": (sdp.PartialReduce(group_size=2), sdp.Exchange()),
    "sdpipe": (sdp.SemiDecentralized(), sdp.Exchange()),
    "sdpipe/eight_bit": (sdp.SemiDecentralized(), sdp.Exchange(sdp.EightBit())),
    "sdpipe/eight_bit/step": (sdp.SemiDecentralized(), sdp.Exchange(sdp.EightBit(), "step")),
    "ring": (sdp.Decentralized("ring"), sdp.Exchange()),
    "ring/eight_bit": (sdp.Decentralized("ring"), sdp.Exchange(sdp.EightBit())),
    "adpsgd": (sdp.ADPSGD(), sdp.Exchange()),
    "adpsgd_async": (sdp.ADPSGD(asynchronous=True), sdp.Exchange()),
}


class _Adam(LinearChain):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class _Peak(L.Callback):
    """Writes how far a worker's resident memory has risen since before its part of the model was made ready."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._before = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._before = reset_peak()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (self._directory / f"{trainer.global_rank}.json").write_text(json.dumps(resident("VmHWM") - self._before))


def measure(
    *, compared: Sequence[str] | None, width: int, blocks: int, steps: int, repeats: int, seed: int
) -> tuple[list[Row], Ratios]:
    """Peaks of the fullest worker of three, one pipeline each, under Adam.

    Args:
        compared: names of cases; None for all.
        width: features of a layer.
        blocks: layers.
        steps: of each worker.
        repeats: trainings of each.
        seed: of the weights and the data.

    Raises:
        ConfigurationError: a case that there is not.
    """
    names = [BASELINE, *(name for name in (CASES if compared is None else compared) if name != BASELINE)]
    if unknown := [name for name in names if name not in CASES]:
        raise ConfigurationError(f"suite.copies.compared names {unknown[0]!r}; there are {', '.join(CASES)}.")
    trainings.quiet()
    model = 4 * width * width * blocks
    rows: list[Row] = []
    copies: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        peaks = {name: _peak(name, width, blocks, steps, seed) for name in rotated(names, repeat)}
        for name in names:
            copies[name].append((peaks[name] - peaks[BASELINE]) / model)
            rows.append({"what": name, "repeat": repeat, "peak_mib": peaks[name] / MIB, "copies": copies[name][-1]})
    meaning = f"peak beyond that of {BASELINE}, in copies of a model of {model / MIB:.0f} MiB"
    return rows, {f"memory/{name}": ratio(copies[name], None, f"{name}: {meaning}") for name in names[1:]}


def _peak(name: str, width: int, blocks: int, steps: int, seed: int) -> int:
    sync, exchange = CASES[name]
    strategy = sdp.SDPipeStrategy(
        1, sync, exchange=exchange, data="sharded", start_method="fork", timeout=trainings.TRANSFER_TIMEOUT
    )
    data = torch.rand(steps * WORKERS * BATCH, width, generator=torch.Generator().manual_seed(seed))
    loader: DataLoader[Any] = DataLoader(list(data), BATCH)  # type: ignore[arg-type]  # a list is a dataset, too
    with tempfile.TemporaryDirectory() as directory:
        module, peak = _Adam(width, blocks, seed), _Peak(Path(directory))
        trainings.fit(module, [loader], strategy, WORKERS, peak, limit_train_batches=steps)
        return max(int(json.loads(file.read_text())) for file in Path(directory).iterdir())
