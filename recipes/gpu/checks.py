"""Checks whether training works on this device, and what it costs: the rows of ``--only checks``, the most telling
first."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_sdpipe import AllReduce, EightBit, Exchange, Half, LocalSGD, OneBit, SemiDecentralized
from lightning_sdpipe.exchange.payloads import Payload
from lightning_sdpipe.heterogeneity.speed import name_of
from recipes.baselines.pipelining import language_step
from recipes.gpu import elastic
from recipes.gpu.models import TINY_BERT, TINY_RESNET, Kind
from recipes.gpu.rows import NotPossible, Row, Values
from recipes.gpu.running import Machine, Precision, Trial, Watch, adamw, fit, loader, on_ranks, ours, sgd, trainer_of
from recipes.harness.processes import TRANSFER_TIMEOUT
from recipes.suites.machine import versions

SMALL = Kind(True, TINY_BERT, 16, 8)
"""For rows that compare values: it has no dropout, whose draws differ between devices."""
DRAWS = replace(SMALL, sizes={**TINY_BERT, "dropout": 0.1})
"""For rows that compare values on one device, where draws depend neither on the cut nor on a resume."""
CODED: tuple[Payload, ...] = (Half(), EightBit(), OneBit())
WITHIN, CODED_WITHIN = 1e-3, 0.05
"""Largest relative differences of losses, from the order of sums alone, and if a payload also rounds values."""
CONTEXT_MIB = 100.0
"""A process that opens a GPU takes several times this much of its memory."""
OVERHEAD, LARGEST_STAGE = "overhead of 1 × 1", "largest of 4 stages over one process"
UNSEEN = "MiB that others took while stages were planned"


def resnet50(machine: Machine) -> Kind:
    """Return ResNet-50 on pictures of 224²."""
    return Kind(False, TINY_RESNET, 32, 4) if machine.dry else Kind(False, {}, 224, 64)


def bert_base(machine: Machine) -> Kind:
    """Return BERT-base on texts of 128 words."""
    return SMALL if machine.dry else Kind(True, {}, 128, 32)


def steps_of(machine: Machine) -> int:
    """Return the number of steps of a timed training."""
    return 4 if machine.dry else 40


def same(found: Sequence[float], expected: Sequence[float], within: float = WITHIN) -> float:
    """Return the largest relative difference of two lists of losses.

    Raises:
        AssertionError: it is above ``within``, or the lists differ in length.
    """
    assert len(found) == len(expected) > 0, f"{len(found)} losses, and {len(expected)} were expected"
    largest = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(found, expected, strict=True))
    assert largest <= within, f"losses differ by {largest:.2g}, more than {within:g}: {found}, not {expected}"
    return largest


def train(
    rank: int,
    machine: Machine,
    kind: Kind,
    ranks: int,
    stages: int,
    options: dict[str, Any],
    steps: int,
    precision: Precision = "32-true",
    optimizer: Callable[[Any], Any] = adamw,
) -> dict[str, Any]:
    """Train on this rank with our strategy or, if ``stages`` is 0, with Lightning's own."""
    strategy = ours(machine, ranks, stages, **options) if stages else "auto"
    return fit(machine, strategy, ranks, Trial(kind.net(), optimizer), kind, steps, precision)


# -------------------------------------------------------------------- does it work


def of_first(count: int, work: Callable[[int, Machine], Values], machine: Machine) -> Values:
    """Run ``work`` on ``count`` ranks, and return what it returns on the first."""
    return dict(on_ranks(count, work, machine)[0])


def about(rank: int, machine: Machine) -> Values:
    """Report versions and devices, and multiply two matrices."""
    values: Values = {**versions(), "system": platform.platform(), "processors": os.cpu_count()}
    if machine.device != "cpu":
        values["devices"] = [name_of(device) for device in machine.devices(machine.count)]
    if machine.device == "cuda":
        values["GiB"] = [torch.cuda.mem_get_info(index)[1] / 2**30 for index in range(machine.count)]
        values |= {"CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version()}  # type: ignore[no-untyped-call]
        if dist.is_nccl_available():
            values["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        asked = ["nvidia-smi", "--query-gpu=driver_version,compute_mode", "--format=csv,noheader"]
        if shutil.which(asked[0]):
            said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
            values["driver, mode"] = "; ".join(said.split("\n")[:-1])
    square = torch.rand(256, 256)
    there = square.to(machine.devices(1)[0])
    torch.testing.assert_close((there @ there).cpu(), square @ square, rtol=1e-2, atol=1e-2)
    return values


def nccl(machine: Machine) -> Values:
    """Compare two stages, on a device each, with one process."""
    if machine.device != "cuda" or machine.count < 2:
        raise NotPossible("NCCL wants a GPU for each process; stages on one GPU use gloo")
    return two_stages(machine)


def two_stages(machine: Machine) -> Values:
    """Compare two stages with one process; on one device, their messages go through host memory."""
    (one,) = on_ranks(1, train, machine, DRAWS, 1, 1, {"num_micro_batches": 2}, 6)
    two = on_ranks(2, train, machine, DRAWS, 2, 2, {"num_micro_batches": 2}, 6)
    assert two[0]["losses"] == two[1]["losses"], "the stages were told different losses"
    return {"losses differ by": same(two[0]["losses"], one["losses"])}


def replicas(rank: int, machine: Machine) -> Values:
    """Compare two pipelines that exchange gradients or models with the same pipelines on the CPU."""
    cases: dict[str, tuple[dict[str, Any], float]] = {
        "all-reduce": ({"sync": AllReduce()}, WITHIN),
        "models, every 2 steps": ({"sync": LocalSGD(every=2)}, WITHIN),
        "models beside a step": ({"sync": LocalSGD(every=2), "exchange": Exchange(overlap="step")}, WITHIN),
        **{type(p).__name__: ({"sync": AllReduce(), "exchange": Exchange(p)}, CODED_WITHIN) for p in CODED},
    }
    values: Values = {}
    on_cpu = replace(machine, device="cpu", accelerator=None)
    for name, (options, within) in cases.items():
        found, expected = (train(rank, place, SMALL, 2, 1, options, 6)["losses"] for place in (machine, on_cpu))
        values[name] = same(found, expected, within)
    strategy = ours(machine, 2, 1, sync=SemiDecentralized())
    fit(machine, strategy, 2, Trial(SMALL.net(), adamw), SMALL, 6)
    assert strategy.statistics.groups > 0, "no models were averaged"
    return {**values, "groups of SDPipe": strategy.statistics.groups}


def rehearsal(machine: Machine) -> Values:
    """Plan stages, and see whether another process opens the device in the meantime."""
    return {UNSEEN: max(on_ranks(2, _rehearsal, machine))}


def _rehearsal(rank: int, machine: Machine) -> float:
    device = machine.devices(2)[rank]
    warm = torch.rand(512, 512, device=device).square_()
    machine.settle()
    (machine.folder / f"warm-{rank}").touch()  # from here on, this process takes only what the tiny model needs
    while not all((machine.folder / f"warm-{other}").exists() for other in range(2)):
        time.sleep(0.01)
    free, over = [free_bytes(rank, machine)], threading.Event()

    class Planned(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            over.set()

    def look() -> None:
        while not over.wait(0.002):
            free.append(free_bytes(rank, machine))

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    trainer = trainer_of(machine, ours(machine, 2, 2), 2, max_steps=2, callbacks=[Planned()])
    trainer.fit(Trial(SMALL.net(), adamw), loader(SMALL.samples(2), SMALL.batch))
    looking.join()
    del warm
    return (free[0] - min(free)) / 2**20


def free_bytes(rank: int, machine: Machine) -> int:
    """Return the free bytes of a rank's GPU; 0 for another device."""
    return torch.cuda.mem_get_info(machine.devices(rank + 1)[rank])[0] if machine.device == "cuda" else 0


def fused(rank: int, machine: Machine) -> Values:
    """Correct the variance of a fused AdamW, and compare it with one that is not fused."""
    options = {"sync": LocalSGD(every=2), "variance_correction": True}
    makes = [partial(torch.optim.AdamW, lr=1e-3, fused=fused) for fused in (True, False)]
    found = [train(rank, machine, SMALL, 2, 1, options, 6, optimizer=make)["losses"] for make in makes]
    return {"losses differ by": same(*found)}


def checkpoint(machine: Machine) -> Values:
    """Save two stages separately, and continue in one process as they do."""
    whole = on_ranks(2, _checkpointed, machine, 2, None)[0]
    (resumed,) = on_ranks(1, _checkpointed, machine, 1, str(machine.folder / "parts.ckpt"))
    return {"losses differ by": same(resumed, whole[-len(resumed) :])}


def _checkpointed(rank: int, machine: Machine, stages: int, path: str | None) -> list[float]:
    """Return the losses of eight steps, or of those after the checkpoint ``path``; save one after the fifth step."""
    watch, saves = Watch(machine, 8), ModelCheckpoint(machine.folder, "parts", every_n_train_steps=5)
    strategy = ours(machine, stages, stages, num_micro_batches=2, save_distributed_checkpoint=True)
    options: dict[str, Any] = {"max_steps": 8, "callbacks": [watch, saves], "enable_checkpointing": True}
    trainer = trainer_of(machine, strategy, stages, **options)
    trainer.fit(Trial(DRAWS.net(), adamw), loader(DRAWS.samples(8), DRAWS.batch), ckpt_path=path)
    return list(watch.found()["losses"])


# -------------------------------------------------------------- what does it cost


def resnet(machine: Machine) -> Values:
    """Time ResNet-50 in bf16-mixed: Lightning's plain run, ours in one process, and two stages."""
    kind, steps = resnet50(machine), steps_of(machine)
    (plain,), (one,), two = (
        on_ranks(max(1, stages), train, machine, kind, max(1, stages), stages, {}, steps, "bf16-mixed", sgd)
        for stages in (0, 1, 2)
    )
    assert abs(one["losses"][0] / plain["losses"][0] - 1) < CODED_WITHIN, (one["losses"], plain["losses"])
    named = {"plain": [plain], "1 × 1": [one], "2 × 1": two}
    return {**_costs(named), OVERHEAD: one["ms"] / plain["ms"] - 1}


def bert(machine: Machine) -> Values:
    """Time BERT-base in bf16-mixed: ours in one process and in two and four stages, and torch's own pipeline."""
    kind, steps, found = bert_base(machine), steps_of(machine), {}
    micro_batches = {1: 1, 2: 4, 4: 8}
    for stages, parts in micro_batches.items():
        options = {"num_micro_batches": parts}
        found[f"{stages} × 1"] = on_ranks(stages, train, machine, kind, stages, stages, options, steps, "bf16-mixed")
    values = _costs(found)
    if machine.device == "cuda":
        largest = max(each["MiB"] for each in found["4 × 1"])
        values[LARGEST_STAGE] = largest / found["1 × 1"][0]["MiB"]
    for stages in (2, 4):
        if machine.device == "cpu" or machine.count >= stages:
            bare = on_ranks(stages, _bare, machine, kind, stages, micro_batches[stages], steps)
            values[f"torch's own {stages} × 1, ms"] = max(bare)
        else:
            values[f"torch's own {stages} × 1"] = f"not possible: it needs {stages} devices"
    return values


def _costs(found: dict[str, list[dict[str, Any]]]) -> Values:
    values: Values = {f"{name}, ms": ranks[0]["ms"] for name, ranks in found.items()}
    memory = {f"{name}, MiB": [rank["MiB"] for rank in ranks] for name, ranks in found.items()}
    return {**values, **{name: each for name, each in memory.items() if any(each)}}


def _bare(rank: int, machine: Machine, kind: Kind, stages: int, parts: int, steps: int) -> float:
    """Return the milliseconds of a step with ``torch.distributed.pipelining``, with equally many layers on each stage
    and no tied weights."""
    device = machine.devices(stages)[rank]
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl", timeout=TRANSFER_TIMEOUT)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    layers = list(replace(kind, sizes={**kind.sizes, "tied": False}).net())  # type: ignore[call-overload]
    cuts = [round(len(layers) * number / stages) for number in range(stages + 1)]
    part = nn.Sequential(*layers[cuts[rank] : cuts[rank + 1]]).to(device)
    train_step, start = language_step(part, device, parts, adamw(part.parameters())), 0.0
    tokens = kind.samples(1).pool[0][: kind.batch].to(device)
    for step in range(steps):
        if step == steps - steps // 2:
            machine.settle()
            start = time.monotonic()
        with torch.autocast(device.type, torch.bfloat16):
            train_step({"input_ids": tokens, "labels": tokens})
    machine.settle()
    return 1e3 * (time.monotonic() - start) / (steps // 2)


ROWS = (
    Row("the machine", partial(of_first, 1, about), 30),
    Row("two stages on one device beside one process", lambda machine: two_stages(replace(machine, count=1)), 45),
    Row("two pipelines beside the same on the CPU", partial(of_first, 2, replicas), 90),
    Row("no process but the ranks opens the device", rehearsal, 40, {UNSEEN: CONTEXT_MIB}),
    Row("stages over NCCL", nccl, 45),
    Row("ResNet-50, bf16-mixed", resnet, 75, {OVERHEAD: 0.03}),
    Row("BERT-base, bf16-mixed", bert, 90, {LARGEST_STAGE: 0.30}),
    Row("a pipeline is killed, and comes back", elastic.killed, 90),
    Row("a checkpoint in parts, on another mesh", checkpoint, 45),
    Row("variance correction of a fused AdamW", partial(of_first, 2, fused), 45),
)
