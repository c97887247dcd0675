"""The Lightning strategy :class:`SDPipeStrategy`: its options, and its additions to Lightning's hooks."""

from lightning_sdpipe.strategy.strategy import SDPipeStrategy as SDPipeStrategy
