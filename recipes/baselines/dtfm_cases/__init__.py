"""The networks that DT-FM was evaluated on, as data: once as its published code has them and once as printed, since the
two disagree, besides ten cities of which the code has the links and FluidStack's two sites (§10.5)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.placement.model import Block, even_stages
from lightning_sdpipe.placement.network import Network, read_network

Version = Literal["code", "paper"]

MICRO_BATCHES = 61
"""Of a pipeline's mini-batch, in DT-FM's training of GPT3-XL: 1.25e5 tokens in sequences of 2048."""

STAGE_BYTES = 1.3e9 * 4 * 3 / 24
"""Of three of the 24 layers of GPT3-XL, in 4 bytes each."""

CUT_BYTES = 2024 * 2048 * 2 * (1.25e5 / 2048) / 2**30 * 1e9
"""Of the activations of a mini-batch, as in the published code: a hidden size of 2048 written as 2024, and GiB taken
for GB."""


def case(number: int, version: Version = "code") -> Network:
    """The network of case 1 to 5.

    Raises:
        ConfigurationError: there is no such case.
    """
    return named(f"case{number}_{version}")


def named(name: str) -> Network:
    """``"ten_cities"``, ``"fluidstack"``, or a case such as ``"case5_code"``.

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
    """Return the stages of three layers each in the published code, whose pipelines have eight of them."""
    return even_stages(8, STAGE_BYTES, CUT_BYTES)
