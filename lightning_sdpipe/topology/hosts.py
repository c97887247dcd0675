"""Names of hosts and of the devices on them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable

import torch
import torch.distributed as dist

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.topology.groups import ProcessGroups

HOST_VARIABLE = "SDPIPE_HOST"
LONGEST_NAME = 255


def this_host() -> str:
    """Return the name of this machine, or the value of ``SDPIPE_HOST``.

    Raises:
        ConfigurationError: the name is too long to be sent.
    """
    name = os.environ.get(HOST_VARIABLE) or socket.gethostname()
    if len(name.encode()) > LONGEST_NAME:
        raise ConfigurationError(f"The host name {name!r} is too long; set {HOST_VARIABLE} to one of up to 255 bytes.")
    return name


def device_name(local_rank: int) -> str:
    """Return ``host:index`` of this process's device."""
    return f"{this_host()}:{local_rank}"


def roll_call(local_rank: int, device: torch.device) -> list[str]:
    """Return ``host:index`` of every rank; all ranks must call it.

    Args:
        local_rank: that of this process, among those of its host.
        device: a device whose tensors the default group can send.
    """
    return _gathered(device_name(local_rank), LONGEST_NAME + 1 + 10, device, None)


def hosts_of_replicas(groups: ProcessGroups, device: torch.device) -> list[str]:
    """Return the machine of each pipeline's replica of this worker's stage. All of these replicas must call it.

    Args:
        groups: this worker's process groups.
        device: a device whose tensors the stage's group can send.

    Raises:
        ConfigurationError: machines cannot be told from each other.
    """
    by_rank = _gathered(this_host(), LONGEST_NAME, device, groups.stage)
    names = [by_rank[rank] for rank in groups.replicas().ranks]
    require_names(enumerate(names))
    return names


def require_names(hosts: Iterable[tuple[int, str]]) -> None:
    """Raise ConfigurationError unless the machines of pipelines, given with their names, can be told from each
    other."""
    if unnamed := {pipeline: name for pipeline, name in hosts if name.partition(".")[0] in ("", "localhost")}:
        raise ConfigurationError(
            f"hierarchy='hosts' needs to tell machines apart, but those of pipelines {[*unnamed]} are named "
            f"{next(iter(unnamed.values()))!r}. Give each machine a name, or set the environment variable "
            f"{HOST_VARIABLE} to one; or use hierarchy='flat'."
        )


def _gathered(name: str, longest: int, device: torch.device, group: dist.ProcessGroup | None) -> list[str]:
    """Gather a string from every member of a group, from all ranks if it is None."""
    mine = torch.zeros(longest, dtype=torch.uint8)
    written = name.encode()
    mine[: len(written)] = torch.frombuffer(bytearray(written), dtype=torch.uint8)
    everybody = [torch.empty_like(mine, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, mine.to(device), group=group)
    return [bytes(sent.tolist()).rstrip(b"\0").decode() for sent in everybody]
