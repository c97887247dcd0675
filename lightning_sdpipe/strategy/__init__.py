"""The Lightning strategy: :class:`SDPipeStrategy`, its options, and what it adds to Lightning's hooks."""

from lightning_sdpipe.strategy.strategy import SDPipeStrategy as SDPipeStrategy
