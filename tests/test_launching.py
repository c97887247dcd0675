"""Processes that torchrun, SLURM or two machines start. The places of all ranks are what they print."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ["-m", "tests.scripts.launched"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def places(commands: list[list[str]], environments: list[dict[str, str]] | None = None) -> list[dict[str, Any]]:
    """What the ranks of all ``commands``, run at the same time, printed, by rank."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=inherited | {"OMP_NUM_THREADS": "1"} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, environment in zip(commands, environments or [{}] * len(commands), strict=True)
    ]
    try:
        printed = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(printed)
    decoder = json.JSONDecoder()  # ranks may print on one line
    parts = [part for output in printed for part in output.split("PLACE ")[1:]]
    return sorted((decoder.raw_decode(part)[0] for part in parts), key=lambda place: place["rank"])


def check(found: list[dict[str, Any]], host: str = "127.0.0.1") -> None:
    assert [place["rank"] for place in found] == [0, 1, 2, 3]
    assert [place["worker"] for place in found] == [[1, 0], [0, 0], [1, 1], [0, 1]]  # stage, pipeline
    assert all(place["world"] == 4 and place["steps"] == 4 and place["children"] == 0 for place in found)
    (address,) = {place["scheduler"] for place in found}
    assert address.startswith(f"tcp://{host}:")


@pytest.mark.distributed
def test_torchrun_starts_all_processes() -> None:
    check(places([[*TORCHRUN, "--standalone", "--nproc-per-node", "4", *SCRIPT, "1", "4"]]))


def node(rank: int, address: str, port: int) -> list[str]:
    where = ["--master-addr", address, "--master-port", str(port)]
    return [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(rank), *where, *SCRIPT, "2", "2"]


@pytest.mark.distributed
def test_two_nodes_of_torchrun_on_loopback() -> None:
    port = free_port()
    check(places([node(rank, "127.0.0.1", port) for rank in range(2)]))


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces with the addresses 10.231.7.1 and 10.231.7.2, joined by a cable."""
    ip = shutil.which("ip")
    if ip is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the command ip (package iproute2)")
    names = [f"sdpipe-{os.getpid()}-{number}" for number in (1, 2)]
    cable = [f"sd{os.getpid()}a"[-15:], f"sd{os.getpid()}b"[-15:]]

    def run(*arguments: str) -> None:
        outcome = subprocess.run([ip, *arguments], capture_output=True, text=True, check=False)
        if outcome.returncode:
            pytest.skip(f"ip {' '.join(arguments)}: {outcome.stderr.strip()}")

    try:
        for name in names:
            run("netns", "add", name)
        run("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for number, (name, end) in enumerate(zip(names, cable, strict=True), start=1):
            run("link", "set", end, "netns", name)
            run("-n", name, "addr", "add", f"10.231.7.{number}/24", "dev", end)
            run("-n", name, "link", "set", end, "up")
            run("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run([ip, "netns", "del", name], capture_output=True, check=False)


@pytest.mark.distributed
def test_two_machines(namespaces: list[str]) -> None:
    """Gloo looks its address up by the host name, which both namespaces share: it is told the interface."""
    commands = [["ip", "netns", "exec", name, *node(n, "10.231.7.1", 29555)] for n, name in enumerate(namespaces)]
    interfaces = [{"GLOO_SOCKET_IFNAME": f"sd{os.getpid()}{end}"[-15:]} for end in "ab"]
    check(places(commands, interfaces), host="10.231.7.1")


@pytest.mark.distributed
def test_slurm_starts_all_processes() -> None:
    job = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    tasks = [job | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(4)]
    check(places([[sys.executable, *SCRIPT, "1", "4"]] * 4, tasks))
