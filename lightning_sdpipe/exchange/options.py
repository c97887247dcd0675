"""The user's options for how tensors move: ``SDPipeStrategy(exchange=Exchange(payload, overlap, hierarchy))``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from lightning_sdpipe.errors import ConfigurationError, check_choices, check_number, refusal
from lightning_sdpipe.exchange.payloads import Full, Payload

Overlap = Literal["none", "step", "free"]
Hierarchy = Literal["flat", "hosts"]
INTERVAL = 0.5


@dataclass(frozen=True)
class Exchange:
    """Options for how tensors move between the replicas of a stage; the method decides which replicas exchange, and
    when.

    Args:
        payload: encoding of tensors in messages, from :mod:`lightning_sdpipe.exchange.payloads`.
        overlap: ``"none"``: a worker waits for the mean. ``"step"``: the mean arrives while the next
            mini-batch is computed. ``"free"``: a thread averages at its own pace, beside training.
        hierarchy: ``"hosts"`` averages within each machine first, in full precision, and then across machines, each
            worker moving its own part; ``"flat"`` treats all workers alike.
        interval: with ``overlap="free"``, seconds from the end of one average to the beginning of the next.
    """

    payload: Payload = field(default_factory=Full)
    overlap: Overlap = "none"
    hierarchy: Hierarchy = "flat"
    interval: float = INTERVAL

    def __post_init__(self) -> None:
        given: object = self.payload
        if not isinstance(given, Payload):
            raise refusal("payload", given, "an object of lightning_sdpipe.exchange.payloads, such as EightBit()")
        check_choices(self)
        check_number("interval", self.interval, "seconds from 0", least=0, below=math.inf)
        if self.interval != INTERVAL and self.overlap != "free":
            raise ConfigurationError(
                f"interval={self.interval} has no meaning with overlap={self.overlap!r}. Leave it out, or use "
                "overlap='free'."
            )

    @property
    def is_full(self) -> bool:
        """True if values are sent unchanged."""
        return isinstance(self.payload, Full)

    @property
    def is_plain(self) -> bool:
        """True if values are sent unchanged, and to all workers alike."""
        return self.is_full and self.hierarchy == "flat"
