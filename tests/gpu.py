"""What is tried on a device: by ``make gpu`` on a GPU, and by ``make test`` on the CPU at a small size."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_sdpipe import SDPipeStrategy, p2p
from lightning_sdpipe.checkpoints import random_states
from lightning_sdpipe.exchange.payloads import EightBit, Half, OneBit, Payload
from lightning_sdpipe.random_streams import AFTER, WITHIN, RandomStreams, generator_of
from lightning_sdpipe.topology.groups import ProcessGroups
from lightning_sdpipe.topology.mesh import Mesh
from recipes.classification import ResNet
from recipes.language import LanguageModel
from tests import accelerator
from tests.patience import limit

PAYLOADS: list[Payload] = [Half(), EightBit(), OneBit()]
MODELS = ("ResNet-50", "BERT-base")


@dataclass(frozen=True)
class Size:
    """How much is done."""

    steps: int
    batch: int
    values: int
    small: bool


SMALL = Size(3, 4, 2**14, True)
SIZES = {"cpu": SMALL, accelerator.NAME: SMALL, "cuda": Size(30, 32, 2**24, False)}


class Synthetic(Dataset[Any]):
    """Pictures with labels, or tokens, drawn by number."""

    def __init__(self, model: str, size: Size) -> None:
        self.model, self.size = model, size

    def __len__(self) -> int:
        return self.size.steps * self.size.batch

    def __getitem__(self, index: int) -> Any:
        draws = torch.Generator().manual_seed(index)
        if self.model == "ResNet-50":
            side = 32 if self.size.small else 224
            return torch.randn(3, side, side, generator=draws), torch.randint(10, (), generator=draws)
        tokens = torch.randint(100, (16 if self.size.small else 128,), generator=draws)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def module_of(model: str, size: Size) -> L.LightningModule:
    torch.manual_seed(1)
    if model == "ResNet-50":
        tiny = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"}
        return ResNet({"num_labels": 10, **(tiny if size.small else {})})
    tiny = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return LanguageModel("bert", {"vocab_size": 100, **tiny} if size.small else {})


class Watch(Callback):
    """The losses of a run, and the time of its second half."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.losses: list[float] = []
        self.stamps: dict[int, float] = {}

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))  # which waits for the device
        self.stamps[trainer.global_step] = time.perf_counter()

    @property
    def seconds(self) -> float:
        return self.stamps[self.steps] - self.stamps[self.steps - self.steps // 2]


def train(kind: str, model: str, ranks: int, ddp: bool, shared: bool, directory: Path) -> dict[str, Any]:
    """A model in bf16-mixed on this rank: one of ``ranks`` stages, with a device for each unless it is ``shared``;
    or by itself under DDP."""
    size = SIZES[kind]
    numbers = [0 if shared else rank for rank in range(ranks)]
    devices = [torch.device("cpu") if kind == "cpu" else torch.device(kind, number) for number in numbers]
    strategy: DDPStrategy = (
        DDPStrategy(parallel_devices=devices)
        if ddp
        else SDPipeStrategy(num_stages=ranks, parallel_devices=devices, num_micro_batches=2 if ranks > 1 else 1)
    )
    watch = Watch(size.steps)
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        accelerator=kind,
        devices=ranks if kind == "cpu" else "auto",
        strategy=strategy,
        precision="bf16-mixed",
        max_steps=size.steps,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    trainer.fit(module_of(model, size), DataLoader(Synthetic(model, size), size.batch))
    memory = torch.cuda.max_memory_allocated() if kind == "cuda" else 0
    rate = size.batch * (size.steps // 2) / watch.seconds
    return {"losses": watch.losses, "samples/s": rate, "MiB": memory / 2**20}


def pass_on(rank: int, kind: str) -> float:
    """Rank 0 sends what it has just computed to rank 1, over gloo; GB/s, there and back."""
    device, values = device_of(kind), SIZES[kind].values
    group = dist.new_group([0, 1], backend="gloo", timeout=limit(60))
    peer, start = 1 - rank, time.perf_counter()
    for turn in range(4):
        if turn == 1:  # memory is there, and connections
            start = time.perf_counter()
        expected = torch.arange(values, device=device).mul(turn + 1).float()
        if rank == 0:
            p2p.send([expected.clone()], peer, group, turn, "rank 1").wait()
        received = p2p.receive([torch.empty(values, device=device)], peer, group, turn, "the other rank").wait()
        if rank == 1:
            p2p.send(received, peer, group, turn, "rank 0").wait()
        assert torch.equal(received[0], expected)
    return 3 * 2 * 4 * values / (time.perf_counter() - start) / 1e9


def draw(rank: int, kind: str) -> None:
    """Streams begin again on the device, blocks draw apart, and a checkpoint has the generator's state."""
    device = device_of(kind)
    streams = RandomStreams(device)

    def drawn() -> Tensor:
        return torch.rand(5, device=device)

    streams.begin(1, 2)
    first = drawn()
    seed = streams.current()
    streams.begin(seed, 3, WITHIN)
    inside = drawn()
    streams.begin(seed, 3, AFTER)
    after = drawn()
    streams.begin(1, 2)
    assert torch.equal(drawn(), first)
    streams.begin(streams.current(), 3, AFTER)
    assert torch.equal(drawn(), after), "whoever does not run the block goes on with the same draws"
    assert not torch.equal(first, inside)
    groups = ProcessGroups.open(Mesh.build(1, 1), limit())
    states = random_states.gather(groups, device)
    expected = drawn()
    random_states.restore(states, groups, device)
    assert torch.equal(drawn(), expected)
    if kind == "cuda":
        assert generator_of(device).device.type == device.type


def encode(rank: int, kind: str) -> list[tuple[str, float]]:
    """Messages made on the device are read alike there and on the CPU; Gvalues/s of writing, and of reading."""
    device, count = device_of(kind), SIZES[kind].values
    x = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(device)
    rates = []
    for payload in PAYLOADS:
        into, host = torch.empty_like(x), torch.empty(count)
        message = payload.message(x)
        payload.decode(message, into)
        payload.decode(message.cpu(), host)
        assert torch.equal(into.cpu(), host), payload
        works = {"writes": partial(payload.message, x), "reads": partial(payload.decode, message, into)}
        name = type(payload).__name__
        rates += [(f"{name} {verb}", count / seconds(work, device) / 1e9) for verb, work in works.items()]
    return rates


def seconds(work: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    work()
    settle(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    settle(device)
    return (time.perf_counter() - start) / repeats


def settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def device_of(kind: str) -> torch.device:
    if kind == accelerator.NAME:
        accelerator.register()
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, 0)
