"""Weights of files of safetensors, loaded in ``configure_model``: each stage has the file's values, and takes no
more memory than for its own part and the largest file."""

from __future__ import annotations

import ctypes
from pathlib import Path
from threading import Event, Thread
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdpipe import AllReduce, SDPipeStrategy
from tests.features.running import on_four_ranks, pipelines

pytestmark = pytest.mark.distributed

WIDTH, DEPTH, FILES = 2048, 16, 8
WHOLE = DEPTH * WIDTH * WIDTH * 4  # bytes: 256 MiB, beside which what Python takes is little
MMAP_THRESHOLD = -3  # of malloc.h


def build() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)])


def taken() -> int:
    """Bytes of memory that no file is behind. What a forked process shares with its parent counts before and after it
    has made it its own."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Pretrained(L.LightningModule):
    def __init__(self, files: list[Path]) -> None:
        super().__init__()
        self.files, self.most, self.ended = files, 0, Event()
        self.before: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        begun = taken()

        def watch() -> None:
            while not self.ended.wait(0.002):
                self.most = max(self.most, taken() - begun)

        self.watching = Thread(target=watch)
        self.watching.start()
        with torch.device("meta"):
            self.net = build()
        for file in self.files:
            self.net.load_state_dict(load_file(file), strict=False, assign=True)

    def on_fit_start(self) -> None:
        self.ended.set()
        self.watching.join()
        self.before = {name: value.clone() for name, value in self.net.state_dict().items() if not value.is_meta}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def _load(directory: Path) -> tuple[int, list[str]]:
    # A process that has freed large tensors gets new ones from its heap, and glibc keeps what is freed in their midst:
    # that is the memory of the tests before, not of this one.
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 20)
    files = sorted(directory.glob("*.safetensors"))
    trainer = pipelines(directory, SDPipeStrategy(4, AllReduce()), max_steps=1)
    module = Pretrained(files)
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(4, WIDTH)), 4))
    saved = {name: value for file in files for name, value in load_file(file).items()}
    assert all(torch.equal(value, saved[name]) for name, value in module.before.items())
    return module.most, [*module.before]


def test_a_stage_takes_its_part_of_the_files_and_no_more_memory(tmp_path: Path) -> None:
    torch.manual_seed(1)
    state = build().state_dict()
    names = list(state)
    each = len(names) // FILES
    for number in range(FILES):
        mine = {name: state[name] for name in names[number * each : (number + 1) * each]}
        save_file(mine, tmp_path / f"{number}.safetensors")
    ranks: list[tuple[int, list[str]]] = on_four_ranks(_load, tmp_path)
    assert sorted(name for _, held in ranks for name in held) == sorted(names)
    for most, held in ranks:
        assert len(held) == DEPTH // 4
        assert most < WHOLE // 4 + WHOLE // FILES, most
