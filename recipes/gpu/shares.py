"""Makes devices of different speeds out of one: the rows of ``--only shares``.

Each of four processes gets a share of the device, either by CUDA MPS, which gives a process a part of the
multiprocessors, or by pauses, which make all steps so long that the processes never compete for the device, and a
slower process's steps longer still. The rows say which. If the machine has GPUs of different models, each has its own
speed.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy

from lightning_sdpipe import AllReduce, NoSync
from lightning_sdpipe.heterogeneity.speed import name_of
from recipes.gpu.checks import free_bytes, resnet50
from recipes.gpu.models import Kind, batch_of
from recipes.gpu.rows import Row, Values
from recipes.gpu.running import Machine, Trial, Watch, ddp, fit, loader, on_ranks, ours, sgd, trainer_of

RANKS = 4
PATTERNS = {"1, 1, 1, ½": (1.0, 1.0, 1.0, 0.5), "1, 1, ½, ¼": (1.0, 1.0, 0.5, 0.25)}
METHODS: dict[str, Callable[[Machine], Strategy]] = {
    "alone": lambda machine: ours(machine, RANKS, 1, sync=NoSync()),
    "DDP": lambda machine: ddp(machine, RANKS),
    "all-reduce": lambda machine: ours(machine, RANKS, 1, sync=AllReduce()),
    "SDPipe": lambda machine: ours(machine, RANKS, 1),
}
EPOCH_SECONDS = 15.0
"""Length of the timed epoch if no process waited for another."""
_IDLE = 1.25
"""With pauses, ratio of a full-speed process's step to the device's time for one step of every process."""
_MPS, _STARTS = "nvidia-cuda-mps-control", 15.0  # seconds


@dataclass(frozen=True)
class Shares:
    """How each process gets its share: environment variables, and seconds of pause before each of its steps, chosen for
    steps of ``length`` seconds."""

    how: str
    own: Sequence[Mapping[str, str]]
    pauses: Sequence[float]
    length: float | None = None


@contextmanager
def shares(machine: Machine, kind: Kind, parts: Sequence[float], length: float | None = None) -> Iterator[Shares]:
    """Give each process its part of a device within the context. For pauses, ``length`` is the seconds of a step on a
    whole device, if known: trainings that are compared need the same."""
    nothing: list[dict[str, str]] = [{} for _ in parts]
    if machine.device != "cpu" and len(set(on_ranks(1, _names, machine)[0])) > 1:
        yield Shares("unlike devices", nothing, [0.0] * len(parts))
        return
    with mps(machine) as environment:
        if environment is None:
            whole = on_ranks(1, _step_seconds, machine, kind)[0] if length is None else length
            step = whole * max(1, len(parts) / max(1, machine.count)) * _IDLE
            yield Shares("pauses", nothing, [step / part - whole for part in parts], whole)
        else:
            each = 100 / max(1, len(parts) / machine.count)
            percent = [str(max(1, round(each * part))) for part in parts]
            own = [{**environment, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": number} for number in percent]
            yield Shares(f"MPS, {', '.join(percent)} %", own, [0.0] * len(parts))


def _names(rank: int, machine: Machine) -> list[str]:
    return [name_of(device) for device in machine.devices(machine.count)]


def _step_seconds(rank: int, machine: Machine, kind: Kind) -> float:
    found = fit(machine, ours(machine, 1, 1), 1, Trial(kind.net(), sgd), kind, 8, "bf16-mixed")
    return float(found["ms"]) / 1e3


@contextmanager
def mps(machine: Machine) -> Iterator[dict[str, str] | None]:
    """Run a separate CUDA MPS daemon, and yield the environment variables of its clients; None if MPS is missing or
    does not work, which the first row tries for all."""
    tried = machine.folder / "mps"
    served = tried.read_text() == "serves" if tried.exists() else None
    if machine.device != "cuda" or shutil.which(_MPS) is None or served is False:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:  # a short path, since a socket's is limited
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        starts = _told(environment, "-d")
        try:
            if served is None:
                served = starts and _is_served(machine, environment)
                tried.write_text("serves" if served else "does not serve")
            yield environment if starts and served else None
        finally:
            if starts:
                _told(environment, said="quit\n")


def _told(environment: Mapping[str, str], *arguments: str, said: str = "") -> bool:
    """Call MPS's control program, and return whether it obeyed in time."""
    call = [_MPS, *arguments]
    with suppress(subprocess.TimeoutExpired):
        own = {**os.environ, **environment}
        return subprocess.run(call, env=own, input=said, text=True, check=False, timeout=_STARTS).returncode == 0
    return False


def _is_served(machine: Machine, environment: Mapping[str, str]) -> bool:
    try:
        halves = [{**environment, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percent} for percent in ("25", "100")]
        slow, fast = (on_ranks(1, _product_seconds, machine, own=[own], limit=_STARTS)[0] for own in halves)
    except (RuntimeError, TimeoutError):
        return False
    return bool(slow > 2 * fast)


def _product_seconds(rank: int, machine: Machine) -> float:
    square, starts = torch.rand(4096, 4096, device=machine.devices(1)[0]), []
    for repeats in (1, 5):  # the first does not count
        starts.append(time.monotonic())
        for _ in range(repeats):
            torch.mm(square, square)
        machine.settle()
    return (time.monotonic() - starts[-1]) / repeats


def epochs(method: str, pattern: str, machine: Machine) -> Values:
    """Time an epoch of ResNet-50 with a method, after a first one in which no speed is known; also return ratios to
    methods timed before."""
    kind = resnet50(machine)
    if machine.device == "cuda":
        memory = on_ranks(1, free_bytes, machine)[0]
        kind = replace(kind, batch=batch_of(replace(kind, batch=128), memory, 0.8 * machine.count / RANKS))
    file = machine.folder / f"shares-{'-'.join(map(str, PATTERNS[pattern]))}.json"
    known: Values = json.loads(file.read_text()) if file.exists() else {}
    with shares(machine, kind, PATTERNS[pattern], known.get("length")) as given:
        batches = known.get("batches", 8 if machine.dry else 24)
        ranks = on_ranks(RANKS, _epochs, machine, method, kind, batches, given.pauses, own=given.own)
    length = _length(ranks)
    values = {"by": given.how, "s per epoch": length, "batches": batches}
    if method == "alone":  # it also tells how many batches fit
        rate = sum(1e3 / rank["ms"] for rank in ranks)
        values = {"by": given.how, "batches/s of each": [1e3 / rank["ms"] for rank in ranks]}
        known = {
            "batches": batches if machine.dry else max(24, RANKS * round(rate * EPOCH_SECONDS / RANKS)),
            "rate": rate,
        }
    else:
        known[method] = length
    file.write_text(json.dumps(known))
    if method == "SDPipe":
        values |= {f"{name} over it": known[name] / length for name in ("DDP", "all-reduce") if name in known}
        if "rate" in known:
            values["of the bound"] = batches / length / known["rate"]
    return values


def _length(ranks: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean seconds of all epochs except the first, each from the first rank's beginning to the last one's
    end."""
    epochs = zip(*(rank["epochs"] for rank in ranks), strict=True)
    spans = [(min(begin for begin, _ in epoch), max(end for _, end in epoch)) for epoch in epochs]
    return float(statistics.mean(end - begin for begin, end in spans[1:]))


def _epochs(
    rank: int, machine: Machine, method: str, kind: Kind, batches: int, pauses: Sequence[float]
) -> dict[str, Any]:
    watch = Watch(machine, batches // RANKS)
    trainer = trainer_of(machine, METHODS[method](machine), RANKS, "bf16-mixed", max_epochs=2, callbacks=[watch])
    trainer.fit(Trial(kind.net(), sgd, pauses[rank]), loader(kind.samples(batches), kind.batch))
    return watch.found()


ROWS = tuple(
    Row(f"four processes with {pattern} of a device each: {method}", partial(epochs, method, pattern), 75)
    for pattern in PATTERNS
    for method in METHODS
)
