"""Pipeline and data parallel training on unequal, shared GPUs: SDPipe as a Lightning strategy.

Importing this package imports neither torch nor lightning, so that the scheduler starts quickly and on machines
without them; the names below are loaded when they are first used.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_sdpipe.tested import VERSION

if TYPE_CHECKING:
    from lightning_sdpipe.errors import ConfigurationError as ConfigurationError
    from lightning_sdpipe.exchange.options import Exchange as Exchange
    from lightning_sdpipe.exchange.payloads import EightBit as EightBit
    from lightning_sdpipe.exchange.payloads import Full as Full
    from lightning_sdpipe.exchange.payloads import Half as Half
    from lightning_sdpipe.exchange.payloads import OneBit as OneBit
    from lightning_sdpipe.loop.weight_averaging import SDPipeWeightAveraging as SDPipeWeightAveraging
    from lightning_sdpipe.partition.pipeline_cut import Balanced as Balanced
    from lightning_sdpipe.policies.built_in import *  # noqa: F403
    from lightning_sdpipe.seeing.callback import RunMetrics as RunMetrics
    from lightning_sdpipe.strategy import SDPipeStrategy as SDPipeStrategy
    from lightning_sdpipe.sync import AllReduce as AllReduce
    from lightning_sdpipe.sync import DiLoCo as DiLoCo

__version__ = VERSION

_HOMES = {
    "ConfigurationError": "lightning_sdpipe.errors",
    "EightBit": "lightning_sdpipe.exchange.payloads",
    "Exchange": "lightning_sdpipe.exchange.options",
    "Full": "lightning_sdpipe.exchange.payloads",
    "Half": "lightning_sdpipe.exchange.payloads",
    "OneBit": "lightning_sdpipe.exchange.payloads",
    "Balanced": "lightning_sdpipe.partition.pipeline_cut",
    "RunMetrics": "lightning_sdpipe.seeing.callback",
    "SDPipeStrategy": "lightning_sdpipe.strategy",
    "SDPipeWeightAveraging": "lightning_sdpipe.loop.weight_averaging",
}


def _methods() -> Mapping[str, Any]:
    """Return the classes of the methods, by their own names."""
    return {kind.__name__: kind for kind in import_module("lightning_sdpipe.sync").METHODS}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return [*_HOMES, *_methods()]
    if name not in _HOMES:
        if name[:1].isupper() and name in (methods := _methods()):
            return methods[name]
        if name[:1].isupper() and (left := import_module("lightning_sdpipe.errors").LEFT.get(name)):
            raise ImportError(f"{name} has left lightning_sdpipe: {left}.")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
