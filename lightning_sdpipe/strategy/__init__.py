"""The Lightning strategy: :class:`SDPipeStrategy`, its options, and what it adds to Lightning's hooks.

The class is loaded when it is first used, so that a module that reads the options does not load what runs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_sdpipe.strategy.strategy import SDPipeStrategy as SDPipeStrategy

__all__ = ["SDPipeStrategy"]


def __getattr__(name: str) -> Any:
    if name != "SDPipeStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_sdpipe.strategy.strategy import SDPipeStrategy

    return SDPipeStrategy
