"""Comparison of emulated links with links that the kernel slows down: one sender, one receiver, the same messages.

The kernel's are the loopback device of a network namespace of its own behind a token bucket (``tc tbf``), which needs
root and iproute2; without them there is no row, and a word about why.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from lightning_sdpipe import p2p
from lightning_sdpipe.placement.network import Device, Network
from recipes.suites.emulated_links import emulated_links
from recipes.suites.processes import run_processes
from recipes.suites.ratios import Row

BURST = 131072  # bytes that the bucket lets pass at once: more than the largest packet of the loopback device


def measure(*, rate: float, message: int, messages: int, repeats: int) -> list[Row]:
    """Seconds that messages take, one after the other, over either kind of link.

    Args:
        rate: bytes per second.
        message: bytes.
        messages: of one timing.
        repeats: timings.
    """
    emulated = timed(rate, message, messages, repeats)
    arguments = json.dumps({"rate": None, "message": message, "messages": messages, "repeats": repeats})
    bucket = f"tbf rate {round(8 * rate)}bit burst {BURST} latency 10s"
    here = shlex.join([sys.executable, "-m", "recipes.suites.placement.shaped_links", arguments])
    script = f"ip link set lo up && tc qdisc add dev lo root {bucket} && exec {here}"
    try:
        done = subprocess.run(["unshare", "-n", "sh", "-c", script], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
        print(f"No link of the kernel's to compare emulated ones with: {reason}", file=sys.stderr)
        return []
    shaped = json.loads(done.stdout.splitlines()[-1])
    return [
        {
            "what": "a message, bytes / rate",
            "repeat": repeat,
            "expected_s": message / rate,
            "emulated_s": ours,
            "kernel_s": theirs,
        }
        for repeat, (ours, theirs) in enumerate(zip(emulated, shaped, strict=True))
    ]


def timed(rate: float | None, message: int, messages: int, repeats: int) -> list[float]:
    """Seconds of a message, in each timing; over emulated links of this rate, or over the links that there are."""
    links: Any = contextlib.nullcontext()
    if rate is not None:
        pair = (Device("emulated", 0, 1.0), Device("emulated", 1, 1.0))
        links = emulated_links(Network(pair, [[0.0] * 2] * 2, [[rate] * 2] * 2))
    with links:
        return run_processes(2, _converse, message, messages, repeats)[1]


def _converse(rank: int, message: int, messages: int, repeats: int) -> list[float]:
    group = dist.group.WORLD
    assert group is not None
    payload, token, seconds = torch.zeros(message, dtype=torch.uint8), torch.zeros(1), []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for _ in range(messages):
            if rank == 0:
                p2p.send([payload], 1, group, 0, "the receiver").wait()
                p2p.receive([token], 1, group, 1, "the receiver").wait()
            else:
                p2p.receive([payload], 0, group, 0, "the sender").wait()
                p2p.send([token], 0, group, 1, "the sender").wait()
        seconds.append((time.perf_counter() - start) / messages)
    return seconds[1:]  # of the first, the bucket was full


if __name__ == "__main__":
    print(json.dumps(timed(**json.loads(sys.argv[1]))))
