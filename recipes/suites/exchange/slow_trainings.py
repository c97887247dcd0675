"""Whole trainings over links that are really slow, with each worker in its own network namespace: ``Trainer.fit`` as a
user calls it, beside Lightning's DDP with and without torch's own hooks.

Compute is *emulated*, in blocks of equal size, so that a backward can hide an exchange; parameters are matrices, since
PowerSGD compresses nothing else. The rest is real.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from recipes.harness.namespaces import INTERFACE, NotAllowed, address, enter, hosts
from recipes.harness.processes import be_rank, in_processes
from recipes.suites.emulated import EmulatedChain, passes
from recipes.suites.grid import Ratios, Row, chosen, in_turn, ratios, refuse_unknown, versus
from recipes.suites.probe import Probe
from recipes.suites.trainings import make_trainer, quiet, random_features

WORKERS = 4
PORT, SECONDS = 29632, 400.0
STRAGGLER = Static((2.2, 1.0, 1.0, 1.0))


class SlowCase(NamedTuple):
    """A training over links of ``rate`` Mbit/s. It counts whole rounds of ``every`` steps."""

    strategy: Callable[[], DDPStrategy]
    rate: float = 100
    every: int = 1


class _Hooked(DDPStrategy):
    """DDP with communication hooks on the CPU, too: Lightning silently registers them only on GPUs."""

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        if self._ddp_comm_hook is not None:
            self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)


def _ddp(**options: Any) -> DDPStrategy:
    return _Hooked(process_group_backend="gloo", **options)


def _power_sgd() -> DDPStrategy:
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    return _ddp(ddp_comm_state=state, ddp_comm_hook=powerSGD_hook)


def _ours(sync: Any, payload: Any = None, overlap: Any = "none", **options: Any) -> Callable[[], DDPStrategy]:
    exchange = sdp.Exchange(payload or sdp.Full(), overlap)
    return lambda: sdp.SDPipeStrategy(1, sync, exchange=exchange, data="sharded", **options)


_GROUPS = sdp.SemiDecentralized(window=float("inf"))
_PAIRS = sdp.ADPSGD(asynchronous=True)

CASES: Mapping[str, SlowCase] = {
    "lightning_ddp": SlowCase(_ddp),
    "ddp_fp16": SlowCase(partial(_ddp, ddp_comm_hook=fp16_compress_hook)),
    "ddp_power_sgd": SlowCase(_power_sgd),
    "all_reduce": SlowCase(_ours(sdp.AllReduce())),
    "all_reduce/half": SlowCase(_ours(sdp.AllReduce(), sdp.Half())),  # as Horovod sends
    "all_reduce/eight_bit": SlowCase(_ours(sdp.AllReduce(), sdp.EightBit())),
    "all_reduce/one_bit": SlowCase(_ours(sdp.AllReduce(), sdp.OneBit())),
    "server": SlowCase(_ours(ParameterServer())),  # in one of the workers
    "groups/eight_bit": SlowCase(_ours(_GROUPS, sdp.EightBit())),
    "groups/eight_bit/step": SlowCase(_ours(_GROUPS, sdp.EightBit(), "step")),
    "adpsgd_async": SlowCase(_ours(_PAIRS)),
    "adpsgd_async/eight_bit": SlowCase(_ours(_PAIRS, sdp.EightBit())),
    "one_bit/straggler2.2": SlowCase(_ours(sdp.AllReduce(), sdp.OneBit(), delays=STRAGGLER)),
    "free/straggler2.2": SlowCase(_ours(sdp.LocalSGD(every=1), overlap="free", delays=STRAGGLER)),
    "all_reduce/50mbit": SlowCase(_ours(sdp.AllReduce()), 50),
    "diloco/50mbit": SlowCase(_ours(sdp.DiLoCo(every=32)), 50, 32),
}
OURS = ("all_reduce/eight_bit", "all_reduce/one_bit", "groups/eight_bit", "groups/eight_bit/step")
"""Our cases, of which the fastest is compared with DDP's hooks."""
COMPARED: Mapping[str, tuple[str, str, float | None]] = {
    "all_reduce/lightning_ddp/100mbit": ("all_reduce", "lightning_ddp", 0.97),
    "ablation/overlap": ("groups/eight_bit/step", "groups/eight_bit", 1.6),
    "empty_cell/adpsgd_async/100mbit": ("adpsgd_async/eight_bit", "adpsgd_async", 3.0),
    "free/one_bit/straggler2.2": ("free/straggler2.2", "one_bit/straggler2.2", 1.9),
    "diloco/full/h32": ("diloco/50mbit", "all_reduce/50mbit", 10.0),
    "best/ddp_fp16": ("best", "ddp_fp16", 1.9),
    "best/ddp_power_sgd": ("best", "ddp_power_sgd", None),
}


class _Matrices(EmulatedChain):
    """An emulated chain whose parameters are square matrices."""

    def __init__(self, blocks: int, compute_seconds: float, parameters: int) -> None:
        super().__init__(blocks, *passes(compute_seconds / blocks))
        side = round((parameters / blocks) ** 0.5)
        for block in self.blocks:
            block.weight = nn.Parameter(torch.zeros(side, side))


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
    """Return the samples per second of all workers together in each case, and the ratios of cases that are compared.

    Args:
        compared: names of cases; None for all.
        blocks: number of the model's blocks, equally large.
        parameters: number of the model's parameters, float32.
        compute_seconds: emulated seconds of a step at full speed.
        steps: number of steps that count, rounded up to whole rounds.
        warm_up: number of steps before them, at least 1, rounded likewise.
        repeats: trainings of each case.
        seed: seed of the batches.

    Returns:
        Rows and ratios; none, after printing why, if namespaces cannot be made.

    Raises:
        ConfigurationError: ``compared`` names an unknown case, or ``steps`` or ``warm_up`` is below 1.
    """
    refuse_unknown("a case of suite.slow_trainings.compared", compared or (), CASES)
    names = list(CASES) if compared is None else list(compared)
    if min(steps, warm_up) < 1:
        raise ConfigurationError(f"suite.slow_trainings has {steps=} and {warm_up=}; both must be at least 1.")
    quiet()
    rows: list[Row] = []
    for repeat, name in in_turn(names, repeats):
        case, shape = CASES[name], (blocks, compute_seconds, parameters)
        counted, before = (-(-count // case.every) * case.every for count in (steps, warm_up))
        arguments = (name, shape, counted, before, seed + repeat)
        try:
            with hosts(WORKERS, case.rate) as machines:
                seen = in_processes(WORKERS, _train, machines, *arguments, timeout=SECONDS)
        except NotAllowed as reason:
            print(f"No slow links: {reason}", file=sys.stderr)
            return [], {}
        speed, sent = sum(rate for rate, _ in seen), statistics.mean(sent for _, sent in seen)
        print(f"slow trainings, {name}, repeat {repeat}: {speed:.2f} samples/s", flush=True)
        row = {"what": name, "emulated": True, "link_mbit": case.rate, "repeat": repeat}
        rows.append({**row, "samples_per_s": speed, "bytes_per_step": sent})
    return rows, _ratios(rows)


def _ratios(rows: Sequence[Row]) -> Ratios:
    speeds = {name: [row["samples_per_s"] for row in chosen(rows, what=name)] for name in OURS}
    best = max((name for name in OURS if speeds[name]), key=lambda name: statistics.median(speeds[name]), default="")
    goals = {}
    for key, (one, other, value) in COMPARED.items():
        what = best if one == "best" else one
        meaning = f"samples/s of {what} over {other}, emulated compute" + ("; our fastest" if one == "best" else "")
        goals[key] = versus(meaning, "samples_per_s", what, other, value)
    of = "bytes_per_step", "all_reduce/50mbit", "diloco/50mbit", 32.0
    goals["bytes/diloco/full/h32"] = versus("bytes sent in a step, all-reduce over DiLoCo", *of)
    return ratios(rows, goals)


def _train(
    rank: int, machines: Sequence[str], name: str, shape: tuple[int, float, int], steps: int, warm_up: int, seed: int
) -> tuple[float, float]:
    """Return the samples per second, and the bytes sent in a step, of one worker on its own host."""
    enter(machines[rank])
    place = {"LOCAL_RANK": 0, "GROUP_RANK": rank, "LOCAL_WORLD_SIZE": 1, "SDPIPE_HOST": machines[rank]}
    own = {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": 1}  # else Lightning gives this host all cores
    be_rank(rank, WORKERS, PORT, MASTER_ADDR=address(0), **place, **own)
    torch.manual_seed(seed)
    module, batches = _Matrices(*shape), random_features((warm_up + steps) * WORKERS, 1)
    with tempfile.TemporaryDirectory() as directory:
        probe = Probe(Path(directory))
        options = {"num_nodes": WORKERS, "limit_train_batches": warm_up + steps, "default_root_dir": Path(directory)}
        make_trainer(CASES[name].strategy(), 1, probe, **options).fit(module, batches)
    used = probe.report.used(warm_up)
    return steps / used.clock, used.sent / steps
