"""Trains every method under both kinds of schedule and prints what came out, as JSON: a process of its own, since the
libraries read at their first use that their results shall not depend on the processor.

``python -m tests.golden.train DIRECTORY``
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.scheduler.log.event_log import read_log
from lightning_sdpipe.sync import (
    ADPSGD,
    PHDPSGD,
    AllReduce,
    Decentralized,
    DiLoCo,
    LocalSGD,
    NoSync,
    PartialReduce,
    SemiDecentralized,
)
from lightning_sdpipe.worker import scheduler_connection
from tests.features.running import on_four_ranks, pipelines, train_before_forks
from tests.large_pages import fork_in_large_pages
from tests.scheduler.forked import forked_schedulers

UPDATES = 12  # an epoch and the first two of another
STAGES = 2

METHODS: dict[str, Any] = {
    "all_reduce": AllReduce(),
    "semi_decentralized": SemiDecentralized(window=math.inf),
    "partial_reduce": PartialReduce(group_size=2),
    "ad_psgd": ADPSGD(),
    "local_sgd": LocalSGD(every=3),
    "diloco": DiLoCo(every=4, lr=0.7, momentum=0.9, fragments=2, delay=1),
    "ring": Decentralized("ring"),
    "phd_gradients": PHDPSGD(group_size=2),
    "phd_meetings": PHDPSGD(groups=((0,), (1,))),
    "phd_models": PHDPSGD(group_size=2, within="models"),
    "no_sync": NoSync(),
}
"""What decides by number or by an unlimited window. ``phd_meetings`` has one pipeline in each group."""
SCHEDULES = ("1f1b", "pipedream")
CASES: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"all_reduce": SCHEDULES, "semi_decentralized": ("1f1b",), "diloco": SCHEDULES},
    2: {
        **dict.fromkeys(METHODS, ("1f1b",)),
        **dict.fromkeys(("all_reduce", "semi_decentralized", "local_sgd", "diloco", "ring", "no_sync"), SCHEDULES),
    },
}
"""By the number of pipelines. Of methods that come to the same bits with two, one is tried without a flush as well; and
where there is nothing to decide, one of each kind."""


class Model(L.LightningModule):
    """Draws dropout on both stages, and noise in the step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(
            nn.Linear(6, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Dropout(0.2),
            nn.Linear(16, 1),
        )  # fmt: skip
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x + 0.01 * torch.randn_like(x)), y)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if math.isfinite(float(outputs["loss"])):  # without a flush, one stage of a pipeline knows
            self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def train(name: str, schedule: Any, directory: Path) -> dict[str, Any]:
    """The losses that this rank saw, and digests of what it holds at the end."""
    L.seed_everything(7, verbose=False)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(160, 6, generator=generator)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    module = Model()
    quiet = {"max_steps": UPDATES, "max_epochs": -1, "gradient_clip_val": None if schedule == "pipedream" else 1.0}
    strategy = SDPipeStrategy(
        num_stages=STAGES, sync=METHODS[name], schedule=schedule, data="sharded", log_dir=directory,
        num_micro_batches=None if schedule == "pipedream" else 4, gather_module=False, partition="uniform",
    )  # fmt: skip
    trainer = pipelines(directory, strategy, enable_checkpointing=False, **quiet)
    trainer.fit(module, loader)
    assert trainer.global_step == UPDATES
    digest = hashlib.sha256()
    for key, value in sorted(module.state_dict().items()):
        if not value.is_meta:
            digest.update(key.encode() + value.contiguous().numpy().tobytes())
    return {"losses": module.losses, "digest": digest.hexdigest()[:16]}


def decisions(directory: Path) -> list[str]:
    """What the scheduler decided, without times: the groups of each stage in their order, equal ones counted."""
    path = directory / "scheduler.jsonl"
    if not path.exists():
        return []
    groups = sorted(
        (group for record in read_log(path) for entry in record.entries for group in entry.decisions),
        key=lambda group: (group.members[0].stage, group.sequence),  # stages are decided for in any order
    )
    words = [f"stage {g.members[0].stage}: {[m.pipeline for m in g.members]} {list(g.weights)}" for g in groups]
    return [f"{len(list(equal))} x {word}" for word, equal in groupby(words)]


def train_all(directory: Path, cases: list[tuple[str, str]]) -> dict[str, Any]:
    """What every case comes to on this rank."""
    return {f"{name}/{schedule}": train(name, schedule, directory / name / schedule) for name, schedule in cases}


def main(directory: Path) -> None:
    """Print an object with an entry for each number of pipelines, which has one for each case."""
    outcomes = {}
    train_before_forks(directory)
    with forked_schedulers() as kind, mock.patch.object(scheduler_connection, "SchedulerProcess", kind):
        for count, methods in CASES.items():
            cases = [(name, schedule) for name, schedules in methods.items() for schedule in schedules]
            place = directory / str(count)
            fork_in_large_pages()
            ranks = on_four_ranks(train_all, place, cases, count=STAGES * count)
            outcomes[count] = {
                case: {"ranks": [rank[case] for rank in ranks], "groups": decisions(place / case)} for case in ranks[0]
            }
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
