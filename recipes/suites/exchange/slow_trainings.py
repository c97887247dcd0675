"""Whole trainings on links that are really slow, each worker on a host of its own as far as the network is concerned:
``Trainer.fit`` as a user calls it, beside Lightning's DDP with and without torch's own hooks.

Compute is *emulated*, in blocks of equal size, so that a backward has something to hide an exchange behind; parameters
are matrices, since PowerSGD compresses nothing else. The rest is real.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import lightning_sdpipe as sdp
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity import Static
from recipes.baselines import ParameterServer
from recipes.suites import trainings
from recipes.suites.emulated import EmulatedChain, passes
from recipes.suites.namespaces import INTERFACE, NotAllowed, address, enter, hosts
from recipes.suites.processes import in_processes
from recipes.suites.ratios import Ratios, Row, ratio, rotated

WORKERS = 4
PORT = 29632
SECONDS = 400.0
STRAGGLER = Static((2.2, 1.0, 1.0, 1.0))


@dataclass(frozen=True)
class Case:
    """A training over links of so many Mbit/s. One of the workers may be a straggler; a training counts whole rounds
    of ``every`` steps."""

    strategy: Callable[[], DDPStrategy]
    rate: float = 100
    every: int = 1


class _Hooked(DDPStrategy):
    """Lightning registers hooks on GPUs only, without a word elsewhere; gloo can carry these out, too."""

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        if self._ddp_comm_hook is not None:
            self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)


def _ddp(**options: Any) -> DDPStrategy:
    return _Hooked(process_group_backend="gloo", **options)


def _power_sgd() -> DDPStrategy:
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    return _ddp(ddp_comm_state=state, ddp_comm_hook=powerSGD_hook)


def _ours(sync: Any, exchange: sdp.Exchange | None = None, **options: Any) -> Callable[[], DDPStrategy]:
    return lambda: sdp.SDPipeStrategy(1, sync, exchange=exchange, data="sharded", **options)


_GROUPS = sdp.SemiDecentralized(window=float("inf"))
_PAIRS = sdp.ADPSGD(asynchronous=True)

CASES: Mapping[str, Case] = {
    "lightning_ddp": Case(_ddp),
    "ddp_fp16": Case(partial(_ddp, ddp_comm_hook=fp16_compress_hook)),
    "ddp_power_sgd": Case(_power_sgd),
    "all_reduce": Case(_ours(sdp.AllReduce())),
    "all_reduce/half": Case(_ours(sdp.AllReduce(), sdp.Exchange(sdp.Half()))),  # as Horovod sends
    "all_reduce/eight_bit": Case(_ours(sdp.AllReduce(), sdp.Exchange(sdp.EightBit()))),
    "all_reduce/one_bit": Case(_ours(sdp.AllReduce(), sdp.Exchange(sdp.OneBit()))),
    "server": Case(_ours(ParameterServer())),  # in one of the workers
    "groups/eight_bit": Case(_ours(_GROUPS, sdp.Exchange(sdp.EightBit()))),
    "groups/eight_bit/step": Case(_ours(_GROUPS, sdp.Exchange(sdp.EightBit(), "step"))),
    "adpsgd_async": Case(_ours(_PAIRS)),
    "adpsgd_async/eight_bit": Case(_ours(_PAIRS, sdp.Exchange(sdp.EightBit()))),
    "one_bit/straggler2.2": Case(_ours(sdp.AllReduce(), sdp.Exchange(sdp.OneBit()), delays=STRAGGLER)),
    "free/straggler2.2": Case(_ours(sdp.LocalSGD(every=1), sdp.Exchange(overlap="free"), delays=STRAGGLER)),
    "all_reduce/50mbit": Case(_ours(sdp.AllReduce()), 50),
    "diloco/50mbit": Case(_ours(sdp.DiLoCo(every=32)), 50, 32),
}
OURS = ("all_reduce/eight_bit", "all_reduce/one_bit", "groups/eight_bit", "groups/eight_bit/step")
"""Of which the fastest is compared with DDP's hooks."""
COMPARED: Mapping[str, tuple[str, str, float | None]] = {
    "all_reduce/lightning_ddp/100mbit": ("all_reduce", "lightning_ddp", 0.97),
    "ablation/overlap": ("groups/eight_bit/step", "groups/eight_bit", 1.6),
    "empty_cell/adpsgd_async/100mbit": ("adpsgd_async/eight_bit", "adpsgd_async", 3.0),
    "free/one_bit/straggler2.2": ("free/straggler2.2", "one_bit/straggler2.2", 1.9),
    "diloco/full/h32": ("diloco/50mbit", "all_reduce/50mbit", 10.0),
}
BEST = {"best/ddp_fp16": ("ddp_fp16", 1.9), "best/ddp_power_sgd": ("ddp_power_sgd", None)}
DILOCO_BYTES = 32.0


class _Matrices(EmulatedChain):
    """Its parameters are square."""

    def __init__(self, blocks: int, compute_seconds: float, parameters: int) -> None:
        super().__init__(blocks, *passes(compute_seconds / blocks))
        side = round((parameters / blocks) ** 0.5)
        for block in self.blocks:
            block.weight = nn.Parameter(torch.zeros(side, side))


class _Clock(L.Callback):
    """Reads the time and the bytes sent after each step from the end of the warm-up on."""

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self.readings: list[tuple[float, int]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 >= self._warm_up:
            strategy = trainer.strategy
            sent = strategy.statistics.bytes_sent if isinstance(strategy, sdp.SDPipeStrategy) else 0
            self.readings.append((time.perf_counter(), sent))


def measure(
    *,
    compared: Sequence[str] | None,
    blocks: int,
    parameters: int,
    compute_seconds: float,
    steps: int,
    warm_up: int,
    repeats: int,
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Samples per second of all workers together, of each case, and what is compared.

    Args:
        compared: names of cases; None for all.
        blocks: of the model, equally large.
        parameters: of the model, float32.
        compute_seconds: of a step at full speed, emulated.
        steps: that count, in whole rounds of the methods that have rounds.
        warm_up: steps before them, likewise; at least 1.
        repeats: trainings of each.
        seed: of the batches.

    Returns:
        Nothing, with a word about why, where namespaces cannot be made.

    Raises:
        ConfigurationError: a case that there is not, or nothing to warm up with, or nothing to count.
    """
    names = list(CASES) if compared is None else list(compared)
    if unknown := [name for name in names if name not in CASES]:
        raise ConfigurationError(f"suite.slow_trainings.compared names {unknown[0]!r}; there are {', '.join(CASES)}.")
    if min(steps, warm_up) < 1:
        raise ConfigurationError(f"suite.slow_trainings has {steps=} and {warm_up=}; both must be at least 1.")
    trainings.quiet()
    rows: list[Row] = []
    for repeat in range(repeats):
        for name in rotated(names, repeat):
            case, shape = CASES[name], (blocks, compute_seconds, parameters)
            counted, before = (-(-count // case.every) * case.every for count in (steps, warm_up))
            try:
                with hosts(WORKERS, case.rate) as machines:
                    seen = in_processes(
                        WORKERS, _train, machines, name, shape, counted, before, seed + repeat, timeout=SECONDS
                    )
            except NotAllowed as reason:
                print(f"No slow links: {reason}", file=sys.stderr)
                return [], {}
            speed = sum(rate for rate, _ in seen)
            print(f"slow trainings, {name}, repeat {repeat}: {speed:.2f} samples/s", flush=True)
            row = {"what": f"{name}, emulated compute", "link_mbit": case.rate, "repeat": repeat}
            rows.append({**row, "samples_per_s": speed, "bytes_per_step": statistics.mean(sent for _, sent in seen)})
    return rows, _ratios(names, rows)


def _ratios(names: Sequence[str], rows: Sequence[Row]) -> Ratios:
    def column(name: str, what: str) -> list[float]:
        own = [row for row in rows if row["what"] == f"{name}, emulated compute"]
        return [row[what] for row in sorted(own, key=lambda row: int(row["repeat"]))]

    def over(one: str, other: str, what: str = "samples_per_s") -> list[float]:
        return [a / b for a, b in zip(column(one, what), column(other, what), strict=True)]

    found: Ratios = {}
    for key, (one, other, goal) in COMPARED.items():
        if {one, other} <= set(names):
            found[key] = ratio(over(one, other), goal, f"samples/s of {one} over {other}, emulated compute")
    ours = [name for name in OURS if name in names]
    best = max(ours, key=lambda name: statistics.median(column(name, "samples_per_s")), default="")
    for key, (other, goal) in BEST.items():
        if best and other in names:
            found[key] = ratio(over(best, other), goal, f"samples/s of {best}, our fastest, over {other}")
    if {"diloco/50mbit", "all_reduce/50mbit"} <= set(names):
        values = over("all_reduce/50mbit", "diloco/50mbit", "bytes_per_step")
        found["bytes/diloco/full/h32"] = ratio(values, DILOCO_BYTES, "bytes sent in a step, all-reduce over DiLoCo")
    return found


def _train(
    rank: int, machines: Sequence[str], name: str, shape: tuple[int, float, int], steps: int, warm_up: int, seed: int
) -> tuple[float, float]:
    """Samples per second, and bytes sent in a step, of one worker, which has a host of its own."""
    enter(machines[rank])
    place = {"RANK": rank, "LOCAL_RANK": 0, "GROUP_RANK": rank, "WORLD_SIZE": WORKERS, "LOCAL_WORLD_SIZE": 1}
    own = {"MASTER_ADDR": address(0), "MASTER_PORT": PORT, "TORCHELASTIC_RUN_ID": "slow", "SDPIPE_HOST": machines[rank]}
    own |= {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": 1}  # or Lightning gives this host all of the cores
    os.environ.update({key: str(value) for key, value in {**place, **own}.items()})
    torch.manual_seed(seed)
    clock = _Clock(warm_up)
    module, batches = _Matrices(*shape), trainings.random_features((warm_up + steps) * WORKERS, 1)
    with tempfile.TemporaryDirectory() as directory:
        options = {"num_nodes": WORKERS, "limit_train_batches": warm_up + steps, "default_root_dir": Path(directory)}
        trainings.fit(module, [batches], CASES[name].strategy(), 1, clock, **options)
    (start, before), *_, (end, after) = clock.readings
    return steps / (end - start), (after - before) / steps
