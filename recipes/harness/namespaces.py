"""Emulated hosts: network namespaces joined by a bridge, with cables that can be pulled and links that the kernel slows
down (``tc tbf`` at both ends). This needs root, and ``ip`` and ``tc`` from iproute2.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NETWORK = 0x40000000  # CLONE_NEWNET
INTERFACE = "sdpipe0"
BURST = 131072
"""Bytes that may pass at once: more than the largest packet."""

NEIGHBOURS = Path("/proc/sys/net/ipv4/neigh/default/gc_thresh3")
"""The most neighbours' addresses that the kernel remembers, in all namespaces together."""


class NotAllowed(Exception):
    """This process may not make network namespaces or mount disks; the message says why."""


@contextmanager
def hosts(count: int, rate_mbit: float | None = None) -> Iterator[list[str]]:
    """Make ``count`` hosts and yield their names; :func:`address` gives their addresses. Without a rate, links are not
    slowed down.

    Raises:
        NotAllowed: this process is not root, a command is missing, or the kernel refuses, or its table of neighbours is
            too small.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        raise NotAllowed("network namespaces need root and the commands ip and tc (package iproute2)")
    if count * count > (most := int(NEIGHBOURS.read_text())):
        raise NotAllowed(
            f"{count} hosts need {count * count} neighbours, and the kernel keeps {most}: see {NEIGHBOURS}"
        )
    _remove_what_was_left()
    switch = _switch()
    names = [_name(number) for number in range(count)]
    try:
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        for number, name in enumerate(names):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
            port = f"port{number}"
            run("ip", "-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", switch)
            run("ip", "-n", name, "addr", "add", f"{address(number)}/24", "dev", INTERFACE)
            run("ip", "-n", switch, "link", "set", port, "master", "br0")
            for owner, device in _ends(number):
                run("ip", "-n", owner, "link", "set", device, "up")
            if rate_mbit is not None:
                slow_down(number, rate_mbit)
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def plug(number: int, on: bool) -> None:
    """Plug in or pull the cable of one of the :func:`hosts` that this process made."""
    run("ip", "-n", _switch(), "link", "set", f"port{number}", "up" if on else "down")


def part(number: int) -> None:
    """Cut this host off from all other hosts for which this function was called."""
    run("ip", "-n", _switch(), "link", "set", f"port{number}", "type", "bridge_slave", "isolated", "on")


def slow_down(number: int, rate_mbit: float, burst: int = BURST) -> None:
    """Limit the rate of this host's cable in both directions; ``burst`` bytes may pass at once."""
    for owner, device in _ends(number):
        bucket = ("tbf", "rate", f"{rate_mbit}mbit", "burst", str(burst), "latency", "10s")
        run("ip", "netns", "exec", owner, "tc", "qdisc", "add", "dev", device, "root", *bucket)


def enter(name: str) -> None:
    """Move the calling thread, and whatever it starts from now on, into a namespace."""
    with Path("/run/netns", name).open() as namespace:
        _enter(namespace.fileno(), name)


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Move the calling thread into a namespace within the context."""
    with Path("/proc/thread-self/ns/net").open() as before:
        enter(name)
        try:
            yield
        finally:
            _enter(before.fileno(), "the namespace of before")


def address(number: int) -> str:
    return f"10.232.1.{number + 1}"


def _remove_what_was_left() -> None:
    """Remove the namespaces of processes that were killed within :func:`hosts`, and kill what runs in them."""
    for namespace in Path("/run/netns").glob("sd[hs]*"):
        if (made := re.match(r"sd(?:h|sw)(\d+)", namespace.name)) and not Path("/proc", made[1]).exists():
            left = subprocess.run(["ip", "netns", "pids", namespace.name], capture_output=True, text=True, check=False)
            for process in left.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", namespace.name], capture_output=True, check=False)


def _enter(namespace: int, name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _NETWORK):
        raise OSError(ctypes.get_errno(), f"entering {name}")


def _ends(number: int) -> list[tuple[str, str]]:
    """Return the namespace and the device of each end of this host's cable."""
    return [(_name(number), INTERFACE), (_switch(), f"port{number}")]


def _name(number: int) -> str:
    return f"sdh{os.getpid()}-{number}"


def _switch() -> str:
    return f"sdsw{os.getpid()}"


def run(*command: str) -> None:
    """Run a command.

    Raises:
        NotAllowed: it fails, with what it says.
    """
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode:
        raise NotAllowed(f"{' '.join(command)}: {outcome.stderr.strip()}")
