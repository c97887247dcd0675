"""Machines as far as the network is concerned: namespaces with cables between them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_NETWORK = 0x40000000  # CLONE_NEWNET


@dataclass(frozen=True)
class Machine:
    """A namespace, and its end of the (first) cable."""

    name: str
    interface: str
    address: str

    def enter(self) -> None:
        """Moves the calling thread, and what it starts from now on, into the namespace."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", self.name).open() as namespace:
            if libc.setns(namespace.fileno(), _NETWORK):
                raise OSError(ctypes.get_errno(), f"entering {self.name}")


@contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """The first has a cable to each of the others, which cannot reach each other: it does not pass on what is not for
    itself. Skips the test where that cannot be made."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the command ip (package iproute2)")
    names = [f"sdpipe-{os.getpid()}-{number}" for number in range(count)]
    ends = [(f"sd{os.getpid()}a{arm}"[-15:], f"sd{os.getpid()}b{arm}"[-15:]) for arm in range(1, count)]
    found = [Machine(names[0], ends[0][0], "10.231.1.1")]
    try:
        for name in names:
            run("netns", "add", name)
            run("-n", name, "link", "set", "lo", "up")
        for arm, (name, (inner, outer)) in enumerate(zip(names[1:], ends, strict=True), start=1):
            run("link", "add", inner, "type", "veth", "peer", "name", outer)
            for end, owner, number in ((inner, names[0], 1), (outer, name, 2)):
                run("link", "set", end, "netns", owner)
                run("-n", owner, "addr", "add", f"10.231.{arm}.{number}/24", "dev", end)
                run("-n", owner, "link", "set", end, "up")
            run("-n", name, "route", "add", "10.231.0.0/16", "via", f"10.231.{arm}.1")
            found.append(Machine(name, outer, f"10.231.{arm}.2"))
        yield found
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@dataclass(frozen=True)
class Switch:
    """A namespace with a bridge, to which each of ``machines`` has a cable."""

    name: str
    machines: list[Machine]

    def plug(self, machine: Machine, on: bool) -> None:
        """Joins its cable, or pulls it."""
        run("-n", self.name, "link", "set", self._port(machine), "up" if on else "down")

    def part(self, machine: Machine) -> None:
        """From now on it cannot reach any other that this was called for."""
        run("-n", self.name, "link", "set", self._port(machine), "type", "bridge_slave", "isolated", "on")

    def _port(self, machine: Machine) -> str:
        return f"port{self.machines.index(machine)}"


@contextmanager
def switched(count: int) -> Iterator[Switch]:
    """So many machines that reach each other. Skips the test where that cannot be made."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the command ip (package iproute2)")
    switch = f"sdpipe-{os.getpid()}-switch"
    found = [
        Machine(f"sdpipe-{os.getpid()}-{i}", f"sd{os.getpid()}c{i}"[-15:], f"10.233.1.{i + 1}") for i in range(count)
    ]
    try:
        run("netns", "add", switch)
        run("-n", switch, "link", "add", "br0", "type", "bridge")
        run("-n", switch, "link", "set", "br0", "up")
        for number, machine in enumerate(found):
            port = f"port{number}"
            run("netns", "add", machine.name)
            run("-n", machine.name, "link", "set", "lo", "up")
            cable = ("link", "add", machine.interface, "type", "veth", "peer", "name", port, "netns", switch)
            run("-n", machine.name, *cable)
            run("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", machine.interface)
            run("-n", machine.name, "link", "set", machine.interface, "up")
            run("-n", switch, "link", "set", port, "master", "br0")
            run("-n", switch, "link", "set", port, "up")
        yield Switch(switch, found)
    finally:
        for name in (switch, *(machine.name for machine in found)):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def run(*arguments: str, command: str = "ip") -> None:
    """Runs ``ip`` or ``tc``; skips the test if it may not."""
    outcome = subprocess.run([command, *arguments], capture_output=True, text=True, check=False)
    if outcome.returncode:
        pytest.skip(f"{command} {' '.join(arguments)}: {outcome.stderr.strip()}")
