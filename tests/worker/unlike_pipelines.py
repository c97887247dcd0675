"""Pipelines of 1, 2 and 3 stages in real processes, and what one process makes of the same batches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from lightning_sdpipe import PHDPSGD, AllReduce, EightBit, Exchange, SDPipeStrategy, SemiDecentralized
from lightning_sdpipe.loop.joint import JointBatchSource
from lightning_sdpipe.topology.groups import device_name
from lightning_sdpipe.topology.placement_file import Placement, write_placement
from recipes.harness.processes import be_rank
from tests.features.running import quiet_trainer
from tests.policies.by_script import Scripted

DEPTHS, CUTS = [1, 2, 3], [[6], [4, 2], [1, 3, 2]]
PLACED = ((5, 1, 3), (4, 0), (2,))
BATCH, BATCHES = 4, 4  # of one pipeline, in an epoch
WIDTH = 8


class Tied(L.LightningModule):
    """Six blocks: the weight of the last is that of the first, a scale lies outside of all, and one is frozen later."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        first, last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        last.weight = first.weight
        self.blocks = nn.ModuleList([first, *(_Block(dropout) for _ in range(4)), last])
        self.register_buffer("count", torch.zeros(1))
        self.losses: list[float] = []
        self.begun_with: dict[str, Tensor] = {}
        self.ended_with: dict[str, Tensor] = {}
        self.sizes: list[int] = []
        self.seen: list[Any] = []
        """After each batch of SDPipe's: its first value, and what several stages hold."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x * self.scale

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.count += len(x)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def on_train_start(self) -> None:
        self.begun_with = self.held()

    def on_train_epoch_start(self) -> None:
        self.blocks[2].requires_grad_(self.current_epoch == 0)

    def on_train_batch_end(self, outputs: Any, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.sizes.append(len(batch[0]))
        shared = {"scale": self.scale, "weight": self.blocks[0].weight}
        self.seen.append(
            (float(batch[1][0, 0]), {name: p.detach().clone() for name, p in shared.items() if not p.is_meta})
        )

    def on_train_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def on_train_end(self) -> None:
        self.ended_with = self.held()

    def held(self) -> dict[str, Tensor]:
        """What this worker has: parameters and buffers, and the moments of the optimizer."""
        values = {name: value.clone() for name, value in self.state_dict().items() if not value.is_meta}
        state = self.trainer.optimizers[0].state
        for name, parameter in self.named_parameters():
            values |= {f"{name}: {key}": value.clone() for key, value in state.get(parameter, {}).items()}
        return values

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


class _Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.norm(self.linear(x))))


def loader(pipelines: int) -> DataLoader[Any]:
    """A batch of one process holds those of three pipelines: Lightning's sampler deals samples out in turn."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(BATCHES * BATCH * 3, WIDTH, generator=generator)
    data = TensorDataset(x, x.roll(1, 1))
    if pipelines > 1:
        return DataLoader(data, BATCH, shuffle=True)
    return DataLoader(data, BATCH * 3, sampler=DistributedSampler(data, num_replicas=1, rank=0))


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """So many samples, others for each number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.count)
        for x in torch.randn(self.count, WIDTH, generator=generator):
            yield x, x.roll(1)


def trainer(directory: Path, strategy: Any = "auto", **options: Any) -> L.Trainer:
    own = {"devices": int(os.environ.get("WORLD_SIZE", 1)), "gradient_clip_val": 0.5}
    return quiet_trainer(strategy=strategy, default_root_dir=directory, **{**own, **options})


def go_on(file: Path, strategy: Any = "auto") -> dict[str, Tensor]:
    """What a worker begins with that goes on from ``file``."""
    module = Tied()
    trainer(file.parent, strategy, max_epochs=3, limit_train_batches=1).fit(module, loader(3), ckpt_path=file)
    return module.begun_with


SCRIPT = Scripted((((0, 1), (2,)), ((0,), (1, 2)), ((0, 1, 2),), ((0, 2), (1,)), ((0,), (1,), (2,))))


def semi_decentralized(directory: Path) -> dict[str, Any]:
    """What a worker of six has seen of SDPipe: groups as in a script, and then the real policy, batches dealt by speed,
    and means of 8 bits that arrive during the next step."""
    strategy = SDPipeStrategy(DEPTHS, SCRIPT, partition=CUTS, num_micro_batches=2, data="sharded", log_dir=directory)
    module, run = Tied(dropout=0.3), trainer(directory, strategy)
    run.fit(module, loader(3))
    seen = {"held": module.ended_with, "seen": module.seen, "seed": strategy._origin.data_seed}
    seen["groups"] = (strategy.statistics.groups, strategy.statistics.members)
    exchange = Exchange(EightBit(block=8), overlap="step")
    strategy = SDPipeStrategy(DEPTHS, SemiDecentralized(), partition=CUTS, exchange=exchange)
    module = Tied()
    trainer(directory, strategy).fit(module, loader(3))
    return {**seen, "dealt": module.ended_with, "dealt_batches": module.seen}


def train(directory: Path) -> dict[str, Any]:
    """What a worker of six has seen of training, and of going on from checkpoints of other meshes."""
    strategy = SDPipeStrategy(DEPTHS, AllReduce(), partition=CUTS, num_micro_batches=2)
    module, run = Tied(), trainer(directory, strategy)
    run.fit(module, loader(3), loader(3))
    unlike, alike = directory / "unlike.ckpt", directory / "alike.ckpt"
    run.save_checkpoint(unlike)
    seen = {
        "held": module.ended_with,
        "losses": module.losses,
        "val_loss": float(run.callback_metrics["val_loss"]),
        "bytes": strategy.statistics.bytes_sent,
        "predicted": run.predict(module, DataLoader(loader(3).dataset, BATCH)),
        "alike": go_on(unlike, SDPipeStrategy(2, AllReduce())),
    }
    module = Tied()
    run = trainer(directory, SDPipeStrategy(3, AllReduce()))
    run.fit(module, loader(3))
    run.save_checkpoint(alike)
    placed = SDPipeStrategy([3, 2, 1], AllReduce(), partition="placed", placement=a_placement(directory))
    seen |= {"unlike": go_on(alike, placed), "placed": placed.mesh.ranks}
    return {**seen, "by_speed": by_speed(directory)}


def by_speed(directory: Path) -> tuple[dict[str, Tensor], list[float], list[int]]:
    """What a worker has in the end, its losses, and the samples of each of its batches, where the pipelines divide
    a batch by speeds that are said to change."""
    said = cycle([[9.0, 1.0, 4.0], [1.0, 3.0, 1.0], [4.0, 1.0, 9.0]])
    with mock.patch.object(JointBatchSource, "_measured", side_effect=said):
        strategy = SDPipeStrategy(DEPTHS, AllReduce(), partition=CUTS, num_micro_batches=4, batch_by_speed=True)
        module = Tied()
        trainer(directory, strategy).fit(module, loader(3))
    return module.ended_with, module.losses, module.sizes


def a_placement(directory: Path) -> Path:
    """For the devices of this machine; each process writes its own file."""
    path = directory / f"{os.getpid()}.json"
    rows = tuple(tuple(map(device_name, row)) for row in PLACED)
    write_placement(path, Placement("a test", {}, False, ((2, 2, 2), (5, 1), (6,)), rows))
    return path


def on_a_machine(rank: int, port: int, directory: Path) -> tuple[dict[str, Tensor], list[float]]:
    """What one of three processes has in the end that torchrun has started on two machines, one on the first. The
    pipelines, of one stage and of two, do not end at the same batch."""
    run = _on_a_machine(rank, port, directory, [1, 2], AllReduce())
    module = Tied()
    run.fit(module, DataLoader(Stream((8, 20)[rank > 0]), BATCH))
    return module.ended_with, module.losses


def groups_of_machines(rank: int, port: int, directory: Path) -> tuple[Any, int]:
    """The groups that one of these processes has by its host, of three pipelines of one stage; and the step at which it
    ends."""
    run = _on_a_machine(rank, port, directory, [1, 1, 1], PHDPSGD(within="models"))
    run.fit(Tied(), DataLoader(Stream(12), BATCH))
    policy: Any = run.strategy._run.options.method.policy  # type: ignore[attr-defined]
    return policy.groups, run.global_step


def _on_a_machine(rank: int, port: int, directory: Path, depths: list[int], sync: Any) -> L.Trainer:
    local, machine, count = ((0, 0, 1), (0, 1, 2), (1, 1, 2))[rank]
    place = {"LOCAL_RANK": local, "GROUP_RANK": machine, "LOCAL_WORLD_SIZE": count, "SDPIPE_HOST": f"machine-{machine}"}
    be_rank(rank, 3, port, **place)
    return trainer(directory, SDPipeStrategy(depths, sync), devices=count, num_nodes=2)
