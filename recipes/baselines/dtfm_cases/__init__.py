"""The networks on which DT-FM was evaluated, as data: once as in its published code and once as printed, since the two
disagree; and the ten cities whose links the code has, and FluidStack's two sites (§10.5)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.placement.model import Block, even_stages
from lightning_sdpipe.placement.network import Network, read_network

Version = Literal["code", "paper"]

MICRO_BATCHES = 61
"""Micro-batches in a mini-batch of DT-FM's GPT3-XL: 1.25e5 tokens in sequences of 2048."""

STAGE_BYTES = 1.3e9 * 4 * 3 / 24
"""Bytes of the parameters of three of GPT3-XL's 24 layers, 4 bytes each."""

CUT_BYTES = 2024 * 2048 * 2 * (1.25e5 / 2048) / 2**30 * 1e9
"""Bytes of the activations of a mini-batch, as in the published code, which writes the hidden size of 2048 as 2024 and
takes GiB for GB."""


def case(number: int, version: Version = "code") -> Network:
    """Return the network of case 1 to 5.

    Raises:
        ConfigurationError: there is no such case.
    """
    return named(f"case{number}_{version}")


def named(name: str) -> Network:
    """Return the network ``"ten_cities"``, ``"fluidstack"``, or a case such as ``"case5_code"``.

    Raises:
        ConfigurationError: there is no such network.
    """
    folder = Path(__file__).parent
    path = folder / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.json")))
        raise ConfigurationError(f"There is no network {name!r}; there are {known}.")
    return read_network(path)


def stages() -> tuple[Block, ...]:
    """Return the eight stages, of three layers each, of the published code's pipelines."""
    return even_stages(8, STAGE_BYTES, CUT_BYTES)
