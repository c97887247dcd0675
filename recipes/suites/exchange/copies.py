"""The memory that methods and exchanges need besides parameters, gradients and the optimizer's state: the peak of a
training beyond that of the same training without synchronisation, in copies of the model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import lightning_sdpipe as sdp
from recipes.suites.grid import Ratios, Row, chosen, ratio, refuse_unknown, rotated
from recipes.suites.pipeline.memory import LinearChain
from recipes.suites.probe import MIB, Probe, read_reports
from recipes.suites.trainings import TRANSFER_TIMEOUT, make_trainer, quiet

WORKERS, BATCH = 3, 2
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


def measure(
    *, compared: Sequence[str] | None, width: int, blocks: int, steps: int, repeats: int, seed: int
) -> tuple[list[Row], Ratios]:
    """Return the peak of the fullest of three workers, one pipeline each, with Adam.

    Args:
        compared: names of cases; None for all.
        width: features of a layer.
        blocks: number of layers.
        steps: steps of each worker.
        repeats: trainings of each case.
        seed: seed of the weights and the data.

    Raises:
        ConfigurationError: ``compared`` names an unknown case.
    """
    refuse_unknown("a case of suite.copies.compared", compared or (), CASES)
    names = [BASELINE, *(name for name in (CASES if compared is None else compared) if name != BASELINE)]
    quiet()
    model = 4 * width * width * blocks
    rows: list[Row] = []
    for repeat in range(repeats):
        peaks = {name: _peak(name, width, blocks, steps, seed) for name in rotated(names, repeat)}
        for name in names:
            copies = (peaks[name] - peaks[BASELINE]) / model
            rows.append({"what": name, "repeat": repeat, "peak_mib": peaks[name] / MIB, "copies": copies})
    meaning = f"peak beyond that of {BASELINE}, in copies of a model of {model / MIB:.0f} MiB"
    of = {name: [row["copies"] for row in chosen(rows, what=name)] for name in names[1:]}
    return rows, {f"memory/{name}": ratio(copies, None, f"{name}: {meaning}") for name, copies in of.items()}


def _peak(name: str, width: int, blocks: int, steps: int, seed: int) -> int:
    sync, exchange = CASES[name]
    strategy = sdp.SDPipeStrategy(
        1, sync, exchange=exchange, data="sharded", start_method="fork", timeout=TRANSFER_TIMEOUT
    )
    data = torch.rand(steps * WORKERS * BATCH, width, generator=torch.Generator().manual_seed(seed))
    loader: DataLoader[Any] = DataLoader(list(data), BATCH)  # type: ignore[arg-type]  # a list is a dataset, too
    with tempfile.TemporaryDirectory() as directory:
        probe = Probe(Path(directory), memory=True)
        make_trainer(strategy, WORKERS, probe, limit_train_batches=steps).fit(_Adam(width, blocks, seed), loader)
        return max(report.peak for report in read_reports(Path(directory)))
