"""Payloads: encodings of tensors in messages, which trade precision for bytes."""

import re
from collections.abc import Mapping

from lightning_sdpipe.exchange.payloads.eight_bit import EightBit, Modulo, Spread
from lightning_sdpipe.exchange.payloads.few_bits import OneBit
from lightning_sdpipe.exchange.payloads.payload import ErrorFeedback, Full, Half, Payload

FORMS: Mapping[str, Payload] = {
    "Full()": Full(),
    "Half()": Half(),
    "EightBit()": EightBit(),
    "EightBit(feedback=True)": EightBit(feedback=True),
    "OneBit()": OneBit(),
    "OneBit(momentum=…)": OneBit(momentum=0.9, after=100),
}
"""An example of each form of a payload that methods take or refuse, by the words that make it. Names, refusals, the
tables of the documentation and tests follow from this list."""

NAMES = {re.sub("(?<!^)(?=[A-Z])", "_", kind.__name__).lower(): kind for kind in map(type, FORMS.values())}
"""Payloads with their defaults by the names that users give, as in ``conf/exchange``."""

__all__ = ["FORMS", "NAMES", "EightBit", "ErrorFeedback", "Full", "Half", "Modulo", "OneBit", "Payload", "Spread"]
