"""Payloads: encodings of tensors in messages, which trade precision for bytes."""

from lightning_sdpipe.exchange.payloads.eight_bit import EightBit, Modulo, Spread
from lightning_sdpipe.exchange.payloads.few_bits import OneBit
from lightning_sdpipe.exchange.payloads.payload import ErrorFeedback, Full, Half, Payload

NAMES = {"eight_bit": EightBit, "full": Full, "half": Half, "one_bit": OneBit}
"""Payloads with their defaults by the names that users give, as in ``conf/exchange``."""

__all__ = ["NAMES", "EightBit", "ErrorFeedback", "Full", "Half", "Modulo", "OneBit", "Payload", "Spread"]
