"""``sdpipe measure``: measures the links between all workers of a job, their speed and their memory.

    torchrun --nproc-per-node=4 --no-python sdpipe measure -o network.json --model my_package.models:factory

Each pair of workers connects separately over gloo, so that a pair that cannot connect is named and the others go on. No
host takes part in two pairs at the same time; afterwards all pairs of two hosts send at once, which shows whether they
share a network card.

Each worker also measures the speed and the memory of its device.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_sdpipe.command_line import Parser, check_writable
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity.speed import matrix_product, sample
from lightning_sdpipe.partition import rehearsal
from lightning_sdpipe.partition.factory import build, step_of
from lightning_sdpipe.partition.plan import Profile, plan, with_crossing
from lightning_sdpipe.partition.profile import profile
from lightning_sdpipe.partition.rehearsal_result import RehearsalResult
from lightning_sdpipe.placement.job_store import JobStore
from lightning_sdpipe.placement.links import Link, Pair, Wire, bandwidth, combine, latency, schedule, summary, together
from lightning_sdpipe.placement.model import Block, Model
from lightning_sdpipe.placement.network import Device, Network, write_network
from lightning_sdpipe.topology.groups import device_name, this_host

MAYBE: Any = Link | None

SAMPLES, INTERVAL = 5, 0.1
"""Number of samples of a matrix product, if there is no model to measure with, and seconds for each."""


class DeviceProfile(msgspec.Struct, frozen=True):
    """Profile of one worker's device: ``seconds`` for the model, or for one floating-point operation if there is none,
    and the model's name and measured blocks."""

    host: str
    index: int
    seconds: float
    memory_bytes: int | None
    blocks: list[Block]
    name: str


def abilities(host: str, index: int, local_size: int, model: str | None, names: Sequence[str] | None) -> DeviceProfile:
    """Measure this process's device: the accelerator of its local rank, or the CPU.

    Args:
        host: name of the host.
        index: the local rank.
        local_size: number of workers on the host.
        model: ``IMPORT.PATH:NAME`` of a function that returns a LightningModule and a mini-batch of one pipeline.
        names: names of its blocks; None to find them.

    Raises:
        ConfigurationError: the model cannot be measured.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu")
    if accelerator is not None:
        device = torch.device(accelerator.type, index % torch.accelerator.device_count())
    memory = _memory(device, local_size)
    if model is None:
        kernel, operations = matrix_product(device)
        rate = median(sample(kernel, SAMPLES, INTERVAL, 1.0))
        return DeviceProfile(host, index, 1.0 / (rate * operations), memory, [], "")
    name, blocks = measured_blocks(model, names, device)
    return DeviceProfile(host, index, sum(block.seconds for block in blocks), memory, blocks, name)


def relative(found: Sequence[DeviceProfile]) -> tuple[list[float], Model | None]:
    """Return the ratio of each worker's speed to the fastest one's, and the model as the fastest measured it."""
    fastest = min(found, key=lambda worker: worker.seconds)
    speeds = [fastest.seconds / worker.seconds for worker in found]
    return speeds, Model(fastest.name, tuple(fastest.blocks)) if fastest.blocks else None


def _memory(device: torch.device, local_size: int) -> int | None:
    """Return the bytes of the device's free memory, or this worker's share of the host's; None if unknown."""
    tells = getattr(torch.get_device_module(device), "mem_get_info", None)  # an accelerator with its own memory
    if tells is not None:
        free, _ = tells(device)
        return int(free)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return available[0] // local_size if available else None


def main(arguments: Sequence[str]) -> None:
    """Measure, and write the file on rank 0."""
    options = _parser().parse_args(arguments)
    meeting = JobStore.join(options.patience)
    _check_writable(meeting, options.output)
    network, links = measure(meeting, options.model, options.blocks, options.pair_timeout)
    if meeting.rank == 0:
        write_network(options.output, network)
    meeting.leave()
    if meeting.rank == 0:
        print(summary(network, links, options.output), flush=True)


def _parser() -> Parser:
    parser = Parser(
        "measure", "Measures the links between all workers of a job, and their devices. Started by torchrun or srun."
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("network.json"), help="file that rank 0 writes, for `sdpipe place`"
    )
    parser.add_argument(
        "--model",
        metavar="IMPORT.PATH:NAME",
        help="a function without arguments that returns your LightningModule and a mini-batch of one pipeline; its "
        "blocks are timed on every device, for `sdpipe place`",
    )
    parser.add_argument(
        "--blocks", nargs="+", metavar="PATH", help="paths of the model's blocks; * stands for one part of a path"
    )
    parser.add_argument(
        "--pair-timeout", type=_positive, default=20.0, metavar="SECONDS", help="for two workers to connect"
    )
    parser.add_argument(
        "--patience", type=_positive, default=300.0, metavar="SECONDS", help="to wait for another worker"
    )
    return parser


def _positive(text: str) -> float:
    seconds = float(text)
    if not (math.isfinite(seconds) and seconds > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds


def measure(
    meeting: JobStore, model: str | None, blocks: Sequence[str] | None, pair_timeout: float
) -> tuple[Network, list[Link]]:
    """Return the network, on every rank, and the link of every pair.

    Args:
        meeting: the store that this process shares with the others.
        model: see :func:`~lightning_sdpipe.placement.measure.abilities`.
        blocks: names of its blocks; None to find them.
        pair_timeout: seconds that two workers have to connect, and for each transfer.

    Raises:
        ConfigurationError: two machines have the same name, or the model cannot be measured.
        WorkerFailedError: another worker did not come in time, or gave up.
    """
    names = meeting.share("names", device_name(meeting.local_rank), str)
    _refuse_twins(names)
    hosts = [name.rpartition(":")[0] for name in names]
    try:
        mine = abilities(this_host(), meeting.local_rank, hosts.count(hosts[meeting.rank]), model, blocks)
    except Exception as error:
        meeting.give_up("abilities", f"{type(error).__name__}: {error}")
        raise
    found = meeting.share("abilities", mine, DeviceProfile)
    speeds, measured = relative(found)
    devices = tuple(
        Device(worker.host, worker.index, speed, worker.memory_bytes)
        for worker, speed in zip(found, speeds, strict=True)
    )
    links = _measured(meeting, schedule(hosts), pair_timeout, "round")
    failed = {link.ranks for link in links if link.error}
    busy = _measured(meeting, together(hosts, failed), pair_timeout, "contended round")
    return combine(devices, links, busy, measured), links


def _check_writable(meeting: JobStore, file: Path) -> None:
    """Refuse a file that rank 0 cannot write, before anything is measured."""
    if meeting.rank == 0:
        try:
            check_writable(file)
        except ConfigurationError as error:
            meeting.give_up("names", str(error))
            raise


def _refuse_twins(names: Sequence[str]) -> None:
    twins = [name for name, count in Counter(names).items() if count > 1]
    if twins:
        ranks = [rank for rank, name in enumerate(names) if name == twins[0]]
        raise ConfigurationError(
            f"The host of {twins[0]} appears twice: ranks {ranks} say that they are this device. Two machines have the "
            "same name; set SDPIPE_HOST to another one on one of them, and keep it when you train."
        )


def _measured(meeting: JobStore, rounds: Sequence[Sequence[Pair]], timeout: float, name: str) -> list[Link]:
    """Return the links that the leading rank of each pair found, and the errors of ranks that could not connect."""
    links: list[Link] = []
    for number, pairs in enumerate(rounds):
        own = next((_link(meeting, pair, timeout, name) for pair in pairs if meeting.rank in pair), None)
        links += [link for link in meeting.share(f"{name} {number}", own, MAYBE) if link is not None]
        if meeting.rank == 0 and sys.stderr.isatty():
            print(f"\r{name} {number + 1} of {len(rounds)}", end="\r", file=sys.stderr, flush=True)
    return links


def _link(meeting: JobStore, pair: Pair, timeout: float, name: str) -> Link | None:
    """Return the link that this rank found if it leads the pair or could not connect, else None. Contended rounds
    measure only one direction."""
    leads = meeting.rank == pair[0]
    try:
        wire = Wire(meeting.store, f"{name}, pair {pair}", leads, timedelta(seconds=timeout))
        if name == "round":
            found = Link(pair, latency(wire, leads), bandwidth(wire, leads, True), bandwidth(wire, leads, False))
        else:
            found = Link(pair, outward=bandwidth(wire, leads, True))
    except RuntimeError as error:
        return Link(pair, error=str(error).splitlines()[0])
    return found if leads else None


def measured_blocks(model: str, names: Sequence[str] | None, device: torch.device) -> tuple[str, list[Block]]:
    """Return the name of the model's class, and the measured blocks on ``device``.

    Args:
        model: ``IMPORT.PATH:NAME`` of a function that returns a LightningModule and a mini-batch of one pipeline.
        names: names of its blocks; None to find them.
        device: where they run.

    Raises:
        ConfigurationError: the function returns something else, or the model cannot be cut.
    """
    module, batch = build(model)
    step = step_of(model, module, batch)
    module.to(device)
    batch = tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, batch)
    profiles: list[Profile] = []
    rehearsals: list[RehearsalResult] = []

    def measure(blocks: Sequence[tuple[str, ...]]) -> Profile:
        profiles.append(profile(module, blocks, lambda: step(batch, 0), device))
        return profiles[-1]

    def rehearse(chain: Sequence[str]) -> RehearsalResult:
        calls = rehearsal.StepCalls("training_step", [(batch, (0,))] * 2, trains=True)
        rehearsals.append(rehearsal.rehearse(module, chain, [calls], device, watch_in=None))
        return rehearsals[-1]

    blocks = plan(module, 2, "balanced", names, measure, rehearse).blocks
    return type(module).__name__, [
        Block(
            seconds=block.forward_seconds + block.backward_seconds,
            parameter_bytes=block.parameter_bytes,
            activation_bytes=block.activation_bytes,
            gradient_bytes=block.gradient_bytes,
            trained_bytes=block.trained_bytes,
            saved_bytes=block.saved_bytes,
        )
        for block in with_crossing(profiles[-1], blocks, rehearsals[-1])
    ]
