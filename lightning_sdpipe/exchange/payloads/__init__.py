"""How a tensor is written into a message, and read from it: precision traded for bytes."""

from lightning_sdpipe.exchange.payloads.cast import Full, Half
from lightning_sdpipe.exchange.payloads.eight_bit import EightBit
from lightning_sdpipe.exchange.payloads.modulo import Modulo, Spread
from lightning_sdpipe.exchange.payloads.one_bit import OneBit
from lightning_sdpipe.exchange.payloads.payload import ErrorFeedback, Payload
from lightning_sdpipe.exchange.payloads.top_k import TopK

__all__ = ["EightBit", "ErrorFeedback", "Full", "Half", "Modulo", "OneBit", "Payload", "Spread", "TopK"]
