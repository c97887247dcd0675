"""How a tensor is written into a message, and read from it: precision traded for bytes."""

from lightning_sdpipe.exchange.payloads.cast import Full, Half
from lightning_sdpipe.exchange.payloads.eight_bit import EightBit
from lightning_sdpipe.exchange.payloads.modulo import Modulo, Spread
from lightning_sdpipe.exchange.payloads.one_bit import OneBit
from lightning_sdpipe.exchange.payloads.payload import ErrorFeedback, Payload
from lightning_sdpipe.exchange.payloads.top_k import TopK

NAMES = {"eight_bit": EightBit, "full": Full, "half": Half, "one_bit": OneBit, "top_k": TopK}
"""By which a user names a payload, with its defaults: as in ``conf/exchange``."""

__all__ = ["NAMES", "EightBit", "ErrorFeedback", "Full", "Half", "Modulo", "OneBit", "Payload", "Spread", "TopK"]
