"""``sdpipe env``: versions and devices, for a bug report."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lightning_sdpipe import __version__
from lightning_sdpipe.command_line import Parser
from lightning_sdpipe.tested import verdict


def main(arguments: Sequence[str]) -> None:
    """Print versions and devices."""
    Parser("env", "Prints versions and devices, for a bug report.").parse_args(arguments)
    python = platform.python_version()
    _row("python", f"{python}, {verdict('python', python)}; {platform.platform()}, {os.cpu_count()} processors")
    _row("lightning-sdpipe", __version__ + _commit())
    for package in ("torch", "lightning", "numpy", "pyzmq", "msgspec", "networkx"):
        try:
            found = version(package)
            _row(package, ", ".join(filter(None, (found, verdict(package, found)))))
        except PackageNotFoundError:
            _row(package, "not installed")
    import torch

    from lightning_sdpipe.heterogeneity.speed import devices

    if torch.version.cuda is not None:
        nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()  # type: ignore[no-untyped-call]
        _row("CUDA", f"{torch.version.cuda} of torch, NCCL {'.'.join(map(str, nccl)) or 'missing'}")
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        _row("driver", driver.read_text().partition("\n")[0])
    for device, name in devices() or [("devices", "no accelerator that torch can use")]:
        _row(device, name)


def _row(name: str, value: str) -> None:
    print(f"{name:18}{value}")


def _commit() -> str:
    """Return the commit of a checkout, in words; empty for an installed package."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return ""
    try:
        described = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
        done = subprocess.run(described, capture_output=True, text=True)
    except OSError:  # there is no git
        return ", a checkout"
    return f", commit {done.stdout.strip()}" if done.returncode == 0 else ", a checkout"
