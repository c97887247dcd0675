"""Which device each rank of a run is."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist

from lightning_sdpipe.errors import ConfigurationError

HOST_VARIABLE = "SDPIPE_HOST"
LONGEST_NAME = 255


def this_host() -> str:
    """The name of this machine, or what ``SDPIPE_HOST`` says.

    Raises:
        ConfigurationError: the name is too long to be sent.
    """
    name = os.environ.get(HOST_VARIABLE) or socket.gethostname()
    if len(name.encode()) > LONGEST_NAME:
        raise ConfigurationError(f"The host name {name!r} is too long; set {HOST_VARIABLE} to one of up to 255 bytes.")
    return name


def device_name(local_rank: int) -> str:
    """``host:index`` of this process's device."""
    return f"{this_host()}:{local_rank}"


def roll_call(local_rank: int, device: torch.device) -> list[str]:
    """``host:index`` of every rank; all ranks must call it.

    Args:
        local_rank: of this process, among those of its host.
        device: on which the default group can send tensors.
    """
    mine = torch.zeros(LONGEST_NAME + 1 + 10, dtype=torch.uint8)
    name = device_name(local_rank).encode()
    mine[: len(name)] = torch.frombuffer(bytearray(name), dtype=torch.uint8)
    everybody = [torch.empty_like(mine, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine.to(device))
    return [bytes(sent.tolist()).rstrip(b"\0").decode() for sent in everybody]
